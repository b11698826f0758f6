"""A run on a Ray cluster: each item is a task, which does it as `--shard ITEM/ITEMS` would; the driver publishes.

    driver    finds the inputs, hands out tasks, counts what is done, publishes
    tasks     read inputs, tokenize, write shards and receipts           one CPU each

Ray runs a task again if its worker or node dies. What a run has done is in its receipts, not in Ray: the task finds
the shards that were finished, and a run that was stopped continues.
"""

import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dali_pipes.errors import BackendError, DaliPipesError
from dali_pipes.runtime.optional import optional_package
from dali_pipes.text.run_plan import ItemInUseError
from dali_pipes.text.shard_task import MADE_BY, Begin, Prepared, TokenizeConfig, prepare, tokenize_shard
from dali_pipes.text.tokenize import Advance, Summary, open_run, publish_files
from dali_pipes.uris import Uri, is_uri

_MOST_RETRIES = 5
"""Of a task whose worker or node died."""
_CONNECT_S = 10.0
_LOCK_WAIT_S, _MOST_LOCK_WAITS = 5.0, 60
"""A network file system may hold the locks of a node that died for minutes."""


def tokenize_on_ray(config: TokenizeConfig, address: str | None = None, *, begin: Begin) -> Summary:
    """Tokenize on a Ray cluster, or continue a run; the output is that of one machine. Blocks.

    address: of the cluster, as `ray.init` takes it; None: the cluster that this machine belongs to, else a new one on
             this machine
    begin:   as for `tokenize_shard`

    Local inputs, tokenizer and `out` must be at the same paths on all nodes. Raises as `tokenize_shard`, and
    BackendError if Ray is missing, cannot be reached, or gives up on a task.
    """
    with optional_package("ray", "ray", purpose="to tokenize on a Ray cluster"):
        import ray
    prepared = prepare(config)
    job = prepared.job
    run = open_run(job, config.out, MADE_BY)
    with begin(prepared) as advance:
        if run.begin() is None:
            # Ray prints what it says of tasks that died to standard output, from a thread.
            with contextlib.redirect_stdout(sys.stderr), _connected(ray, address):
                _do_shards(ray, _for_workers(config, prepared, run.out), prepared, advance)
        return publish_files(job, config.out, MADE_BY)


def _do_shards(ray: Any, config: TokenizeConfig, prepared: Prepared, advance: Advance) -> None:
    items = prepared.job.items
    shared = ray.put(config)
    task = ray.remote(num_cpus=1, max_retries=_MOST_RETRIES)(_tokenize_item)
    numbers = {task.remote(shared, number, len(items)): number for number in range(len(items))}
    waiting = list(numbers)
    try:
        while waiting:
            (done,), waiting = ray.wait(waiting, num_returns=1)
            number = numbers[done]
            files = items[number]
            try:
                found = ray.get(done)
            except ray.exceptions.RayError as error:
                raise BackendError(
                    f"input {number} ({files[0].path}) failed on Ray: {_reason(error)}. Run the same command again: "
                    "finished output is kept"
                ) from error
            if isinstance(found, DaliPipesError):
                raise found
            advance(sum(file.size for file in files), found.tokens)
    finally:
        for ref in waiting:  # after an error or an interrupt
            with contextlib.suppress(Exception):  # one that cannot be canceled ends with the connection
                ray.cancel(ref, force=True)


def _tokenize_item(config: TokenizeConfig, number: int, count: int) -> Summary | DaliPipesError:
    """The task. An error of the user is returned: Ray would wrap one that is raised."""
    os.environ.setdefault("RAYON_NUM_THREADS", "1")  # other tasks use the other CPUs
    for _ in range(_MOST_LOCK_WAITS):
        try:
            return tokenize_shard(config, number, count, begin=_silent, publish=False)
        except ItemInUseError as error:
            failure: DaliPipesError = error
            time.sleep(_LOCK_WAIT_S)
        except DaliPipesError as error:
            return error
    return failure


@contextlib.contextmanager
def _silent(prepared: Prepared) -> Iterator[Advance]:
    yield lambda done, tokens: None


def _for_workers(config: TokenizeConfig, prepared: Prepared, out: Any) -> TokenizeConfig:
    """The configuration for processes in other folders: paths are absolute, and inputs were looked up."""

    def absolute(path: str) -> str:
        return path if is_uri(path) else os.path.abspath(os.path.expanduser(path))

    template = config.chat_template
    return replace(
        config,
        inputs=list(prepared.job.inputs),
        tokenizer=absolute(config.tokenizer),
        out=out if isinstance(out, Uri) else str(out),
        chat_template=template if template in (None, "none", "chatml") else absolute(template),
    )


@contextlib.contextmanager
def _connected(ray: Any, address: str | None) -> Iterator[None]:
    """Connected to a cluster; one that was started here ends with the block."""
    if ray.is_initialized():
        yield
        return
    try:
        _check_reachable(address)
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        where = "the Ray cluster" if address is None else f"a Ray cluster at {address}"
        raise BackendError(
            f"cannot connect to {where}: {_first_line(error)}. Start a cluster with `ray start --head`, or check the "
            "address"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str | None) -> None:
    """Raise OSError where nothing answers: Ray tries for minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if port.isdecimal():
        socket.create_connection((host, int(port)), _CONNECT_S).close()


def _reason(error: Exception) -> str:
    cause = getattr(error, "cause", None)
    return f"{type(cause or error).__name__}: {_first_line(cause or error)}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
