"""The numbers in the records of a memorization run.

Source: paper, section 4.3.
"""

from __future__ import annotations

from fastlr.experiments.runs.fields import ACCURACY, Field, by_name

FIELDS = by_name(
    Field("epoch", "epoch", "epoch", form="{:.0f}"),
    Field("train_loss", "training loss", "train loss"),
    Field("loss", "loss", "loss"),
    ACCURACY,
    Field("bits", "bits memorised", "bits", form="{:,.0f}"),
    Field("bits_per_parameter", "bits per parameter", "bits/param", form="{:.4f}"),
    Field("share_of_ceiling", "share of the ceiling", "ceiling", form="{:.1f} %", percent=True),
)
