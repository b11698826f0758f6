"""Run child processes: preparation, then the rounds, each alternative in a separate process."""

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from comparison.alternatives import Alternative
from comparison.child import Order, Result, run_children
from comparison.work import Limits, Work, warm

_TIMEOUT_S = 180.0
_PREPARE_TIMEOUT_S = 900.0
_GROUP = min(2, len(os.sched_getaffinity(0)))  # children that import side by side
Tell = Callable[[str], None]


def run_rounds(
    alternatives: list[Alternative], work: Work, limits: Limits, rounds: int, tell: Tell, environment: Mapping[str, str]
) -> dict[str, Result]:
    """Measure every alternative `rounds` times; by name, `rounds` (raw figures), or `skipped` or `failed`.

    Each round runs all of them once, beginning with another one each time. The long check of the data is part of the
    first round alone. What fails once is not run again, and its figures are dropped. `environment` is added to that of
    every child. Blocks for the whole time.
    """
    results: dict[str, Result] = {}
    for alternative in alternatives:
        outcome = _prepare(alternative, work, tell)
        results[alternative.name] = {"summary": alternative.summary, "kind": alternative.kind, "rounds": []} | outcome
        _tell_problem(alternative, outcome, tell)
    for number in range(rounds):
        _warm_all(work)
        first = number * len(alternatives) // rounds
        this_round = limits if number == 0 else limits.without_check()
        rotated = alternatives[first:] + alternatives[:first]
        left = [alternative for alternative in rotated if not _has_problem(results[alternative.name])]
        for start in range(0, len(left), _GROUP):
            group = left[start : start + _GROUP]
            names = ", ".join(alternative.name for alternative in group)
            tell(f"{work.batch_size} x {work.seq_len}, round {number + 1} of {rounds}: {names}")
            orders = [_order(alternative, work, this_round, environment) for alternative in group]
            for alternative, outcome in zip(group, run_children(orders, _TIMEOUT_S), strict=True):
                _tell_problem(alternative, outcome, tell)
                _add(results[alternative.name], outcome)
    return results


def _has_problem(result: Result) -> bool:
    return "skipped" in result or "failed" in result


def _add(result: Result, outcome: Result) -> None:
    """Take up what one child found."""
    if _has_problem(outcome):
        result |= outcome | {"rounds": []}
    else:
        result["check"] = outcome.pop("check", result.get("check"))
        result["rounds"].append(outcome | {"load_average": os.getloadavg()[0]})


def _prepare(alternative: Alternative, work: Work, tell: Tell) -> Result:
    missing = alternative.missing_package()
    if missing is not None:
        return {"skipped": f"the package {missing} is not installed; install it with pip install 'dali-pipes[bench]'"}
    if alternative.prepared_format is None or work.prepared(alternative.prepared_format).exists():
        return {}
    tell(f"writing the corpus as {alternative.prepared_format}, rows of {work.seq_len}")
    (outcome,) = run_children([_order(alternative, work, None, {})], _PREPARE_TIMEOUT_S)
    return outcome


def _tell_problem(alternative: Alternative, outcome: Result, tell: Tell) -> None:
    for problem in ("skipped", "failed"):
        if problem in outcome:
            tell(f"{alternative.name} {problem}: {outcome[problem]}")


def _warm_all(work: Work) -> None:
    warm(Path(work.corpus))
    for folder in Path(work.folder).glob(f"*-T{work.seq_len}"):
        warm(folder)


def _order(alternative: Alternative, work: Work, limits: Limits | None, environment: Mapping[str, str]) -> Order:
    """To measure within `limits`, or to prepare the corpus where they are None."""
    task = {"name": alternative.name, "work": work.as_dict(), "limits": limits and asdict(limits)}
    return Order("comparison.measure", task, {**environment, **alternative.environment})
