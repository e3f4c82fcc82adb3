"""How each parameter is measured, and how far it was off where it was compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from torch import Tensor

from fastlr.errors import few
from fastlr.ghost.engine import Engine
from fastlr.ghost.graph.plan import Plan
from fastlr.ghost.model.batch import along
from fastlr.ops.torch_private import tree_leaves

_COLUMNS = ("parameter", "node", "samples along", "route", "deviation")


@dataclass(frozen=True)
class ParameterSupport:
    """How one parameter is measured.

    ``route``: "rule" (walk of the graph), "node" (the node's own backward formula, sample by
    sample), "loop" (one pass a sample), "zero" (not used by the output). ``deviation``: largest
    ``|fast - exact|`` of its squared norm on a few samples, relative to the sample's total.
    ``tested`` is False where its gradient was zero on those samples.
    """

    name: str
    kinds: tuple[str, ...]
    axes: tuple[str, ...]
    route: str
    deviation: float
    tested: bool
    reason: str


REPLACED = {  # kind -> what is said of it after the number
    "gate": "products with one number per channel are left to what reads them",
    "pixel": "convolutions of single pixels run as linear layers",
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
    def of(engine: Engine, x: Any) -> SupportReport:
        """Return the report on the last batch of an engine.

        Args:
            engine: Engine that has measured a batch.
            x: Inputs of the batch.
        """
        plan, view, blocks = engine.plan, engine.view, engine.folding.blocks
        copy = engine.measure_on_copy(view.batch(x, plan.count, plan.carriers), plan)
        deviations = plan.deviations
        subject = "model itself"
        if copy is not None:
            deviations = dict.fromkeys(plan.deviations, 0.0) | copy.plan.deviations
            dtype = next(iter(copy.parameters.values())).dtype
            subject = f"{str(dtype).removeprefix('torch.')} copy"
        lost_at = plan.rows_lost_at or engine.independence.suspicion
        notes = list(plan.notes)
        if lost_at:
            kind = lost_at.removesuffix("Backward0")
            notes.append(f"rows are found and outputs compared in every batch: {kind}")
        if engine.ladder.rung:
            notes.append(f"measured {engine.ladder}")
        notes += notes_of_shared(shared_inputs(x, plan, view.in_dim))
        return SupportReport(
            tuple(_of_parameter(name, plan, deviations) for name in engine.parameters),
            subject,
            str(plan.dtype).removeprefix("torch."),
            plan.unregistered,
            tuple(notes),
            dict(blocks.folded),
            blocks.not_folded | blocks.refused,
            tuple(sorted(blocks.fixed)),
            dict(blocks.replaced + Counter(unfused=blocks.unfused.calls)),
            tuple(sorted(plan.uncovered)),
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
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        widths[0] = min(widths[0], 44)
        lines = ["  ".join(map(_fit, row, widths)).rstrip() for row in rows]
        lines.insert(1, "-" * max(len(line) for line in lines))
        return "\n".join([*lines, "", *self._summary()])

    def _repr_html_(self) -> str:
        """The same for a notebook, the table folded."""
        from fastlr.display.notebook import support_html

        return support_html(_COLUMNS, self._rows(), self._summary())

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for label, p in _grouped(self.parameters):
            deviation = f"{p.deviation:.0e}" if p.tested and p.route in ("rule", "node") else "-"
            rows.append(
                (label, "+".join(p.kinds) or "-", ", ".join(p.axes) or "-", p.route, deviation)
            )
        return rows

    def _summary(self) -> list[str]:
        """What sums up the table: routes, comparison, what was replaced and folded, notes."""
        notes = [f"note: {note}" for note in self.notes]
        return [self._of_routes(), *self._of_comparison(), *self._of_folding(), *notes]

    def _of_routes(self) -> str:
        by_route = Counter(p.route for p in self.parameters)
        parts = [f"{by_route[r]} by {r}" for r in ("rule", "node", "loop", "zero") if by_route[r]]
        return f"{len(self.parameters)} parameters: {', '.join(parts)}"

    def _of_comparison(self) -> Iterator[str]:
        if any(p.tested for p in self.parameters):
            yield (
                f"compared with plain autograd on a few samples of a {self.subject} "
                f"({self.dtype}): off by at most {self.largest_deviation:.1e}"
            )
        untested = [p.name for p in self.parameters if not p.tested and p.route != "loop"]
        if untested:
            yield f"gradient zero on those samples, so nothing was compared: {few(untested)}"
        slow = [p for p in self.parameters if p.reason and p.route != "rule"]
        yield from dict.fromkeys(f"{p.route}: {p.reason}" for p in slow)
        for kind in self.without_rows:
            yield (
                f"no rows known for {kind}: marks find them in every batch, by three or more "
                "backward passes, and no CUDA graph is made"
            )
        if self.others:
            yield (
                f"{len(self.others)} other leaves require grad and are not counted: "
                f"{few(self.others)}"
            )

    def _of_folding(self) -> Iterator[str]:
        for kind, number in self.replaced.items():
            yield f"{number} {REPLACED[kind]}"
        if self.fixed:
            yield f"{len(self.fixed)} batch norms run as a scaling and a shift"
        if self.folded:
            yield f"{len(self.folded)} convolutions run folded with their batch norm and activation"
            by_reason: dict[str, list[str]] = {}
            for name, reason in self.unfolded.items():
                by_reason.setdefault(reason, []).append(name)
            for reason, names in by_reason.items():
                yield f"not folded ({reason}): {few(names, 2)}"


def _of_parameter(name: str, plan: Plan, deviations: Mapping[str, float]) -> ParameterSupport:
    """Return how a plan measures a parameter."""
    uses = plan.uses.of_name.get(name, ())
    kinds = [use.kind.removesuffix("Backward0").removesuffix("Backward") for use in uses]
    axes = [str(plan.layouts.get(use.node, {}).get(0, "unknown")) for use in uses]
    return ParameterSupport(
        name,
        tuple(dict.fromkeys(kinds)),
        tuple(dict.fromkeys(axes)),
        plan.route(name),
        deviations.get(name, 0.0),
        name in deviations,
        plan.reason(name),
    )


def shared_inputs(x: Any, plan: Plan, in_dim: int) -> Iterator[tuple[str, bool]]:
    """Yield the input tensors that all samples share.

    With each name comes whether the input has as many rows as there are samples.

    Args:
        x: Inputs.
        plan: Plan of their batch.
        in_dim: Axis of the samples in the inputs that carry them.
    """
    named: Iterable[tuple[Any, Any]] = enumerate(x if isinstance(x, tuple) else [x])
    if isinstance(x, dict):
        named = x.items()
    names = {id(value): f"input {key}" for key, value in named}
    look_batched = along(x, plan.count, in_dim)
    for i, leaf in enumerate(tree_leaves(x)):
        if isinstance(leaf, Tensor) and i not in plan.carriers:
            yield f"{names.get(id(leaf), 'an input')} {list(leaf.shape)}", i in look_batched


def notes_of_shared(shared: Iterable[tuple[str, bool]]) -> Iterator[str]:
    """Yield what is to be said of each of the `shared_inputs`."""
    for name, has_a_row_a_sample in shared:
        text = f"{name} is shared by all samples"
        if has_a_row_a_sample:
            text += (
                ", though it has as many rows: what one sample gives depends on all of them, as in "
                "f(x) @ g(y).T (CLIP's logits_per_image), and in an estimate on its batch_size"
            )
        yield f"{text}; values hold for this one alone"


def _fit(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else "..." + text[len(text) - width + 3 :]


def _grouped(parameters: tuple[ParameterSupport, ...]) -> list[tuple[str, ParameterSupport]]:
    """Join neighbours of one module that share node, axis and route into one row.

    Returns:
        The label of each row, and that of its parameters which deviates most.
    """
    rows: list[tuple[str, ParameterSupport]] = []
    for (module, *_), group in groupby(parameters, _shared):
        same = list(group)
        leaves = [p.name.rpartition(".")[2] for p in same]
        label = leaves[0] if len(same) == 1 else f"{{{','.join(leaves)}}}"
        if module or len(same) > 1:
            label = f"{module}.{label}"
        rows.append((label, max(same, key=lambda p: p.deviation)))
    return rows


def _shared(p: ParameterSupport) -> tuple:
    """What parameters of one row have in common."""
    return p.name.rpartition(".")[0], p.kinds, p.axes, p.route, p.tested
