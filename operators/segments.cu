// segments: rows made of pieces of documents; segments.py describes it and holds the reference.
// Compiled by NVRTC, by nvcc and, for tests, by g++: no headers but ours, no shared memory, 64-bit positions.
#include "row.cuh"

// Where a position of a row lies: in `piece`, whose tokens take the positions [begin, end), or, where `piece` is the
// one behind the row's last, in the padding.
struct Place {
    long long piece, begin, end;
};

// Walks on from `place` to the piece that holds position t. Sums of eight, whose loads do not wait for each other, keep
// rows of very many pieces from taking a latency for each; neighbouring threads read the same lengths.
static __device__ __forceinline__ void walk(
    Place& place, long long t, long long last, long long seq_len, const long long* __restrict__ lengths)
{
    for (; place.piece + 8 <= last; place.piece += 8) {
        long long sum = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i)
            sum += lengths[place.piece + i];
        if (place.begin + sum > t)
            break;
        place.begin += sum;
    }
    for (; place.piece < last; ++place.piece) {
        place.end = place.begin + lengths[place.piece];
        if (place.end > t)
            return;
        place.begin = place.end;
    }
    place.end = seq_len;
}

// Outputs are (num_rows, seq_len), labels (num_rows, seq_len, label_count), each null where it is not wanted; as is
// learn, the loss mask of the tokens. Blocks are (along a row, rows), the grid (rows, parts of a row). With cu_seqlens
// or padded, the ground for `segment_bounds`: every bound is the end of the batch, padded[row] is whether a row has
// padding.
template <typename Token>
__global__ void segments(
    const Token* __restrict__ tokens, const unsigned char* __restrict__ learn, long long num_rows, long long seq_len,
    const long long* __restrict__ row_offsets, const long long* __restrict__ piece_starts,
    const long long* __restrict__ piece_lengths, const long long* __restrict__ piece_ends, long long pad_id,
    long long label_count, long long cross_boundaries, long long* __restrict__ input_ids,
    long long* __restrict__ labels, long long* __restrict__ position_ids, long long* __restrict__ segment_ids,
    long long* __restrict__ attention_mask, long long* __restrict__ loss_mask, int* __restrict__ cu_seqlens,
    long long cu_capacity, unsigned char* __restrict__ padded, wide limit, long long* bad)
{
    const long long num_places = num_rows * seq_len;
    const long long row_stride = (long long)gridDim.x * blockDim.y, stride = (long long)gridDim.y * blockDim.x;
    for (long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y; row < num_rows; row += row_stride) {
        const long long first = row_offsets[row], last = row_offsets[row + 1];
        Place place = {first, 0, 0};
        for (long long t = (long long)blockIdx.y * blockDim.x + threadIdx.x; t < seq_len; t += stride) {
            if (t >= place.end)
                walk(place, t, last, seq_len, piece_lengths);
            const bool padding = place.piece == last;
            const long long target = row * seq_len + t;
            const long long source = padding ? 0 : piece_starts[place.piece] + (t - place.begin);
            if (input_ids)
                input_ids[target] = padding ? pad_id : (long long)tokens[source];
            if (bad && !padding)
                count_bad(tokens + source, 1, target, BadIds{limit, bad});
            if (position_ids)
                position_ids[target] = padding ? 0 : t - place.begin;
            if (segment_ids)
                segment_ids[target] = padding ? 0 : place.piece - first + 1;
            if (attention_mask)
                attention_mask[target] = !padding;
            if (labels || loss_mask) {
                const long long readable = padding ? 0 : piece_ends[place.piece];
                const bool crosses = cross_boundaries && !padding && t + 1 == place.end && place.piece + 1 < last;
                const long long count = labels ? label_count : 1;
#pragma unroll 1
                for (long long j = 0; j < count; ++j) {
                    const long long ahead = crosses ? piece_starts[place.piece + 1] : source + j + 1;
                    const bool known = (crosses || ahead < readable) && (!learn || learn[ahead]);
                    const long long label = known ? (long long)tokens[ahead] : -100;
                    if (labels)
                        labels[target * label_count + j] = label;
                    if (loss_mask && j == 0)
                        loss_mask[target] = label != -100;
                }
            }
            if (padded && t == seq_len - 1)
                padded[row] = padding;
            if (cu_seqlens)
                for (long long i = target; i <= cu_capacity; i += num_places)
                    cu_seqlens[i] = (int)num_places;
        }
    }
}

// The bounds of all segments over the flattened rows, a thread a row, on the ground laid by `segments`. Bounds that do
// not fit are left out, not counted less.
__global__ void segment_bounds(
    const long long* __restrict__ row_offsets, const long long* __restrict__ piece_lengths,
    const unsigned char* __restrict__ padded, long long num_rows, long long seq_len, int* __restrict__ cu_seqlens,
    long long cu_capacity, long long* __restrict__ num_segments)
{
    const long long stride = (long long)gridDim.x * blockDim.x;
    for (long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x; row < num_rows; row += stride) {
        const long long first = row_offsets[row], last = row_offsets[row + 1];
        long long segment = first - row_offsets[0], bound = row * seq_len;
#pragma unroll 8
        for (long long before = 0; before < row; ++before)
            segment += padded[before];
        const long long end = segment + (last - first) + padded[row];
        if (cu_seqlens) {
#pragma unroll 8
            for (long long piece = first; piece < last; ++piece, ++segment) {
                if (segment < cu_capacity)
                    cu_seqlens[segment] = (int)bound;
                bound += piece_lengths[piece];
            }
            if (padded[row] && segment < cu_capacity)
                cu_seqlens[segment] = (int)bound;
        }
        if (num_segments && row == num_rows - 1)
            num_segments[0] = end;
    }
}
