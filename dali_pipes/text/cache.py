"""Text that is tokenised when it is first opened, and kept in the user's cache folder for every start that follows.

    text-0123...cdef/          a finished run, or one that was broken off and goes on (`run_folder`)
    text-0123...cdef.lock      whoever makes the tokens holds it; the other processes wait

The name is a hash of the settings, of the tokenizer's file, and of the inputs' names, sizes, times of change and
sampled bytes.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dali_pipes.corpus.discovery.file_names import utf8_name
from dali_pipes.errors import ConfigError, CorpusReadError
from dali_pipes.runtime.locks import lock, unlock
from dali_pipes.runtime.user_cache import cache_folder, kept_name
from dali_pipes.text.encoder import TextEncoder
from dali_pipes.text.inputs import TextFile
from dali_pipes.text.notes import Notes
from dali_pipes.text.progress import show_progress
from dali_pipes.text.run_folder import MANIFEST
from dali_pipes.text.tokenize import Job, check_has_tokens, tokenize_files
from dali_pipes.text.tokenizer import end_of_text, load_tokenizer, read_tokenizer

_VERSION = 1


def kept_tokens(
    inputs: Sequence[TextFile],
    tokenizer: str | os.PathLike[str],
    eos_id: int | None,
    text_key: str,
    made_by: str,
    cache_dir: Path | None = None,
) -> tuple[Path, int]:
    """The folder with the tokens of `inputs`, in Megatron's layout, a document each; and the id behind each document.

    eos_id:    by default the tokenizer's end-of-text token.
    cache_dir: by default as for document offsets.

    Blocks while the tokens are made. At a later call nothing is read but a few pieces of each input and the file of the
    tokenizer. Raises ConfigError where nothing can be written, CorpusError where there is no token, and what
    `load_tokenizer`, `end_of_text` and `tokenize_files` raise.
    """
    file, content = read_tokenizer(tokenizer)
    directory, why_not = cache_folder([file.path for file in inputs], cache_dir)
    if directory is None:
        raise ConfigError(f"the tokens of the text cannot be kept: {why_not}. Name a folder in DALI_PIPES_CACHE.")
    key = [_VERSION, hashlib.sha256(content).hexdigest(), eos_id, text_key]
    facts = [(utf8_name(file.path.name), file.size, file.digest, file.modified_ns) for file in inputs]
    about = json.dumps([*key, facts])
    folder = directory / kept_name("text", about.encode())
    found = _finished(folder)
    if found is not None:
        check_has_tokens(found, inputs)
        return folder, found["settings"]["eos_id"]
    loaded = load_tokenizer(file)
    end = end_of_text(loaded)[1] if eos_id is None else eos_id
    job = Job(inputs, TextEncoder(loaded, end, ends_empty=False, text_key=text_key), "megatron")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        held, _ = lock(folder.with_suffix(".lock"))
        try:
            if _finished(folder) is None:
                # Without locks two processes may be at it at once: each in a folder of its own then.
                work = folder if held is not None else folder.with_suffix(f".{uuid.uuid4().hex}.tmp")
                with show_progress("tokenising", sum(file.size for file in inputs)) as advance:
                    summary = tokenize_files(job, work, made_by, advance=advance)
                for line in Notes.from_json(summary.notes).lines():
                    print(f"dali_pipes: {line}", file=sys.stderr)
                if work != folder:
                    _move(work, folder)
        finally:
            if held is not None:
                unlock(held)
    except CorpusReadError:
        raise
    except OSError as error:
        raise ConfigError(
            f"{directory}: the tokens of the text cannot be kept there: {error.strerror or error}. Name a folder that "
            "can be written in DALI_PIPES_CACHE, or make the tokens with `dali-pipes tokenize` and open those."
        ) from error
    return folder, end


def _finished(folder: Path) -> dict[str, Any] | None:
    """The manifest of a finished run, None before the end."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        is_whole = type(manifest["settings"]["eos_id"]) is int and type(manifest["tokens"]) is int
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return manifest if is_whole else None


def _move(work: Path, folder: Path) -> None:
    try:
        work.rename(folder)
    except OSError:
        # Another process was faster: the same tokens are there.
        if not (folder / MANIFEST).exists():
            raise
        with contextlib.suppress(OSError):
            shutil.rmtree(work)
