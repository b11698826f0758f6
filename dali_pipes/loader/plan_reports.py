"""The plan reports of a built source: those of the only corpus, or of each source of a mixture that packs documents."""

from typing import TYPE_CHECKING

from dali_pipes.config import LoaderConfig
from dali_pipes.engine.build import BuiltSource
from dali_pipes.engine.mixture import share_of
from dali_pipes.loader.state import order_settings
from dali_pipes.rows.source import Source

if TYPE_CHECKING:
    from dali_pipes.rows.plan_reports import PlanReports


def plan_reports(built: BuiltSource, config: LoaderConfig) -> "dict[str, PlanReports]":
    """By source name, "" for the only one; without sources whose rows are a formula. Plans nothing."""
    configs = {"": config} if built.mixture is None else config.sources
    found = {name: reports_of_source(built, config, name, own) for name, own in configs.items()}
    return {name: reports for name, reports in found.items() if reports is not None}


def reports_of_source(built: BuiltSource, config: LoaderConfig, name: str, own: LoaderConfig) -> "PlanReports | None":
    """Those of one source with its own configuration; None if its rows are a formula. Plans nothing."""
    if own.rows == "stream":
        return None
    from dali_pipes.rows.plan_reports import reports_of  # with the first rows of documents

    mixture, corpus = built.mixture, built.corpora[name]
    settings = order_settings(own, corpus)
    if mixture is None:
        return reports_of(built.rows, settings, (built.schedule.world_size, config.batch_size))
    settings |= {"source": name, "share": str(share_of(config, name))}
    return reports_of(Source(corpus, mixture.sources[mixture.names.index(name)]), settings)
