"""The outcome of planning and proof, parameter by parameter."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from fastlr.errors import few
from fastlr.ghost.fusion.mode import Folding
from fastlr.ghost.verification.record import Ledger

_COLUMNS = ("parameter", "node", "samples along", "route", "deviation")


@dataclass(frozen=True)
class ParameterSupport:
    """How one parameter is measured.

    ``route``: "rule" (walk of the graph), "node" (the node's own backward formula, sample by
    sample), "loop" (one pass a sample), "zero" (not used by the output). ``deviation``: largest
    ``|fast - truth|`` of its squared norm on the proof's three samples, relative to the sample's
    total. ``proven`` is False where its gradient was zero on those samples.
    """

    name: str
    kinds: tuple[str, ...]
    axes: tuple[str, ...]
    route: str
    deviation: float
    proven: bool
    reason: str


REPLACED = {  # kind -> what is said of it after the number
    "gate": "products with one number a channel run as one node",
    "squeeze": "means over all positions keep their gradient small",
    "attention": "self-attentions run without torch's copies",
    "recurrent": "calls of recurrent layers run with one product for all steps",
    "unfused": "calls of recurrent layers run step by step",
}


@dataclass(frozen=True)
class SupportReport:
    """Every trainable parameter with its route; prints as a table.

    ``folded``: convolution weights that run as one with their batch norm -> activation;
    ``unfolded``: the others -> why. ``fixed``: weights of batch norms that run by themselves as a
    scaling and a shift; ``replaced``: how many other calls of a kind run in another way (see
    REPLACED).
    """

    parameters: tuple[ParameterSupport, ...]
    subject: str
    dtype: str
    others: tuple[str, ...]
    notes: tuple[str, ...]
    folded: dict[str, str] = field(default_factory=dict)
    unfolded: dict[str, str] = field(default_factory=dict)
    fixed: tuple[str, ...] = ()
    replaced: dict[str, int] = field(default_factory=dict)
    without_rows: tuple[str, ...] = ()

    @staticmethod
    def of(names: list[str], ledger: Ledger, folding: Folding) -> SupportReport:
        """Build the report of a ledger, and of what was folded in the last forward pass."""
        rows = []
        for name in names:
            p = ledger.parameters[name]
            rows.append(
                ParameterSupport(name, p.kinds, p.axes, p.route, p.deviation, p.alive, p.reason)
            )
        dtype = str(ledger.dtype).removeprefix("torch.") if ledger.dtype else ""
        notes = list(dict.fromkeys(ledger.notes))
        if folding.calls_refused:
            notes.append(f"only convolutions and norms are folded: {folding.calls_refused}")
        if folding.disabled:
            notes.append(f"nothing is folded: {folding.disabled}")
        return SupportReport(
            tuple(rows),
            ledger.subject,
            dtype,
            ledger.others,
            tuple(notes),
            dict(folding.folded),
            folding.plain | folding.refused,
            tuple(sorted(folding.fixed)),
            dict(folding.replaced + Counter(unfused=folding.unfused.calls)),
            tuple(sorted(ledger.without_rows)),
        )

    @property
    def routes(self) -> dict[str, str]:
        """Route of each parameter."""
        return {p.name: p.route for p in self.parameters}

    @property
    def largest_deviation(self) -> float:
        """Largest deviation from the truth over all parameters."""
        return max((p.deviation for p in self.parameters), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain types."""
        return asdict(self)

    def __str__(self) -> str:
        """Return the table of parameters and what sums it up."""
        rows = [_COLUMNS, *self._rows()]
        widths = [max(len(r[k]) for r in rows) for k in range(5)]
        widths[0] = min(widths[0], 44)
        lines = [
            "  ".join(_fit(c, w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows
        ]
        lines.insert(1, "-" * max(len(line) for line in lines))
        return "\n".join([*lines, "", *self._summary()])

    def _repr_html_(self) -> str:
        """The same for a notebook, the table folded."""
        from fastlr.display.notebook import support_html

        return support_html(_COLUMNS, self._rows(), self._summary())

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for label, p in _grouped(self.parameters):
            deviation = f"{p.deviation:.0e}" if p.proven and p.route in ("rule", "node") else "-"
            rows.append(
                (label, "+".join(p.kinds) or "-", ", ".join(p.axes) or "-", p.route, deviation)
            )
        return rows

    def _summary(self) -> list[str]:
        count = {
            route: sum(p.route == route for p in self.parameters)
            for route in ("rule", "node", "loop", "zero")
        }
        lines = [
            f"{len(self.parameters)} parameters: "
            + ", ".join(f"{n} by {r}" for r, n in count.items() if n)
        ]
        if self.subject:
            lines.append(
                f"proven on three samples of a {self.subject} ({self.dtype}): off by at most "
                f"{self.largest_deviation:.1e}"
            )
        unproven = [p.name for p in self.parameters if not p.proven]
        if unproven:
            lines.append(
                f"gradient zero on those samples, so checked when it is not: {few(unproven)}"
            )
        lines += dict.fromkeys(
            f"{p.route}: {p.reason}" for p in self.parameters if p.reason and p.route != "rule"
        )
        lines += [
            f"no rows known for {kind}: every batch is looked at anew, by three or more backward "
            "passes, and no CUDA graph is made"
            for kind in self.without_rows
        ]
        if self.others:
            lines.append(
                f"{len(self.others)} other leaves require grad and are not counted: "
                f"{few(self.others)}"
            )
        lines += [f"{number} {REPLACED[kind]}" for kind, number in self.replaced.items()]
        if self.fixed:
            lines.append(f"{len(self.fixed)} batch norms run as a scaling and a shift")
        if self.folded:
            lines.append(
                f"{len(self.folded)} convolutions run folded with their batch norm and activation"
            )
            reasons: dict[str, list[str]] = {}
            for name, reason in self.unfolded.items():
                reasons.setdefault(reason, []).append(name)
            for reason, which in reasons.items():
                lines.append(f"not folded ({reason}): {few(which, 2)}")
        return [*lines, *(f"note: {n}" for n in self.notes)]


def _fit(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else "..." + text[len(text) - width + 3 :]


def _grouped(parameters: tuple[ParameterSupport, ...]) -> list[tuple[str, ParameterSupport]]:
    """Join parameters of one module that share node, axis and route into one row."""
    rows: list[tuple[str, list[str], ParameterSupport]] = []
    for p in parameters:
        module, _, leaf = p.name.rpartition(".")
        last = rows[-1] if rows else None
        if (
            last
            and last[0] == module
            and (last[2].kinds, last[2].axes, last[2].route, last[2].proven)
            == (p.kinds, p.axes, p.route, p.proven)
        ):
            worst = p if p.deviation > last[2].deviation else last[2]
            rows[-1] = (module, [*last[1], leaf], worst)
        else:
            rows.append((module, [leaf], p))
    return [
        (f"{m}.{{{','.join(ls)}}}" if len(ls) > 1 else f"{m}.{ls[0]}" if m else ls[0], p)
        for m, ls, p in rows
    ]
