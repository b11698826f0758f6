// permute: keyed bijection on [0, n); permute.py describes it and holds the reference.
// Compiled by NVRTC, by nvcc and, for tests, by g++: no headers but ours, no shared memory, 64-bit positions.
#include "philox24.cuh"

__global__ void permute(
    const long long* __restrict__ indices, long long count, const Bijection bijection, long long* __restrict__ images)
{
    const long long stride = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
        const wide index = (wide)indices[i];
        images[i] = index < bijection.n ? (long long)image_of(index, bijection) : -1;
    }
}
