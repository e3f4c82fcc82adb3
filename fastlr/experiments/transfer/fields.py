"""The numbers in the records of a transfer run, and the strategies that pick checkpoints by them.

Source: paper, section 4.2.
"""

from __future__ import annotations

from typing import NamedTuple

from fastlr.experiments.runs.fields import REDUNDANCY, Field, by_name

FIELDS = by_name(
    Field("train_loss", "training loss", "train loss"),
    Field("validation_loss", "validation loss", "val. loss"),
    REDUNDANCY,
    Field("local_redundancy_at_end", "local redundancy of the file", "LR, file"),
    Field("weight_norm", "weight norm", "weight norm"),
    Field("dormant_ratio", "dormant ratio", "dormant"),
    Field("linear_probe", "linear probe", "probe"),
)
REDUNDANCIES = ("local_redundancy", "local_redundancy_at_end")


class Strategy(NamedTuple):
    """How a checkpoint is picked.

    Attributes:
        by: The field that it goes by; empty: there is none to pick.
        rule: Whether the "least" or the "greatest" is picked.
        label: In words.
        short: In a word or two.
    """

    by: str
    rule: str
    label: str
    short: str


# In the order of the paper's Table 3.
STRATEGIES = {
    "linear_probe": Strategy("linear_probe", "least", "linear probe †", "probe †"),
    "local_redundancy": Strategy("local_redundancy", "greatest", "max local redundancy", "max LR"),
    "validation_loss": Strategy("validation_loss", "least", "lowest val. loss", "val. loss"),
    "dormant_ratio": Strategy("dormant_ratio", "least", "min dormant ratio", "dormant"),
    "weight_norm": Strategy("weight_norm", "least", "min weight norm", "weight norm"),
    "no_pretraining": Strategy("", "", "no pretraining", "no pretraining"),
}
# Further ones, by name. The paper's local redundancy of an epoch is the mean of measurements within
# it, which need not be greatest where that of the file is: this is the last measurement alone, of
# the checkpoint that is fine-tuned.
FURTHER = {
    "local_redundancy_at_end": Strategy(
        "local_redundancy_at_end", "greatest", "max LR of the file", "file's LR"
    )
}


def strategy(name: str) -> Strategy:
    """Return a strategy by its name in records; of an unknown one the name in words."""
    words = name.replace("_", " ")
    return {**STRATEGIES, **FURTHER}.get(name, Strategy("", "", words, words))
