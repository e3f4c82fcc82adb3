"""Plans: what is found once about batches whose graphs have the same structure and shapes.

A plan says which nodes have samples, where these are, and which parameters no rule can measure.
`fastlr.ghost.trust.planning` makes plans. The engine keeps them, and audits the batches that it
measures with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fastlr.ghost.graph.layouts import Layout
from fastlr.ghost.graph.rows import axes_of_nodes
from fastlr.ghost.graph.uses import Uses
from fastlr.ghost.graph.walk import PARAMETER, Graph


class Key(NamedTuple):
    """Key of a plan.

    Attributes:
        flags: Train flags of the modules, names and dtypes of the parameters, autocast.
        structure: Signature of the graph, which has no shapes.
        shapes: Number of samples, shapes in the graph, and the axes along which its nodes work.
        inputs: Shapes of the inputs, and values of those without samples (`inputs_key`).
    """

    flags: tuple
    structure: tuple
    shapes: tuple
    inputs: tuple

    @property
    def without_shapes(self) -> tuple:
        """The part of the key that all shapes of a structure share."""
        return self.flags, self.structure

    @staticmethod
    def of(flags: tuple, graph: Graph, count: int, inputs: tuple) -> Key:
        """Return the key of a batch of ``count`` samples with this graph."""
        shapes = count, tuple(graph.sizes), axes_of_nodes(graph)
        return Key(flags, graph.signature(), shapes, inputs)


@dataclass(eq=False)
class Plan:
    """How batches of one structure and shape are measured.

    Attributes:
        key: Key of the plan.
        carriers: Indices of the flattened inputs that carry samples.
        names: Names of the parameters in the graph.
        unregistered: Shapes of leaves that require grad and are no parameters, as text.
        dtype: Least precise dtype in the graph.
        largest_compared: Number of elements in the graph of the largest batch of this structure
            that was compared with parts of itself.
        sides: Side of each node (see `Graph`).
        node_keys: Key of each node (see `Graph`).
        uses: Uses of parameters.
        layouts: Layouts of the outputs of nodes with uses, by node and number of the output.
        by_node: Reasons why rules do not measure uses, by the uses' keys.
        by_sample: Reasons why only the loop over samples measures parameters, by name.
        rows_lost_at: Kind of the first node below which only marks find the samples; "" for none.
        uncovered: Kinds of nodes that are not listed in `fastlr.ghost.graph.rows`.
        deviations: Largest error of each parameter's squared norm in the audits of new plans, in
            parts of the sample's total. Parameters without a gradient in them are missing.
        tested_on_copy: Names of parameters that a deep copy of the model has tested.
        notes: Notes for the report.
    """

    key: Key = Key((), (), (0, ()), ())
    carriers: list[int] = field(default_factory=list)
    names: tuple[str, ...] = ()
    unregistered: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float64
    largest_compared: int = 0
    sides: list[int] = field(default_factory=list)
    node_keys: list = field(default_factory=list)
    uses: Uses = field(default_factory=lambda: Uses([]))
    layouts: dict[int, dict[int, Layout]] = field(default_factory=dict)
    by_node: dict[tuple, str] = field(default_factory=dict)
    by_sample: dict[str, str] = field(default_factory=dict)
    rows_lost_at: str = ""
    uncovered: frozenset[str] = frozenset()
    deviations: dict[str, float] = field(default_factory=dict)
    tested_on_copy: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Number of samples."""
        return self.key.shapes[0]

    @property
    def is_fixed(self) -> bool:
        """True if the graph shows where the samples are, whatever the batch."""
        return not self.rows_lost_at

    @property
    def is_by_rules(self) -> bool:
        """True if rules measure all parameters, and the graph shows where the samples are."""
        return self.is_fixed and self.count > 1 and not (self.by_node or self.by_sample)

    def classify(self, graph: Graph) -> None:
        """Give a graph of this structure the sides and keys of its nodes."""
        graph.side, graph.keys = self.sides, self.node_keys

    def fits(self, graph: Graph) -> bool:
        """Return True if sides are known, and all parameter-side nodes have the same shapes."""
        sizes = self.key.shapes[1]
        sides = enumerate(self.sides)
        return bool(self.sides) and all(
            graph.sizes[i] == sizes[i] for i, side in sides if side == PARAMETER
        )

    def measure_by_sample(self, names: Iterable[str], reason: str) -> None:
        """Measure these parameters by the loop over samples."""
        for name in names:
            self.by_sample.setdefault(name, reason)

    def step_down(self, names: Iterable[str], reason: str) -> bool:
        """Measure parameters in a slower way: by the formulas of their nodes, then by sample.

        Returns:
            False if none of them can: all are measured by sample, or are not in the graph.
        """
        lower = [name for name in names if name in self.names and name not in self.by_sample]
        for name in lower:
            keys = [use.key for use in self.uses.of_name.get(name, ())]
            if all(key in self.by_node for key in keys):
                self.by_sample[name] = reason
            else:
                self.by_node |= dict.fromkeys(keys, reason)
        return bool(lower)

    def adopt(self, of_copy: Plan) -> bool:
        """Use no rules where the plan of a copy uses none; return True if that is new."""
        before = len(self.by_node) + len(self.by_sample)
        self.by_node |= of_copy.by_node
        self.by_sample |= of_copy.by_sample
        return len(self.by_node) + len(self.by_sample) > before

    def record(self, deviations: Mapping[str, float]) -> None:
        """Keep the largest deviation of each parameter."""
        for name, deviation in deviations.items():
            self.deviations[name] = max(deviation, self.deviations.get(name, 0.0))

    def route(self, name: str) -> str:
        """Return how a parameter is measured: "rule", "node", "loop", or "zero" if unused."""
        if name not in self.names:
            return "zero"
        if name in self.by_sample or self.count == 1:
            return "loop"
        uses = self.uses.of_name.get(name, ()) if self.by_node else ()
        return "node" if any(use.key in self.by_node for use in uses) else "rule"

    def reason(self, name: str) -> str:
        """Return why no rule measures a parameter; "" if one does."""
        if name not in self.names:
            return "not used by the output"
        if self.count == 1:
            return "a single sample goes by plain autograd"
        reasons: Any = [self.by_node.get(use.key) for use in self.uses.of_name.get(name, ())]
        return self.by_sample.get(name) or next(filter(None, reasons), "")
