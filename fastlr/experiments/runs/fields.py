"""The numbers in the records of a run, and how options, tables, figures and displays show them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fastlr.display.sheets import shown
from fastlr.experiments.runs.records import measured


@dataclass(frozen=True)
class Field:
    """A number in the records of a run: a measure, a loss, an accuracy.

    Attributes:
        name: In records, and for ``--set measures=``.
        label: In words.
        short: In a word or two, for the head of a column.
        unit: Unit of its axis.
        form: Format of its text.
        percent: True for a share that is shown in per cent.
        metric: The name of a measure in `fastlr.metrics`; empty for others.
        inputs: What local redundancy is measured on; empty for others.
    """

    name: str
    label: str
    short: str = ""
    unit: str = "value"
    form: str = "{:.4g}"
    percent: bool = False
    metric: str = ""
    inputs: str = ""

    def text(self, value: float | None) -> str:
        """Return a value as a table shows it; a dash where there is none."""
        if self.percent and value is not None:
            value = round(100 * value, 1) + 0.0  # no minus at 0.0
        return shown(value, self.form)


ACCURACY = Field("accuracy", "accuracy", "accuracy", form="{:.1f} %", percent=True)
REDUNDANCY = Field("local_redundancy", "local redundancy", "LR")


def by_name(*fields: Field) -> dict[str, Field]:
    """Return fields by their names, in their order."""
    return {field.name: field for field in fields}


def texts(record: Mapping[str, Any], fields: Iterable[Field]) -> dict[str, str]:
    """Return the numbers of a record for a display, by their short names; empty if not known."""
    found = {}
    for field in fields:
        value = measured(record, field.name).get("value")
        found[field.short] = "" if value is None else field.text(value)
    return found
