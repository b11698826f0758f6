"""Reports on corpora and batches, as plain data. They do not need a GPU or torch."""

from dali_pipes.loader.batch_origin import BatchOrigin, PieceOrigin, RowOrigin, locate_batch, one_row
from dali_pipes.loader.batch_preview import preview_batch
from dali_pipes.loader.batch_view import BatchPreview, PreviewPiece, PreviewRow, Run
from dali_pipes.rows.plan_report import PlanReport
from dali_pipes.text.token_text import TokenText
from dali_pipes.tools.reports.corpus_check import CheckReport, check_corpus
from dali_pipes.tools.reports.corpus_report import CorpusReport, inspect_corpus
from dali_pipes.tools.reports.document_lengths import LengthReport
from dali_pipes.tools.reports.epoch_plan import check_plot, plan_epoch, plot_plan
from dali_pipes.tools.reports.followed_log import FollowedLog, RunNow
from dali_pipes.tools.reports.mixture_plan import MixturePlan, plan_mixture, plot_mixture
from dali_pipes.tools.reports.page import DataPage, make_page
from dali_pipes.tools.reports.problem import Problem
from dali_pipes.tools.reports.samples_preview import SamplesPreview, names_loader, preview_samples
from dali_pipes.tools.reports.shuffle_figures import OrderFigures
from dali_pipes.tools.reports.shuffle_report import ShuffleReport, judge_shuffle, plot_shuffle
from dali_pipes.tools.reports.step_report import StepReport, explain_step

__all__ = [
    "BatchOrigin",
    "BatchPreview",
    "CheckReport",
    "CorpusReport",
    "DataPage",
    "FollowedLog",
    "LengthReport",
    "MixturePlan",
    "OrderFigures",
    "PieceOrigin",
    "PlanReport",
    "PreviewPiece",
    "PreviewRow",
    "Problem",
    "RowOrigin",
    "Run",
    "RunNow",
    "SamplesPreview",
    "ShuffleReport",
    "StepReport",
    "TokenText",
    "check_corpus",
    "check_plot",
    "explain_step",
    "inspect_corpus",
    "judge_shuffle",
    "locate_batch",
    "make_page",
    "names_loader",
    "one_row",
    "plan_epoch",
    "plan_mixture",
    "plot_mixture",
    "plot_plan",
    "plot_shuffle",
    "preview_batch",
    "preview_samples",
]
