"""What a loader is made of, for one rank: made anew where a process group comes late."""

from typing import NamedTuple

from dali_pipes.config import LoaderConfig
from dali_pipes.engine.block_stream import BlockStream
from dali_pipes.engine.build import BuiltSource, Graph
from dali_pipes.loader.announcements import WaitWatch
from dali_pipes.loader.batches import RowShare, StaticBatch, why_no_cuda
from dali_pipes.loader.state import Saved, States, order_settings
from dali_pipes.rows.plan_reports import PlanReports, reports_of
from dali_pipes.schedule import Position


class LoaderParts(NamedTuple):
    """All that depends on the configuration, whose rank and world size are known."""

    built: BuiltSource
    stream: BlockStream
    states: States
    saved: Saved
    """The state that was loaded, or the start of a run."""
    behind: Position
    """Where it goes on, behind steps that are left out."""
    reports: PlanReports | None
    share: RowShare | None
    static: StaticBatch | None
    watch: WaitWatch
    config: LoaderConfig

    @classmethod
    def of(cls, config: LoaderConfig, graph: Graph | None, loaded: Saved | None) -> "LoaderParts":
        """Open the corpus and get ready to go on where a state, if one was `loaded`, says; errors are those of both."""
        built = BuiltSource(config, endless=True, for_loader=True, graph=graph, gpu_problem=why_no_cuda)
        stream = BlockStream(built, config, graph)
        try:
            states = States(config, built.rows.corpus, built.schedule)
            saved = states.again(loaded)
            order, parallel = order_settings(config, built.rows.corpus), config.context_parallel
            return cls(
                built,
                stream,
                states,
                saved,
                built.schedule.normalise(saved.position),
                reports_of(built.rows, order),
                None if parallel is None else RowShare(*parallel, config.context_split),
                StaticBatch(config.batch_size, stream.order) if config.static_buffers else None,
                WaitWatch(config),
                config,
            )
        except BaseException:  # the data have changed since
            stream.close()
            raise
