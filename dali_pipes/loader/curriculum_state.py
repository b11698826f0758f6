"""The part of a state that says how rows and optimizer steps have grown, and how a run goes on from it.

    "curriculum": {"before": 3000000, "segments": [[0, 0, 2048, 256], [1280, 320, 8192, 512]], "end": 1500000,
                   "check": "0f3a52c1"}

before:   places of the run before the epoch
segments: of the epoch, up to the saved row: first row, first place, tokens of a row, rows of an optimizer step
end:      places of the epoch, with rows of several lengths
check:    a hash of all of this and the saved position

Stages that come later are those of the configuration: they may change from run to run.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dali_pipes.errors import StateError
from dali_pipes.loader.state_change import is_count, short
from dali_pipes.runtime.messages import counted
from dali_pipes.schedule import Position
from dali_pipes.schedule.curriculum import Curriculum, Segment


class SavedCurriculum(NamedTuple):
    """What a state says."""

    before: int
    segments: Sequence[Segment]


def curriculum_entry(curriculum: Curriculum, position: Position) -> dict[str, Any]:
    """The entry of a state. Does not block for rows that have been planned."""
    epoch, rows = position
    segments = [segment for segment in curriculum.segments(epoch) if segment.row < rows or not segment.row]
    end = {"end": curriculum.num_places(epoch)} if curriculum.cuts else {}
    entry = {"before": curriculum.places_before(epoch), "segments": [list(segment) for segment in segments], **end}
    return {**entry, "check": _check_value(entry, position)}


def _check_value(entry: Mapping[str, Any], position: Position) -> str:
    said = [*position, {name: value for name, value in entry.items() if name != "check"}]
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:8]


def read_curriculum(entry: Any, curriculum: Curriculum, position: Position, step_rows: int) -> SavedCurriculum:
    """What the entry of a state says; None: the saved run did not have `global_batch`. Changes nothing.

    step_rows: rows of a step of all ranks in this run. Raises `StateError` for an entry that cannot be right, and for
               a run that cannot go on from there.
    """
    if entry is None and not curriculum.cuts:  # steps are counted from here on
        begin = Segment(0, 0, curriculum.seq_len, 1)
        return SavedCurriculum(curriculum.places_before(position.epoch), [begin])
    if not _is_right(entry, curriculum, position):
        raise StateError(f"the state is damaged: curriculum is {short(entry)}; use an unchanged copy")
    saved = SavedCurriculum(entry["before"], [Segment(*segment) for segment in entry["segments"]])
    last = saved.segments[-1]
    left = -(position.rows - last.row) % last.global_batch
    if left % step_rows:
        raise StateError(
            f"the state was saved {counted(last.global_batch - left, 'row')} into an optimizer step of "
            f"{counted(last.global_batch, 'row')}; the remaining {counted(left, 'row')} are not a multiple of "
            f"the {counted(step_rows, 'row')} that all ranks take at a time. Save when loader.step_end is true, "
            "or resume with the ranks and batch_size of the saved run"
        )
    if curriculum.cuts:
        _refuse_other_end(entry["end"], curriculum, position, saved.segments)
    return saved


def _refuse_other_end(saved: int, curriculum: Curriculum, position: Position, segments: Sequence[Segment]) -> None:
    """Raise `StateError` if the order of the rows that come next depends on an end of the epoch that has moved."""
    end = curriculum.num_places(position.epoch)
    if saved != end and any(
        curriculum.is_within_last_group(position.rows, segments, places) for places in (end, saved)
    ):
        raise StateError(
            f"the state was saved near the end of its epoch, which had {saved:,} rows of order_len tokens and now has "
            f"{end:,}, so the order of the next rows would change; use the total of the saved run"
        )


def _is_right(entry: Any, curriculum: Curriculum, position: Position) -> bool:
    if not (isinstance(entry, Mapping) and is_count(entry.get("before")) and isinstance(entry.get("segments"), list)):
        return False
    if entry.get("check") != _check_value(entry, position) or (curriculum.cuts and not is_count(entry.get("end"))):
        return False
    rows = entry["segments"]
    if not rows or not all(isinstance(row, list) and len(row) == 4 and all(map(is_count, row)) for row in rows):
        return False
    segments = [Segment(*row) for row in rows]
    if segments[0][:2] != (0, 0) or segments[-1].row > position.rows:
        return False
    return curriculum.may_follow(segments)
