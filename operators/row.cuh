// One row, from the tokens to its inputs and labels: what rows.cu and shuffled_rows.cu share. Both launch blocks of
// (along a row, rows) threads on a grid of (rows, pieces of a row).

typedef unsigned long long wide;

template <typename Value, int width>
struct alignas(sizeof(Value) * width) Pack {
    Value values[width];
};

// Where ids outside [0, limit) are counted: counted[0] += their number, counted[1] = min(counted[1], position of the
// first). No check where `counted` is null.
struct BadIds {
    wide limit;
    long long* counted;
};

// A negative id is a huge one without its sign, and the limit is 2**63 at most: one comparison finds both kinds.
static __device__ __forceinline__ bool is_bad(long long id, wide limit)
{
    return (wide)id >= limit;
}

template <typename Token>
static __device__ void count_bad(const Token* tokens, long long count, long long position, const BadIds& bad)
{
#pragma unroll 1
    for (long long i = 0; i < count; ++i) {
        if (is_bad((long long)tokens[i], bad.limit)) {
            atomicAdd((wide*)bad.counted, 1ULL);
            atomicMin(bad.counted + 1, position + i);
        }
    }
}

// `width` neighboring tokens a thread, neighboring threads side by side: stores of a whole Pack, coalesced. The token
// that a thread needs beyond its own, as the last label, is its neighbour's first: a cache hit. Loads stay as wide as a
// token, since a row begins at any token. `position` is that of the row's first token among those counted.
template <int width, typename Token, typename Output>
static __device__ __forceinline__ void copy_pieces(
    const Token* __restrict__ source, long long seq_len, long long label_shift, bool padding,
    Output* __restrict__ inputs, Output* __restrict__ labels, const BadIds& bad, long long position)
{
    const long long step = (long long)gridDim.y * blockDim.x * width;
    for (long long t = ((long long)blockIdx.y * blockDim.x + threadIdx.x) * width; t < seq_len; t += step) {
        Token tokens[width + 1];
#pragma unroll
        for (int i = 0; i < width; ++i)
            tokens[i] = source[t + i];
        tokens[width] = source[t + width - 1 + label_shift];
        Pack<Output, width> input, label;
        bool any_bad = is_bad((long long)tokens[width], bad.limit);
#pragma unroll
        for (int i = 0; i < width; ++i) {
            const Token next = label_shift || i + 1 == width ? tokens[i + 1] : tokens[i];
            input.values[i] = (Output)tokens[i];
            label.values[i] = padding ? (Output)-100 : (Output)next;
            any_bad |= is_bad((long long)tokens[i], bad.limit);
        }
        *(Pack<Output, width>*)(inputs + t) = input;
        *(Pack<Output, width>*)(labels + t) = label;
        if (bad.counted && any_bad) {
            const bool last = t + width == seq_len;  // whose thread answers for the token behind the inputs, too
            count_bad(source + t, width + (last ? label_shift : 0), position + t, bad);
        }
    }
}

// One row of the results. Stores have 16 bytes where both results and all their rows are aligned to that.
template <typename Token, typename Output>
static __device__ __forceinline__ void copy_row(
    const Token* __restrict__ source, long long row, long long seq_len, long long label_shift, bool padding,
    Output* __restrict__ inputs, Output* __restrict__ labels, const BadIds& bad)
{
    constexpr int width = 16 / sizeof(Output);
    const long long target = row * seq_len, position = row * (seq_len + label_shift);
    if ((((wide)inputs | (wide)labels) & 15) == 0 && seq_len % width == 0)
        copy_pieces<width>(source, seq_len, label_shift, padding, inputs + target, labels + target, bad, position);
    else
        copy_pieces<1>(source, seq_len, label_shift, padding, inputs + target, labels + target, bad, position);
}
