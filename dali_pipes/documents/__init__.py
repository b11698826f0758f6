"""Where the documents of a corpus begin and end, and how they cut windows of its tokens into pieces."""

from dali_pipes.documents.delimiters import are_delimited
from dali_pipes.documents.documents import Documents, find_documents
from dali_pipes.documents.pieces import Pieces, chosen_rows, numbers_of, pieces_of_windows, some_rows, staged

__all__ = [
    "Documents",
    "Pieces",
    "are_delimited",
    "chosen_rows",
    "find_documents",
    "numbers_of",
    "pieces_of_windows",
    "some_rows",
    "staged",
]
