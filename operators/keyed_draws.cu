// keyed_draws: random numbers by the keys of rows; keyed_draws.py describes it and holds the reference.
// Compiled by NVRTC, by nvcc and, for tests, by g++: no headers but ours, no shared memory, 64-bit positions.
#include "splitmix.cuh"

// draws is (num_rows, seq_len); the key of row r is keys[r * key_step].
__global__ void keyed_draws(
    const unsigned long long* __restrict__ keys, long long key_step, long long num_rows, long long seq_len,
    unsigned long long stream, unsigned int* __restrict__ draws)
{
    const long long row_stride = (long long)gridDim.x * blockDim.y, stride = (long long)gridDim.y * blockDim.x;
    for (long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y; row < num_rows; row += row_stride) {
        const unsigned long long seed = splitmix64(keys[row * key_step], stream);
        for (long long t = (long long)blockIdx.y * blockDim.x + threadIdx.x; t < seq_len; t += stride)
            draws[row * seq_len + t] = (unsigned int)(splitmix64(seed, (unsigned long long)t + 1) >> 32);
    }
}
