"""Analysis of continual runs (paper, section 4.1 and appendices A.1, A.4, A.5): what `fastlr report` computes.

- `read_runs`: the records of run folders as series over tasks.
- `correlations`: of each measure with the accuracy of the tasks to come (Table 1) or with forgetting, errors by block
  bootstrap, confidence intervals, the smallest effect that could have been seen.
- `forgetting_by_blocks`, `costs`, `agreement`: the other tables.
"""

from fastlr.analysis.association import Correlation, TooShort, correlations
from fastlr.analysis.correlation import pearson, ranks, residuals, spearman
from fastlr.analysis.runs import Run, read_run, read_runs
from fastlr.analysis.summaries import INPUTS, Agreement, Cost, ForgettingBlock, agreement, costs, forgetting_by_blocks

__all__ = [
    "INPUTS",
    "Agreement",
    "Correlation",
    "Cost",
    "ForgettingBlock",
    "Run",
    "TooShort",
    "agreement",
    "correlations",
    "costs",
    "forgetting_by_blocks",
    "pearson",
    "ranks",
    "read_run",
    "read_runs",
    "residuals",
    "spearman",
]
