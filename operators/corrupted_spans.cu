// corrupted_spans: span corruption of rows; corrupted_spans.py describes it and holds the reference.
// Compiled by NVRTC, by nvcc and, for tests, by g++: no headers but ours, no shared memory, 64-bit positions.

constexpr long long first_columns = 2;

// A row, and what is put into it. Part k is kept, span k is taken out; kept and noise are sums up to each.
template <typename Index>
struct Corrupted {
    const Index* ids;
    const Index* learn;
    const int* kept;
    const int* noise;
    long long count, mode, sentinel, step, end_id;

    __device__ long long noise_before(long long k) const { return k ? noise[k - 1] : 0; }
    __device__ long long inputs() const { return (mode >= 0) + kept[count - 1] + count; }
    __device__ long long targets() const { return noise[count - 1] + count; }
};

// Input `column` of those before the end.
template <typename Index>
static __device__ __forceinline__ Index input_at(const Corrupted<Index>& row, long long column)
{
    if (row.mode >= 0 && column-- == 0)
        return (Index)row.mode;
    long long low = 0, high = row.count - 1;  // the first sentinel at or after the column: that of k is at kept[k] + k
    while (low < high) {
        const long long middle = (low + high) / 2;
        if (row.kept[middle] + middle < column)
            low = middle + 1;
        else
            high = middle;
    }
    if (column == row.kept[low] + low)
        return (Index)(row.sentinel + row.step * low);
    return row.ids[column - low + row.noise_before(low)];
}

// Target `column` of those before the end, and whether it is learned.
template <typename Index>
static __device__ __forceinline__ Index target_at(const Corrupted<Index>& row, long long column, bool& learned)
{
    long long low = 0, high = row.count - 1;  // the last sentinel at or before the column
    while (low < high) {
        const long long middle = (low + high + 1) / 2;
        if (row.noise[middle - 1] + middle <= column)
            low = middle;
        else
            high = middle - 1;
    }
    const long long inside = column - row.noise_before(low) - low;
    learned = true;
    if (inside == 0)
        return (Index)(row.sentinel + row.step * low);
    const long long position = row.kept[low] + row.noise_before(low) + inside - 1;
    if (row.learn)
        learned = row.learn[position] != 0;
    return row.ids[position];
}

// ids and learn are (num_rows, seq_len), spans (num_rows, 2 + 2 most), encoder_ids (num_rows, encoder), decoder_* of
// width `decoder`, causal_* of width `causal`. Arrays that are not wanted are null, and so may learn be.
template <typename Index>
__global__ void corrupted_spans(
    const Index* __restrict__ ids, const int* __restrict__ spans, long long num_rows, long long seq_len, long long most,
    long long sentinel, long long step, long long start_id, long long end_id, long long pad_id, long long label_shift,
    long long encoder, long long decoder, long long causal, const Index* __restrict__ learn,
    Index* __restrict__ encoder_ids, Index* __restrict__ decoder_input_ids, Index* __restrict__ decoder_labels,
    Index* __restrict__ causal_ids, Index* __restrict__ causal_labels)
{
    const Index ignored = (Index)-100, padding = (Index)pad_id;
    const long long row_stride = (long long)gridDim.x * blockDim.y, stride = (long long)gridDim.y * blockDim.x;
    for (long long r = (long long)blockIdx.x * blockDim.y + threadIdx.y; r < num_rows; r += row_stride) {
        const int* about = spans + r * (first_columns + 2 * most);
        const Corrupted<Index> row{ids + r * seq_len,
                                   learn ? learn + r * seq_len : nullptr,
                                   about + first_columns,
                                   about + first_columns + most,
                                   about[0],
                                   about[1],
                                   sentinel,
                                   step,
                                   end_id};
        const long long inputs = row.count ? row.inputs() : 0, targets = row.count ? row.targets() : 0;
        const long long inputs_end = inputs + (row.count && end_id >= 0), all = targets + (row.count && end_id >= 0);
        const long long begin = (long long)blockIdx.y * blockDim.x + threadIdx.x;
        for (long long c = begin; encoder_ids && c < encoder; c += stride)
            encoder_ids[r * encoder + c] =
                c < inputs ? input_at(row, c) : c < inputs_end ? (Index)end_id : padding;
        for (long long c = begin; c < decoder; c += stride) {
            bool learned = c < all;
            Index target = learned ? (Index)end_id : padding;
            if (c < targets)
                target = target_at(row, c, learned);
            if (decoder_labels)
                decoder_labels[r * decoder + c] = learned ? target : ignored;
            if (decoder_input_ids && c + 1 < decoder)
                decoder_input_ids[r * decoder + c + 1] = target;
            if (decoder_input_ids && c == 0)
                decoder_input_ids[r * decoder] = row.count ? (Index)start_id : padding;
        }
        for (long long c = begin; c < causal; c += stride) {
            const long long column = c - inputs;
            bool learned = column >= 0 && column < all;
            Index id = learned ? (Index)end_id : padding;
            if (column < 0)
                id = input_at(row, c);
            else if (column < targets)
                id = target_at(row, column, learned);
            if (causal_ids)
                causal_ids[r * causal + c] = id;
            if (causal_labels && c >= label_shift)
                causal_labels[r * causal + c - label_shift] = learned ? id : ignored;
            if (causal_labels && c + label_shift >= causal)
                causal_labels[r * causal + c] = ignored;
        }
    }
}
