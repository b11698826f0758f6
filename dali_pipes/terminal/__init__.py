"""Reports on a terminal, in a pipe or as JSON: names and texts of the data are shown, never obeyed."""

from dali_pipes.terminal.batch_text import show_batch, show_preview, show_row
from dali_pipes.terminal.console import ends_well, show_json
from dali_pipes.terminal.corpus_text import show_check, show_corpus

__all__ = [
    "ends_well",
    "show_batch",
    "show_check",
    "show_corpus",
    "show_json",
    "show_preview",
    "show_row",
]
