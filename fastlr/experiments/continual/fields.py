"""The measures of a continual run: their names in records, and how tables and figures show them.

One list, from which options, records, tables and figures take what they need. Measures of the
parameters alone that are entered in `fastlr.metrics` need no line here.
"""

from __future__ import annotations

from fastlr.experiments.runs.fields import Field, by_name
from fastlr.metrics.weights import OF_PARAMETERS

SHAPES = "local_redundancy"
THIS_TASK = "local_redundancy_this_task"
FITTED = "local_redundancy_fitted"
LEARNING_SPEED = "learning_speed"
REFERENCE = "local_redundancy_next_task"
REAL = "local_redundancy_real"
FIELDS = by_name(
    Field(SHAPES, "local redundancy", "shapes", inputs="synthetic shapes"),
    Field(
        "local_redundancy_noise",
        "LR on noise",
        "Gaussian noise",
        inputs="images of Gaussian noise",
    ),
    Field(
        REFERENCE,
        "LR on next task",
        "next task's real images",
        inputs="training images of the next task",
    ),
    Field("weight_norm", "weight norm", unit="l2 norm", metric="weight_norm"),
    Field("distance_from_init", "distance from init", unit="l2 norm", metric="distance_from_init"),
    Field("dormant_ratio", "dormant ratio", unit="share of units", metric="dormant_ratio"),
    Field(
        "dormant_ratio_tau",
        "dormant ratio tau",
        unit="share of units",
        metric="dormant_ratio_tau",
    ),
    Field(
        "train_grad_norm",
        "training grad norm",
        unit="mean squared l2 norm",
        metric="train_grad_norm",
    ),
    Field(
        "batch_grad_norm",
        "batch grad norm",
        unit="squared l2 norm",
        metric="train_grad_norm_batch",
    ),
    Field("effective_rank", "effective rank", unit="rank", metric="effective_rank_entropy"),
    Field("srank", "srank", unit="rank", metric="effective_rank"),
    Field("feature_rank", "feature rank", unit="rank", metric="feature_rank"),
)
MEASURES = tuple(FIELDS)  # taken unless a run is told otherwise
FIELDS |= by_name(
    Field(
        THIS_TASK,
        "LR on this task",
        "the task's real images",
        inputs="training images of the task just learned",
    ),
    Field(
        FITTED,
        "LR on fitted inputs",
        "Gaussian, fitted on the first task",
        inputs="Gaussian inputs fitted on training images of the first task",
    ),
    Field(LEARNING_SPEED, "accuracy after one epoch", unit="share", percent=True),
    Field(
        "gradient_noise_scale",
        "gradient noise scale",
        unit="images",
        metric="gradient_noise_scale",
    ),
    Field("trainability", "trainability", unit="share of a guess's loss", metric="trainability"),
    Field("curvature_rank", "curvature rank", unit="rank", metric="curvature_rank"),
    Field("ntk_rank", "NTK rank", unit="rank", metric="ntk_rank"),
)
for _name, _measure in OF_PARAMETERS.items():
    if _name not in FIELDS:
        FIELDS[_name] = Field(_name, _measure.label, unit=_measure.unit, metric=_name)
# Of checkpoints, whose real inputs may be of any kind; the other redundancies are theirs too.
OF_CHECKPOINTS = by_name(
    Field("local_redundancy_series", "LR on series", "Gaussian series"),
    Field(REAL, "LR on real inputs", "real inputs"),
)
_OF_REDUNDANCY = {name: field for name, field in FIELDS.items() if field.inputs} | OF_CHECKPOINTS
INPUTS = {name: field.short for name, field in _OF_REDUNDANCY.items()}
# Rows of tables: as in the paper's Table 1, which has the distance before the norm.
ROWS = list(FIELDS)
ROWS.insert(ROWS.index("weight_norm"), ROWS.pop(ROWS.index("distance_from_init")))
