"""Row sources: which tokens of a corpus are in which row, and in which order."""
