// rows: cut, widen, shift and label token rows; rows.py describes it and holds the reference.
// Compiled by NVRTC, by nvcc and, for tests, by g++: no headers, no shared memory, 64-bit positions.

// inputs and labels are (num_rows, seq_len). Row r begins at starts[r], or at first + r * step where starts is null.
// Neighbouring threads take neighbouring tokens. A token is needed twice, as an input and as the label before it; the
// second read is a cache hit, since the same block makes it in the same pass.
template <typename Token, typename Output>
__global__ void rows(
    const Token* tokens, const long long* starts, long long first, long long step, long long num_rows,
    long long seq_len, long long label_shift, Output* inputs, Output* labels)
{
    const long long row_stride = (long long)gridDim.y * blockDim.y;
    const long long stride = (long long)gridDim.x * blockDim.x;
    for (long long row = (long long)blockIdx.y * blockDim.y + threadIdx.y; row < num_rows; row += row_stride) {
        const Token* source = tokens + (starts ? starts[row] : first + row * step);
        const long long target = row * seq_len;
        for (long long t = (long long)blockIdx.x * blockDim.x + threadIdx.x; t < seq_len; t += stride) {
            inputs[target + t] = (Output)source[t];
            labels[target + t] = (Output)source[t + label_shift];
        }
    }
}
