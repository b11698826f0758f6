// segments: rows built from pieces of documents; segments.py describes it and holds the reference.
// Compiled by NVRTC, by nvcc and, for tests, by g++: no headers but ours, no shared memory, 64-bit positions.
#include "row.cuh"

// Both kernels are launched in blocks of (along a row, rows) threads on a grid of (rows, parts of a row). Rows are those
// of a block of batches, `batch_rows` in each but the last, which may have fewer. `padded` has a byte for each row,
// whether it has padding, and for each batch `batch_words` words; cu_seqlens is (batches, cu_capacity + 1).

constexpr long long most_walks = 128;

// Where in its row each piece begins, and which rows have padding: what `segments` looks up. Lays the ground for its
// cu_seqlens, too: every bound is the end of the batch. A few threads of a row share its pieces, each adds up the
// lengths before its own. Sums of eight, whose loads do not wait for each other, keep rows of very many pieces from
// taking a latency for each; neighboring threads read the same lengths.
__global__ void piece_begins(
    const long long* __restrict__ row_offsets, const long long* __restrict__ piece_lengths, long long num_rows,
    long long seq_len, long long batch_rows, long long batch_words, long long* __restrict__ begins,
    wide* __restrict__ padded, int* __restrict__ cu_seqlens, long long cu_capacity)
{
    const long long row_stride = (long long)gridDim.x * blockDim.y, stride = (long long)gridDim.y * blockDim.x;
    const long long lane = (long long)blockIdx.y * blockDim.x + threadIdx.x;
    for (long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y; row < num_rows; row += row_stride) {
        const long long first = row_offsets[row], last = row_offsets[row + 1];
        const long long batch = row / batch_rows, row_in_batch = row - batch * batch_rows;
        const long long walks = stride < most_walks ? stride : most_walks;
        const long long each = (last - first + walks - 1) / walks;
        long long piece = first, begin = 0;
        const long long mine = first + lane * each;
        if (mine < last || lane == 0) {
            for (; piece + 8 <= mine; piece += 8) {
                long long sum = 0;
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    sum += piece_lengths[piece + i];
                begin += sum;
            }
            for (; piece < mine; ++piece)
                begin += piece_lengths[piece];
            for (; piece < mine + each && piece < last; ++piece) {
                begins[piece] = begin;
                begin += piece_lengths[piece];
            }
            if (piece == last)
                ((unsigned char*)(padded + batch * batch_words))[row_in_batch] = begin < seq_len;
        }
        if (cu_seqlens) {
            const long long before = batch * batch_rows;
            const long long rows = num_rows - before < batch_rows ? num_rows - before : batch_rows;
            const long long num_places = rows * seq_len;
            int* bounds = cu_seqlens + batch * (cu_capacity + 1);
            for (long long t = lane; t < seq_len; t += stride)
                for (long long i = row_in_batch * seq_len + t; i <= cu_capacity; i += num_places)
                    bounds[i] = (int)num_places;
        }
    }
}

// The rows with padding among the first `count` of a batch. Eight at a time, since the bytes are 0 or 1.
static __device__ __forceinline__ long long count_padded(const wide* __restrict__ padded, long long count)
{
    const wide ones = 0x0101010101010101ULL;
    long long found = 0;
#pragma unroll 8
    for (long long i = 0; i < count / 8; ++i)
        found += (long long)((padded[i] * ones) >> 56);
    if (count % 8)
        found += (long long)(((padded[count / 8] & ((1ULL << (count % 8 * 8)) - 1)) * ones) >> 56);
    return found;
}

// The last piece of [first, last), one at least, that begins at or before position t of its row.
static __device__ __forceinline__ long long piece_at(
    long long t, long long first, long long last, const long long* __restrict__ begins)
{
    while (last - first > 1) {
        const long long middle = first + (last - first) / 2;
        if (begins[middle] <= t)
            first = middle;
        else
            last = middle;
    }
    return first;
}

// Outputs are (num_rows, seq_len), labels (num_rows, seq_len, label_count), num_segments (batches), each null where it
// is not wanted; as is learn, the loss mask of the tokens. Bounds that do not fit are left out, not counted less.
template <typename Token, typename Index, typename Mask>
__global__ void segments(
    const Token* __restrict__ tokens, const unsigned char* __restrict__ learn, long long num_rows, long long seq_len,
    long long batch_rows, long long batch_words, const long long* __restrict__ row_offsets,
    const long long* __restrict__ piece_starts, const long long* __restrict__ piece_lengths,
    const long long* __restrict__ piece_ends, const long long* __restrict__ begins, const wide* __restrict__ padded,
    long long pad_id, long long label_count, long long cross_boundaries, Index* __restrict__ input_ids,
    Index* __restrict__ labels, Index* __restrict__ position_ids, Index* __restrict__ segment_ids,
    Mask* __restrict__ attention_mask, Mask* __restrict__ loss_mask, int* __restrict__ cu_seqlens,
    long long cu_capacity, long long* __restrict__ num_segments, wide limit, long long* bad)
{
    const long long row_stride = (long long)gridDim.x * blockDim.y, stride = (long long)gridDim.y * blockDim.x;
    for (long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y; row < num_rows; row += row_stride) {
        const long long first = row_offsets[row], last = row_offsets[row + 1];
        // Of the piece that holds position t; behind the last one begins the padding, whose `piece` is `last`.
        long long piece = first, begin = 0, end = 0;
        for (long long t = (long long)blockIdx.y * blockDim.x + threadIdx.x; t < seq_len; t += stride) {
            if (t >= end) {
                piece = first == last ? last : piece_at(t, piece, last, begins);
                begin = piece == last ? 0 : begins[piece];
                end = piece == last ? 0 : begin + piece_lengths[piece];
                if (t >= end) {
                    piece = last;
                    begin = end;
                    end = seq_len;
                }
            }
            const bool padding = piece == last;
            const long long target = row * seq_len + t;
            const long long source = padding ? 0 : piece_starts[piece] + (t - begin);
            if (input_ids)
                input_ids[target] = padding ? (Index)pad_id : (Index)tokens[source];
            if (bad && !padding)
                count_bad(tokens + source, 1, target, BadIds{limit, bad});
            if (position_ids)
                position_ids[target] = padding ? 0 : (Index)(t - begin);
            if (segment_ids)
                segment_ids[target] = padding ? 0 : (Index)(piece - first + 1);
            if (attention_mask)
                attention_mask[target] = !padding;
            if (labels || loss_mask) {
                // Ids that are labels of the piece's last tokens and that the row does not show; masked ones, too.
                if (bad && !padding && t + 1 == end && (!cross_boundaries || piece + 1 == last)) {
                    const long long behind = source + 1, left = piece_ends[piece] - behind;
                    const long long labeled = labels ? label_count : 1;
#pragma unroll 1
                    for (long long i = 0; i < labeled && i < left; ++i)
                        count_bad(tokens + behind + i, 1, target, BadIds{limit, bad});
                }
                // Of the piece that the label lies in: where it ends in the row, and how far its tokens are off.
                long long ahead_piece = piece, ahead_end = end, shift = source - t;
                long long readable = padding ? 0 : piece_ends[piece];
                const long long count = labels ? label_count : 1;
#pragma unroll 1
                for (long long j = 0; j < count; ++j) {
                    const long long place = t + j + 1;
                    // A piece has a token at least, so one step is enough.
                    if (cross_boundaries && place == ahead_end && ahead_piece + 1 < last) {
                        ++ahead_piece;
                        shift = piece_starts[ahead_piece] - ahead_end;
                        ahead_end += piece_lengths[ahead_piece];
                        readable = piece_ends[ahead_piece];
                    }
                    const long long ahead = shift + place;
                    const bool known = ahead < readable && (!learn || learn[ahead]);
                    const long long label = known ? (long long)tokens[ahead] : -100;
                    if (labels)
                        labels[target * label_count + j] = (Index)label;
                    if (loss_mask && j == 0)
                        loss_mask[target] = label != -100;
                }
            }
            // The division that finds the batch is left to the few threads that need it.
            if ((cu_seqlens && t == begin) || (num_segments && t == seq_len - 1)) {
                const long long batch = row / batch_rows, before = batch * batch_rows;
                const long long segment =
                    piece - row_offsets[before] + count_padded(padded + batch * batch_words, row - before);
                if (cu_seqlens && t == begin && segment < cu_capacity)
                    cu_seqlens[batch * (cu_capacity + 1) + segment] = (int)((row - before) * seq_len + t);
                if (num_segments && t == seq_len - 1 && (row + 1 == num_rows || row + 1 == before + batch_rows))
                    num_segments[batch] = segment + 1;
            }
        }
    }
}
