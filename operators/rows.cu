// rows: cut, widen, shift and label token rows; rows.py describes it and holds the reference.
// Compiled by NVRTC, by nvcc and, for tests, by g++: no headers but ours, no shared memory, 64-bit positions.
#include "row.cuh"

// inputs and labels are (num_rows, seq_len). Row r begins at starts[r], or at first + r * step where starts is null.
template <typename Token, typename Output>
__global__ void rows(
    const Token* __restrict__ tokens, long long num_rows, long long seq_len, long long label_shift,
    Output* __restrict__ inputs, Output* __restrict__ labels, wide limit, long long* bad,
    const long long* __restrict__ starts, long long first, long long step)
{
    const long long row_stride = (long long)gridDim.x * blockDim.y;
    for (long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y; row < num_rows; row += row_stride) {
        const Token* source = tokens + (starts ? starts[row] : first + row * step);
        copy_row(source, row, seq_len, label_shift, false, inputs, labels, BadIds{limit, bad});
    }
}
