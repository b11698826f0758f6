"""Shards of `dali-pipes tokenize` as calls, for any executor: the public path of `dali_pipes.text.shard_task`."""

from dali_pipes.text.shard_task import TokenizeConfig, publish_shards, tokenize_shard
from dali_pipes.text.tokenize import Summary

__all__ = ["Summary", "TokenizeConfig", "publish_shards", "tokenize_shard"]
