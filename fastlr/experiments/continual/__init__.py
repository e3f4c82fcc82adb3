"""Analysis of continual runs, which `fastlr report` shows.

Source: paper, section 4.1 and appendices A.1, A.4, A.5.

- `read_runs`: the records of run folders as series over tasks.
- `correlations`: of each measure with the accuracy of the tasks to come (Table 1) or with
  forgetting, errors by block bootstrap, confidence intervals, the smallest effect that could have
  been seen.
- `forgetting_by_blocks`, `costs`, `agreement`: the other tables.
"""

from fastlr.experiments.continual.association import Correlation, TooShort, correlations
from fastlr.experiments.continual.fields import INPUTS
from fastlr.experiments.continual.records import ContinualRun, read_run, read_runs
from fastlr.experiments.continual.summaries import (
    Agreement,
    Cost,
    ForgettingBlock,
    agreement,
    costs,
    forgetting_by_blocks,
)
from fastlr.experiments.statistics.correlation import correlation, residuals

__all__ = [
    "INPUTS",
    "Agreement",
    "Correlation",
    "Cost",
    "ForgettingBlock",
    "ContinualRun",
    "TooShort",
    "agreement",
    "correlation",
]
__all__ += ["correlations", "costs", "forgetting_by_blocks", "read_run", "read_runs", "residuals"]
