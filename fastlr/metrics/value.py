"""The value that every measure returns: a float with the name of its definition."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fastlr.errors import InputError


def check_known(names: Collection[str], known: Collection[str]) -> None:
    """Raise InputError unless these are names of measures, among those known."""
    if isinstance(names, str):
        raise InputError(f"measures must be a list of names: [{names!r}]")
    if unknown := [name for name in names if name not in known]:
        raise InputError(f"unknown measures {unknown}: choose from {list(known)}")


class Measure(float):
    """The value of a plasticity measure: a float that knows its definition.

    Attributes:
        definition: what was computed, in one line, options included.
        details: further numbers of the same computation (counts, standard error).
        layers: name of each layer -> its own value, where the measure has one.

    Example:
        >>> import torch, fastlr
        >>> measure = fastlr.metrics.weight_norm(torch.nn.Linear(3, 2))
        >>> measure.definition
        'weight norm: l2 norm of all trainable parameters together'
        >>> sorted(measure.to_dict())
        ['definition', 'parameters', 'value']
    """

    definition: str
    details: dict[str, Any]
    layers: dict[str, float]

    def __new__(
        cls,
        value: float,
        definition: str = "",
        details: Mapping[str, Any] | None = None,
        layers: Mapping[str, float] | None = None,
    ) -> Measure:
        """Make a measure of a value and what it means."""
        self = super().__new__(cls, value)
        self.definition = definition
        self.details = dict(details or {})
        self.layers = dict(layers or {})
        return self

    def __getnewargs__(self) -> tuple[float]:
        return (float(self),)

    def to_dict(self, *, layers: bool = False) -> dict[str, Any]:
        """Return a flat dict for JSON: value, definition, details; with ``layers``, theirs."""
        record = {"value": float(self), "definition": self.definition, **self.details}
        if layers and self.layers:
            record["layers"] = dict(self.layers)
        return record
