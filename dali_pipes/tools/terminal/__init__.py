"""Shows reports as text or JSON. Control characters in names and texts are escaped, never sent to the terminal."""

from dali_pipes.tools.terminal.batch_text import show_preview, show_row, show_samples, show_step
from dali_pipes.tools.terminal.console import output, show, show_json
from dali_pipes.tools.terminal.corpus_text import show_check, show_corpus
from dali_pipes.tools.terminal.mixture_text import show_mixture
from dali_pipes.tools.terminal.plan_text import show_plan
from dali_pipes.tools.terminal.preset_text import show_presets
from dali_pipes.tools.terminal.shuffle_text import show_shuffle
from dali_pipes.tools.terminal.watch_text import run_table, show_run

__all__ = [
    "output",
    "run_table",
    "show",
    "show_check",
    "show_corpus",
    "show_json",
    "show_mixture",
    "show_plan",
    "show_presets",
    "show_preview",
    "show_row",
    "show_run",
    "show_samples",
    "show_shuffle",
    "show_step",
]
