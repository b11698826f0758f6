"""Tell training from validation files by the words in their names, so that no run trains on validation data by
accident.

    fineweb_train_000001.bin   fineweb  train        train
    fineweb_val_000000.bin     fineweb  val          validation
    merges.bin                 merges                neither

A folder or a pattern that contains both kinds is refused; a list takes whatever it names. Words are runs of letters,
cut where capitals start, in the names of the files and of the folders below the one that all files share; a suffix
`data`, `set` or `split` is ignored. Words that all files have equally often are ignored: in test_train_1.bin and
test_val_1.bin the first word is the name of the whole. A file with words of both kinds is neither.
"""

import fnmatch
import functools
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from dali_pipes.errors import CorpusError
from dali_pipes.uris import FilePath, Uri

TRAIN = frozenset({"train", "training", "trn"})
VALIDATION = frozenset(
    {"dev", "eval", "evaluation", "heldout", "holdout", "test", "testing", "val", "valid", "validate", "validation"}
)
_KINDS = ("train", "validation")
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_OUT = re.compile(r"(held|hold)[-_ .](out)", re.IGNORECASE)


def refuse_mixed_splits(entry: str, found: Sequence[FilePath]) -> None:
    """Raise CorpusError if the folder or pattern `entry` contains files, the ones `found`, of both kinds."""
    if len(found) < 2:
        return
    # "s3:/" of "s3://bucket/a.bin", and "/bucket/a.bin" as a path
    lead = f"{found[0].partition('://')[0]}:/" if isinstance(found[0], Uri) else ""
    files = [Path(file[len(lead) :]) if isinstance(file, Uri) else file for file in found]
    base = Path(os.path.commonpath({os.path.dirname(file) for file in files}))
    prefix = os.path.join(base, "")
    words = [Counter(_words(str(file).removeprefix(prefix))) for file in files]
    shared = functools.reduce(Counter.__and__, words)
    kinds = [_kind(frozenset(found - shared)) for found in words]
    if not {"train", "validation"} <= set(kinds):
        return
    train, validation = ([file for file, kind in zip(files, kinds, strict=True) if kind == k] for k in _KINDS)
    one, other = _pattern(base, train, TRAIN - {*shared}), _pattern(base, validation, VALIDATION - {*shared})
    raise CorpusError(
        f"{entry!r} contains both training and validation files, such as {lead}{train[0]} and {lead}{validation[0]}. "
        f"Name one kind, such as {lead + one!r}, and read {lead + other!r} with a separate loader (shuffle = False, "
        "drop_last = False); to read both together, list them."
    )


def _kind(words: frozenset[str]) -> str | None:
    found = [kind for kind, names in zip(_KINDS, (TRAIN, VALIDATION), strict=True) if words & names]
    return found[0] if len(found) == 1 else None


def _pattern(base: Path, files: Sequence[Path], names: frozenset[str]) -> str:
    """A pattern for the files of one kind whose names share one of the words `names`."""
    if len(files) == 1:
        return str(files[0])
    first = files[0].relative_to(base)
    found = ((at, word) for at, part in enumerate(first.parts) for word in _words(part) if word in names)
    at, word = next(found, (-1, ""))
    if not word or word not in first.parts[at].lower():
        return str(files[0])
    if at < len(first.parts) - 1:
        return str(base.joinpath(*first.parts[: at + 1], "**", f"*{first.suffix}"))
    alike = [file.name for file in files if file.parent == files[0].parent and word in _words(file.name)]
    return str(files[0].with_name(alike[0] if len(alike) == 1 else _name_pattern(alike, word)))


def _name_pattern(names: Sequence[str], word: str) -> str:
    """A pattern from the common start and end of names, or from the word in them."""
    begin = os.path.commonprefix(names).rstrip("0123456789")  # noqa: RUF071 (of letters)
    end = os.path.commonprefix([name[::-1] for name in names])[::-1]  # noqa: RUF071
    pattern = f"{begin}*{end}"
    if word in _words(pattern) and all(fnmatch.fnmatchcase(name, pattern) for name in names):
        return pattern
    at = names[0].lower().index(word)
    return f"*{names[0][at : at + len(word)]}*{Path(names[0]).suffix}"


def _words(text: str) -> list[str]:
    return [_plain_word(word) for word in _WORD.findall(_OUT.sub(r"\1\2", text))]


@functools.lru_cache(maxsize=1024)  # thousands of files share their words
def _plain_word(word: str) -> str:
    word = word.lower()
    bare = re.sub(r"(data|sets?|split)$", "", word)
    return bare if bare in TRAIN | VALIDATION else word
