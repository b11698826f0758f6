"""The plan reports of a built source: those of the only corpus, or of each source of a mixture that packs documents."""

from dali_pipes.config import LoaderConfig
from dali_pipes.engine.build import BuiltSource
from dali_pipes.engine.mixture import share_of
from dali_pipes.loader.state import order_settings
from dali_pipes.rows.plan_reports import PlanReports, reports_of
from dali_pipes.rows.source import Source


def plan_reports(built: BuiltSource, config: LoaderConfig) -> dict[str, PlanReports]:
    """By source name, "" for the only one; without sources whose rows are a formula. Plans nothing."""
    found: dict[str, PlanReports | None] = {}
    if built.mixture is None:
        step_shape = built.schedule.world_size, config.batch_size
        found[""] = reports_of(built.rows, order_settings(config, built.corpus), step_shape)
    else:
        for name, rows in zip(built.mixture.names, built.mixture.sources, strict=True):
            corpus, own = built.corpora[name], config.sources[name]
            settings = {**order_settings(own, corpus), "source": name, "share": str(share_of(config, name))}
            found[name] = reports_of(Source(corpus, rows), settings)
    return {name: reports for name, reports in found.items() if reports is not None}
