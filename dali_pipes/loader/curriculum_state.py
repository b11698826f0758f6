"""The part of a state that says how rows and optimizer steps have grown, and how a run goes on from it.

    "curriculum": {"before": 3000000, "segments": [[0, 0, 2048, 256], [1280, 320, 8192, 512]], "end": 1500000,
                   "lists": "93c1b7e0", "since": 0, "check": "0f3a52c1"}

before:   places of the run before the epoch
segments: of the epoch, up to the saved row: first row, first place, tokens of a row, rows of an optimizer step
end:      places of the epoch, with rows of several lengths
lengths:  with rows = "pack", of the epoch's packing windows up to the saved row: first window, tokens of a row
lists:    a hash of the configured lists
since:    the first epoch that had these lists; earlier ones cannot be located
check:    a hash of all of this and the saved position

Stages that come later are those of the configuration: they may change from run to run.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from dali_pipes.errors import StateError
from dali_pipes.loader.state_form import is_count, short
from dali_pipes.runtime.messages import counted
from dali_pipes.schedule import Position
from dali_pipes.schedule.curriculum import Curriculum, Segment


class SavedCurriculum(NamedTuple):
    """What a state says."""

    before: int
    segments: Sequence[Segment]
    since: int
    """The first epoch that had the lists of this run."""
    lengths: Sequence[tuple[int, int]] | None = None
    """Where the lengths of rows are those of packing windows."""


def curriculum_entry(curriculum: Curriculum, position: Position) -> dict[str, Any]:
    """The entry of a state. Does not block for rows that have been planned."""
    epoch, rows = position
    segments = [segment for segment in curriculum.segments(epoch) if segment.row < rows or not segment.row]
    end = {"end": curriculum.num_places(epoch)} if curriculum.cuts else {}
    entry = {"before": curriculum.places_before(epoch), "segments": [list(segment) for segment in segments], **end}
    entry |= {"lists": curriculum.lists, "since": min(curriculum.since, epoch)}
    if curriculum.growing is not None and curriculum.lengths is not None:
        begun = curriculum.growing.windows_begun(epoch, rows)
        entry["lengths"] = [list(length) for length in curriculum.lengths.in_epoch(epoch) if length[0] < begun]
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
        return SavedCurriculum(curriculum.places_before(position.epoch), [begin], position.epoch)
    if not _is_right(entry, curriculum, position):
        raise StateError(f"the state is damaged: curriculum is {short(entry)}; use an unchanged copy")
    segments, lengths = [Segment(*segment) for segment in entry["segments"]], entry.get("lengths")
    since = entry["since"] if entry["lists"] == curriculum.lists else position.epoch
    saved = SavedCurriculum(entry["before"], segments, since, None if lengths is None else [(w, n) for w, n in lengths])
    last = saved.segments[-1]
    left = -(position.rows - last.row) % last.global_batch
    if left % step_rows:
        raise StateError(
            f"the state was saved {counted(last.global_batch - left, 'row')} into an optimizer step of "
            f"{counted(last.global_batch, 'row')}; the remaining {counted(left, 'row')} are not a multiple of "
            f"the {counted(step_rows, 'row')} that all ranks take at a time. Save when loader.step_end is true, "
            "or resume with the ranks and batch_size of the saved run"
        )
    following = curriculum.continued(position.rows, saved.before, saved.segments)
    switch = next((segment.row for segment in following if segment.row > position.rows), None)
    size = [segment for segment in following if segment.row <= position.rows][-1].global_batch
    if size % step_rows and (switch is None or switch > position.rows + left):
        until = f"until row {switch:,}, where global_batch may change" if switch else "to its end"
        raise StateError(
            f"the state was saved in an epoch that goes on with optimizer steps of {counted(size, 'row')} {until}; "
            f"this is not a multiple of the {counted(step_rows, 'row')} of a step of all ranks: resume with ranks and "
            "a batch_size that divide it"
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
    if not (is_count(entry.get("since")) and entry["since"] <= position.epoch and isinstance(entry.get("lists"), str)):
        return False
    if entry.get("check") != _check_value(entry, position) or (curriculum.cuts and not is_count(entry.get("end"))):
        return False
    rows = entry["segments"]
    if not rows or not all(isinstance(row, list) and len(row) == 4 and all(map(is_count, row)) for row in rows):
        return False
    segments = [Segment(*row) for row in rows]
    if curriculum.growing is not None and not _are_lengths(entry.get("lengths"), curriculum.growing.seq_len):
        return False
    if segments[0][:2] != (0, 0) or segments[-1].row > position.rows:
        return False
    return curriculum.may_follow(segments)


def _are_lengths(lengths: Any, longest: int) -> bool:
    """Whether they can be first windows and tokens of a row; none before the first window has begun."""
    if not (isinstance(lengths, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in lengths)):
        return False
    if not all(is_count(window) and is_count(length) and 0 < length <= longest for window, length in lengths):
        return False
    windows = [window for window, _ in lengths]
    return windows[:1] in ([], [0]) and all(before < now for before, now in pairwise(windows))
