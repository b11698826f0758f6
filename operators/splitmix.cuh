// Output `number` of splitmix64, counted from 1, by its seed: what `splitmix64` of permute.py computes.
static __device__ __forceinline__ unsigned long long splitmix64(unsigned long long seed, unsigned long long number)
{
    unsigned long long word = seed + number * 0x9E3779B97F4A7C15ULL;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9ULL;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBULL;
    return word ^ (word >> 31);
}
