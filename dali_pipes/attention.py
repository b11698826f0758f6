"""Arguments of attention kernels, from a batch: the public path of `dali_pipes.adapters.attention`."""

from dali_pipes.adapters.attention import VarlenArguments, block_mask, varlen_args

__all__ = ["VarlenArguments", "block_mask", "varlen_args"]
