"""The loader that a trainer iterates: batches of tensors, state, and what is said on standard error."""
