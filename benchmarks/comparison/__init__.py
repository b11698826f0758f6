"""The parts of `benchmarks/compare.py`: the same batches through other loaders, measured the same way."""
