"""The measures of a continual run: their names in records, and how tables and figures show them.

One list, from which options, records, tables and figures take what they need. Measures of the
parameters alone that are entered in `fastlr.metrics` need no line here.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastlr.metrics.weights import OF_PARAMETERS


@dataclass(frozen=True)
class Field:
    """A measure in the records of a run.

    Attributes:
        name: In records, and for ``--set measures=``.
        label: In words.
        unit: Of its axis.
        metric: Its name in `fastlr.metrics`; empty for local redundancy.
        inputs: What local redundancy is measured on; empty for others.
    """

    name: str
    label: str
    unit: str = "value"
    metric: str = ""
    inputs: str = ""


_LISTED = (
    Field("local_redundancy", "local redundancy", inputs="synthetic shapes"),
    Field("local_redundancy_noise", "LR on noise", inputs="images of Gaussian noise"),
    Field(
        "local_redundancy_next_task", "LR on next task", inputs="training images of the next task"
    ),
    Field("weight_norm", "weight norm", "l2 norm", "weight_norm"),
    Field("distance_from_init", "distance from init", "l2 norm", "distance_from_init"),
    Field("dormant_ratio", "dormant ratio", "share of units", "dormant_ratio"),
    Field("dormant_ratio_tau", "dormant ratio tau", "share of units", "dormant_ratio_tau"),
    Field("train_grad_norm", "training grad norm", "mean squared l2 norm", "train_grad_norm"),
    Field("batch_grad_norm", "batch grad norm", "squared l2 norm", "train_grad_norm_batch"),
    Field("effective_rank", "effective rank", "rank", "effective_rank_entropy"),
    Field("srank", "srank", "rank", "effective_rank"),
    Field("feature_rank", "feature rank", "rank", "feature_rank"),
)
MEASURES = tuple(field.name for field in _LISTED)  # taken unless a run is told otherwise
FIELDS = dict(zip(MEASURES, _LISTED))
for _name, _measure in OF_PARAMETERS.items():
    if _name not in FIELDS:
        FIELDS[_name] = Field(_name, _measure.label, _measure.unit, _name)
# Rows of tables: as in the paper's Table 1, which has the distance before the norm.
ROWS = list(FIELDS)
ROWS.insert(ROWS.index("weight_norm"), ROWS.pop(ROWS.index("distance_from_init")))
