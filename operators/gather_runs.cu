// gather_runs: runs of tokens, and ids between them, into a buffer; gather_runs.py describes it and holds the reference.
// Compiled by NVRTC, by nvcc and, for tests, by g++: no headers but ours, no shared memory, 64-bit positions.

// Launched in blocks of (along a run, runs) threads on a grid of (runs, parts of a run). The masks are null where
// every token is learned.
template <typename Token>
__global__ void gather_runs(
    const Token* __restrict__ tokens, const unsigned char* __restrict__ learn, long long num_runs,
    const long long* __restrict__ starts, const long long* __restrict__ lengths,
    const long long* __restrict__ targets, Token* __restrict__ out, unsigned char* __restrict__ out_learn)
{
    const long long run_stride = (long long)gridDim.x * blockDim.y, stride = (long long)gridDim.y * blockDim.x;
    for (long long run = (long long)blockIdx.x * blockDim.y + threadIdx.y; run < num_runs; run += run_stride) {
        const long long start = starts[run], length = lengths[run], target = targets[run];
        for (long long i = (long long)blockIdx.y * blockDim.x + threadIdx.x; i < length; i += stride) {
            out[target + i] = start < 0 ? (Token)(-1 - start) : tokens[start + i];
            if (learn)
                out_learn[target + i] = start < 0 ? 1 : learn[start + i];
        }
    }
}
