"""MosaicML Streaming sets (MDS): an `index.json` and shards of samples, whose columns hold tokens among other things.

    index.json             {"version": 2, "shards": [{"raw_data": {"basename": "shard.00000.mds", ...}, ...}, ...]}
    shard.00000.mds        ids between the sizes of each sample: an extent a sample, read in place
    shard.00001.mds.zstd   decompressed as a whole when a row needs it: one chunk

Each sample is a document, unless a column next to the ids says that it holds several (`columns.row_columns`). The index
has the number of samples of a shard; the number of ids of each sample is in the shard, before the ids, so it is looked
up once and cached. The order is that of the index.
"""

from dali_pipes.corpus.formats.mds.shard_set import inspect

__all__ = ["inspect"]
