"""Text that is tokenized when it is first opened, and then kept in the user's cache folder.

    text-0123...cdef/          a finished run, or an interrupted one that is continued (`run_folder`)
    text-0123...cdef.lock      held by the process that tokenizes; the others wait

The name is a hash of the settings, the tokenizer file, and the names, sizes, modification times and sampled bytes of
the inputs.
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
from dali_pipes.corpus.discovery.manifests import MANIFEST
from dali_pipes.errors import ConfigError, CorpusReadError
from dali_pipes.runtime.locks import locked
from dali_pipes.runtime.user_cache import cache_folder, kept_name
from dali_pipes.text.encoder import TextEncoder
from dali_pipes.text.formats.text_format import TextFile
from dali_pipes.text.notes import Notes
from dali_pipes.text.progress import show_progress
from dali_pipes.text.tokenize import Job, check_has_tokens, tokenize_files
from dali_pipes.text.tokenizer import end_of_text, load_tokenizer, read_tokenizer

_VERSION = 1


def cached_tokens(
    inputs: Sequence[TextFile],
    tokenizer: str | os.PathLike[str],
    eos_id: int | None,
    text_key: str,
    made_by: str,
) -> tuple[Path, int]:
    """The folder with the token ids of `inputs`, in Megatron's format, and the id after each document.

    eos_id: by default the tokenizer's end-of-text token.

    Blocks while the text is tokenized. Later calls only read the tokenizer file and samples of each input. Raises
    ConfigError if the folder cannot be written, CorpusError if the inputs do not contain any token, and what
    `load_tokenizer`, `end_of_text` and `tokenize_files` raise.
    """
    file, content = read_tokenizer(tokenizer)
    directory, reason = cache_folder([file.path for file in inputs])
    if directory is None:
        raise ConfigError(f"the tokenized text cannot be stored: {reason}. Set DALI_PIPES_CACHE to a writable folder")
    key = [_VERSION, hashlib.sha256(content).hexdigest(), eos_id, text_key]
    facts = [(utf8_name(file.path.name), file.size, file.digest, *file.version.values()) for file in inputs]
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
        with locked(folder.with_suffix(".lock")) as is_locked:
            if _finished(folder) is None:
                # Without locks, two processes may work at the same time: each in a separate folder.
                work = folder if is_locked else folder.with_suffix(f".{uuid.uuid4().hex}.tmp")
                with show_progress("tokenizing", sum(file.size for file in inputs)) as advance:
                    summary = tokenize_files(job, work, made_by, advance=advance)
                for line in Notes.from_json(summary.notes).lines():
                    print(f"dali_pipes: {line}", file=sys.stderr)
                if work != folder:
                    _move(work, folder)
    except CorpusReadError:
        raise
    except OSError as error:
        raise ConfigError(
            f"{directory}: the tokenized text cannot be stored there: {error.strerror or error}. Set DALI_PIPES_CACHE "
            "to a writable folder, or run `dali-pipes tokenize` and open its output folder"
        ) from error
    return folder, end


def _finished(folder: Path) -> dict[str, Any] | None:
    """The manifest of a finished run, None for an unfinished one."""
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
        # Another process was faster, with the same tokens.
        if not (folder / MANIFEST).exists():
            raise
        with contextlib.suppress(OSError):
            shutil.rmtree(work)
