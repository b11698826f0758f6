"""Objectives: what is learned of the rows of a block, by keyed draws. The kernels are operators.

plan ─▶ RowDraws: key, length, rate and rule of each row ─▶ Transforms: kernels over the rows' ids and labels
"""

from dali_pipes.objectives.row_draws import RowDraws, SourceObjectives
from dali_pipes.objectives.transforms import Transforms

__all__ = ["RowDraws", "SourceObjectives", "Transforms"]
