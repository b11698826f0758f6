// goldfish: which tokens are never labels, by a hash; goldfish.py describes it and holds the reference.
// Compiled by NVRTC, by nvcc and, for tests, by g++: no headers but ours, no shared memory, 64-bit positions.
#include "splitmix.cuh"

constexpr unsigned long long base = 0x9E3779B97F4A7C15ULL;

// lookback is (num_pieces, 3); loss_mask is null where every token may be a label.
template <typename Token>
__global__ void goldfish(
    const Token* __restrict__ tokens, const long long* __restrict__ piece_starts,
    const long long* __restrict__ lookback, long long num_pieces, long long h, unsigned long long threshold,
    const unsigned char* __restrict__ loss_mask, unsigned char* __restrict__ out)
{
    const long long piece_stride = (long long)gridDim.x * blockDim.y, stride = (long long)gridDim.y * blockDim.x;
    for (long long piece = (long long)blockIdx.x * blockDim.y + threadIdx.y; piece < num_pieces;
         piece += piece_stride) {
        const long long before = lookback[3 * piece], inside = lookback[3 * piece + 1];
        const long long written = lookback[3 * piece + 2], start = piece_starts[piece];
        for (long long i = (long long)blockIdx.y * blockDim.x + threadIdx.x; i < written; i += stride) {
            const long long place = start + i;
            bool learned = !loss_mask || loss_mask[place];
            if (learned && i < inside && i + before >= h) {
                unsigned long long sum = 0;
#pragma unroll 1
                for (long long ahead = h; ahead > 0; --ahead)  // Horner's rule: the farthest has the highest power
                    sum = (sum + splitmix64((unsigned long long)(long long)tokens[place - ahead], 1)) * base;
                learned = (splitmix64(sum, 1) >> 32) >= threshold;
            }
            out[place] = (unsigned char)learned;
        }
    }
}
