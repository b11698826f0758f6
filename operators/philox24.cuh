// The bijection on [0, n) of permute.py, for every kernel that needs it; permute.py describes it and holds the reference.

typedef unsigned int word;
typedef unsigned long long wide;

// One bijection, made by `permute.bijection` on the host and passed by value: a kernel's parameters lie in constant
// memory, where the round keys are operands of the rounds and take neither registers nor instructions.
struct Bijection {
    wide n;
    wide offset;
    word round_keys[24];
    int left_bits;
    int right_bits;
};

// 2 <= left_bits <= 31 and right_bits is left_bits or left_bits + 1, so no shift reaches its operand's width.
static __device__ __forceinline__ wide encrypt(wide value, const Bijection& bijection)
{
    const int left_bits = bijection.left_bits, right_bits = bijection.right_bits;
    const word left_mask = (word)((1ULL << left_bits) - 1);
    const word right_mask = (word)((1ULL << right_bits) - 1);
    const int spare = right_bits - left_bits;
    word left = (word)(value >> right_bits);
    word right = (word)value & right_mask;
#pragma unroll
    for (int round = 0; round < 24; ++round) {
        const wide product = 0xD2B74407B1CE6E93ULL * left;
        const word mixed = (word)(product >> 32) ^ right ^ bijection.round_keys[round];
        right = (((word)product << spare) | (right >> left_bits)) & right_mask;
        left = mixed & left_mask;
    }
    const wide domain_mask = (1ULL << (left_bits + right_bits)) - 1;
    return ((((wide)left << right_bits) | right) + bijection.offset) & domain_mask;
}

// Image of an index inside [0, n); a walk from outside may never come inside.
static __device__ __forceinline__ wide image_of(wide index, const Bijection& bijection)
{
    do {
        index = encrypt(index, bijection);
    } while (index >= bijection.n);
    return index;
}
