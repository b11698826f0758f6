// permute: keyed bijection on [0, n); permute.py describes it and holds the reference.
// Compiled by NVRTC, by nvcc and, for tests, by g++: no headers, no shared memory, 64-bit positions.

typedef unsigned int word;
typedef unsigned long long wide;

// Round keys are made where they are used: 24 of them kept for the cycle walk would cost 24 registers a thread.
static __device__ __forceinline__ wide splitmix64(wide& state)
{
    state += 0x9E3779B97F4A7C15ULL;
    wide mixed = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9ULL;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBULL;
    return mixed ^ (mixed >> 31);
}

// 2 <= left_bits <= 31 and right_bits is left_bits or left_bits + 1, so no shift reaches its operand's width.
static __device__ __forceinline__ wide encrypt(wide value, wide key, int left_bits, int right_bits)
{
    const word left_mask = (word)((1ULL << left_bits) - 1);
    const word right_mask = (word)((1ULL << right_bits) - 1);
    const int spare = right_bits - left_bits;
    word left = (word)(value >> right_bits);
    word right = (word)value & right_mask;
    for (int round = 0; round < 24; ++round) {
        const wide product = 0xD2B74407B1CE6E93ULL * left;
        const word mixed = (word)(product >> 32) ^ right ^ (word)(splitmix64(key) >> 32);
        right = (((word)product << spare) | (right >> left_bits)) & right_mask;
        left = mixed & left_mask;
    }
    const wide domain_mask = (1ULL << (left_bits + right_bits)) - 1;
    return ((((wide)left << right_bits) | right) + splitmix64(key)) & domain_mask;
}

__global__ void permute(
    const long long* indices, long long count, wide n, wide key, int left_bits, int right_bits, long long* images)
{
    const long long stride = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
        wide image = (wide)indices[i];
        // A walk from outside [0, n) may never come inside, so such an index is answered instead of walked.
        if (image >= n) {
            images[i] = -1;
            continue;
        }
        do {
            image = encrypt(image, key, left_bits, right_bits);
        } while (image >= n);
        images[i] = (long long)image;
    }
}
