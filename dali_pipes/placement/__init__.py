"""Where a block's tokens are kept and gathered: host memory or a GPU."""
