"""The table that `repr(loader)` shows: made without planning, reading or waiting, so that a debugger or a notebook may
show a loader at any moment.

    TokenLoader
      corpus      data/train_000.bin and 102 more files: llmc, 10,300,000,000 tokens
      epoch       10,058,593 rows, 78,582 steps of 8 ranks x (16, 1024)
      next batch  epoch 0, step 1,234
      device      cuda:0, placement device
      data wait   0.3 % of 410.2 s: excellent; 412,345 tokens a second
"""

from dali_pipes.config import LoaderConfig
from dali_pipes.engine.build import BuiltSource
from dali_pipes.loader.announcements import corpus_text, steps_text
from dali_pipes.monitoring.display import Table
from dali_pipes.monitoring.stats import LoaderStats
from dali_pipes.schedule import Position

NOT_BUILT = Table("TokenLoader, not built", [])
_COLUMNS = 120
_NAMES = 14


def loader_table(
    config: LoaderConfig,
    built: BuiltSource,
    stats: LoaderStats,
    position: Position,
    *,
    was_left: bool,
    is_closed: bool,
) -> Table:
    """position: after the last batch handed out; was_left: its epoch was left early, so the next `for` begins another.

    `stats` needs only what the loader itself counts.
    """
    schedule, corpora = built.schedule, built.corpora
    epoch, step = position.epoch, schedule.step_number(position.rows)
    split = " of validation" if config.split == "validation" else ""
    where, objective = f"epoch {epoch}, step {step:,}", config.objective_line
    rows = [
        *(
            (f"source {name}" if name else "corpus", corpus_text(corpus, _COLUMNS - _NAMES))
            for name, corpus in corpora.items()
        ),
        (f"epoch{split}", steps_text(config, schedule, epoch)),
        *((("objective", objective),) if objective is not None else ()),
        ("next batch", f"the first of the next epoch; epoch {epoch} was left at step {step:,}" if was_left else where),
        ("device", f"{built.device_name}, placement {built.placement}"),
    ]
    if stats.batches:
        rows.append(("data wait", f"{stats.wait_line()}; {stats.tokens_per_s:,.0f} tokens a second"))
    return Table("TokenLoader, closed" if is_closed else "TokenLoader", rows)
