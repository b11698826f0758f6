// shuffled_rows: the rows of an epoch's order, from tokens in device memory; shuffled_rows.py describes it.
// Compiled by NVRTC, by nvcc and, for tests, by g++: no headers but ours, no shared memory, 64-bit positions.
#include "philox24.cuh"
#include "row.cuh"

// inputs and labels are (num_rows, seq_len), row_ids (num_rows) or null. bijection.left_bits is 0 for the order that is
// not shuffled. All threads of a row compute its place, so that none waits for another. Windows lie in slots where
// slot_rows is not 0.
template <typename Token, typename Output>
__global__ void shuffled_rows(
    const Token* __restrict__ tokens, long long num_rows, long long seq_len, long long label_shift,
    Output* __restrict__ inputs, Output* __restrict__ labels, wide limit, long long* bad,
    const Bijection bijection, long long first, long long row_step, long long begin, long long origin,
    long long stride, wide slot_rows, long long slot_tokens, wide short_end, wide missing,
    long long* __restrict__ row_ids)
{
    const long long row_stride = (long long)gridDim.x * blockDim.y;
    for (long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y; row < num_rows; row += row_stride) {
        const long long id = first + row * row_step;
        const bool padding = (wide)(id - begin) >= bijection.n;
        wide window = padding ? 0 : (wide)(id - begin);
        if (bijection.left_bits)
            window = image_of(window, bijection);
        const Token* source = tokens + origin;
        if (slot_rows) {
            if (window >= short_end)
                window += missing;
            const wide slot = window / slot_rows;
            source += (long long)slot * slot_tokens;
            window -= slot * slot_rows;
        }
        source += (long long)window * stride;
        copy_row(source, row, seq_len, label_shift, padding, inputs, labels, BadIds{limit, bad});
        if (row_ids && threadIdx.x == 0 && blockIdx.y == 0)
            row_ids[row] = padding ? -1 : id;
    }
}
