"""What to do with a state whose corpus has gained files: finish its epoch with the old ones, start the next with all.

saved with   a.bin  b.bin
now          a.bin  b.bin  c.bin        the files of the state come first, and 1 file was added after them
"""

from collections.abc import Mapping
from typing import Any

from dali_pipes.corpus import Corpus
from dali_pipes.loader.state_form import is_count

_MOST_NAMED = 4


def growth_advice(state: Mapping[str, Any], corpus: Corpus) -> str:
    """What to do, as text, with a state whose files are all in the corpus in the same order; "" for any other."""
    saved, count = state["corpus"], len(corpus.files)
    before, digests = saved.get("files"), str(saved.get("digests", "")).split()
    same_kind = saved.get("format") == corpus.format and saved.get("dtype") == corpus.dtype.name
    if not (same_kind and is_count(before) and 0 < before < count and is_count(state["epoch"])):
        return ""
    if list(corpus.digests_of(range(before))) == digests:
        added, where, place = list(range(before, count)), "come first", "after"
    else:
        added = _added(digests, corpus) if len(digests) == before else []
        where, place = "are still there, in the same order", "among"
    if not added:
        return ""
    listed = ", ".join(corpus.files[number].name for number in added[:_MOST_NAMED])
    more = f" and {len(added) - _MOST_NAMED:,} more" if len(added) > _MOST_NAMED else ""
    epoch = state["epoch"] + (state["rows"] != 0)
    unchecked = 'state.pop("check", None); ' * ("check" in state)
    code = f'state = loader.state_dict(); state["epoch"] = {epoch}; {unchecked}loader.load_state_dict(state)'
    new = f"{len(added):,} file{'s were' if len(added) > 1 else ' was'} added {place} them ({listed}{more})"
    return (
        f"The corpus has grown: the files of the state {where}, and {new}. To finish the epoch of the state, load it "
        f"into a loader whose corpus lists only the old files, in the same order. To start epoch {epoch} with all "
        f"{count:,} files: {code}"
    )


def _added(digests: list[str], corpus: Corpus) -> list[int]:
    """The files that are new, if those with these digests are in the corpus, in their order; else none."""
    added, wanted = [], iter([*digests, None])
    next_one = next(wanted)
    for number in range(len(corpus.files)):
        if corpus.digests_of([number]) == (next_one,):
            next_one = next(wanted)
        else:
            added.append(number)
    return added if next_one is None else []
