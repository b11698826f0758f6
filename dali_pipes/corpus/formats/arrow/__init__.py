"""Arrow IPC files and streams (what Hugging Face datasets save) with a list column of ids, through pyarrow.

Ids that are neither compressed nor dictionary-encoded are read in place, like those of a flat file. pyarrow decodes
everything else, a batch at a time. Files are never memory-mapped.
"""

from dali_pipes.corpus.formats.arrow.batches import inspect

__all__ = ["inspect"]
