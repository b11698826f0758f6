"""Hugging Face's `Trainer` on a `TokenLoader`: the public path of `dali_pipes.adapters.huggingface`."""

from dali_pipes.adapters.huggingface import CALLBACK, Batches, EndlessBatches, loader_trainer

__all__ = ["CALLBACK", "Batches", "EndlessBatches", "loader_trainer"]
