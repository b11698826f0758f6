// noised_rows: hide ids of rows by keyed draws; noised_rows.py describes it and holds the reference.
// Compiled by NVRTC, by nvcc and, for tests, by g++: no headers but ours, no shared memory, 64-bit positions.
#include "splitmix.cuh"

constexpr unsigned char special = 1;  // any other bit means that the id begins a word
constexpr long long row_columns = 5;

static __device__ __forceinline__ unsigned char flags_of(
    long long id, const unsigned char* __restrict__ id_flags, long long num_flags)
{
    return id >= 0 && id < num_flags ? id_flags[id] : (unsigned char)0;
}

// ids, out, learn, masked and loss_mask are (num_rows, seq_len), labels (num_rows, seq_len, label_count), rows
// (num_rows, 5). learn, out, masked, loss_mask and id_flags are null where they are not wanted.
template <typename Index, typename Mask>
__global__ void noised_rows(
    const Index* __restrict__ ids, const long long* __restrict__ rows, long long num_rows, long long seq_len,
    long long number, long long copies, long long mask_id, unsigned long long random_below,
    unsigned long long keep_below, unsigned long long num_random, long long whole_words, long long own_labels,
    long long label_shift, long long label_count, const unsigned char* __restrict__ id_flags, long long num_flags,
    const Index* __restrict__ learn, Index* __restrict__ out, Index* __restrict__ labels, Mask* __restrict__ masked,
    Mask* __restrict__ loss_mask)
{
    const long long row_stride = (long long)gridDim.x * blockDim.y, stride = (long long)gridDim.y * blockDim.x;
    for (long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y; row < num_rows; row += row_stride) {
        const long long* about = rows + row * row_columns;
        const unsigned long long key = (unsigned long long)about[0], rate = (unsigned long long)about[2];
        const long long length = about[1], prefix = copies ? about[4] : 0;
        const bool active = about[3] == number;
        if (!active && !copies)
            continue;
        const Index* own = ids + row * seq_len;
        for (long long t = (long long)blockIdx.y * blockDim.x + threadIdx.x; t < seq_len; t += stride) {
            const long long target = row * seq_len + t;
            const Index id = own[t];
            bool chosen = false;
            Index value = id;
            if (out && active && rate && t < length && !(flags_of(id, id_flags, num_flags) & special) &&
                (!learn || learn[target])) {
                long long first = t;
                if (whole_words)
                    while (first > 0 && !flags_of(own[first], id_flags, num_flags) &&
                           !(flags_of(own[first - 1], id_flags, num_flags) & special))
                        --first;
                chosen = (splitmix64(key, 2 * (unsigned long long)first + 1) >> 32) < rate;
            }
            if (chosen) {
                const unsigned long long action =
                    splitmix64(key, 2 * (unsigned long long)t + 1) & 0xFFFFFFFFULL;
                if (action < random_below)
                    value = (Index)(((splitmix64(key, 2 * (unsigned long long)t + 2) >> 32) * num_random) >> 32);
                else if (action >= keep_below)
                    value = (Index)mask_id;
            }
            if (out)
                out[target] = value;
            if (masked && out)
                masked[target] = (Mask)chosen;
            const bool writes_own = out && active && own_labels;
            if (writes_own)
                labels[target] = chosen ? id : (Index)-100;
            for (long long j = 0; j < label_count && t + label_shift + j < prefix; ++j)
                labels[target * label_count + j] = (Index)-100;
            if (loss_mask && (writes_own || prefix > 0 || (active && own_labels)))
                loss_mask[target] = (Mask)(labels[target * label_count] != (Index)-100);
        }
    }
}
