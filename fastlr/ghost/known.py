"""Plans of a model that are kept between calls, and their keys.

- *flags*: train flags, names and dtypes of the parameters, autocast.
- *structure*: the autograd graph of the output, without shapes.
- *shapes*: the shapes in the graph, and the inputs without samples.

Nothing here says whether the model's code or attributes have changed since: the audits of every
measurement do (fastlr.ghost.auditor). Entries that were not used for long are dropped, and made
again when they come back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastlr.ghost.backward import Structure
from fastlr.ghost.batch import input_shapes
from fastlr.ghost.graph import PARAMETER, Graph, Place
from fastlr.ghost.ownership import saved_axes
from fastlr.ghost.sample_axis import Layout
from fastlr.ghost.verification.record import Ledger
from fastlr.ops.recent import Recent

_FEW = 64  # states of the flags, and structures of one, that are kept


class Key(NamedTuple):
    """Key of a batch among those with the same flags.

    Attributes:
        structure: Signature of the graph.
        shapes: Number of samples, and shapes in the graph.
        shared_inputs: Key of the inputs without samples (`shared_key`).
    """

    structure: tuple
    shapes: tuple
    shared_inputs: tuple

    @staticmethod
    def of(graph: Graph, count: int, shared_inputs: tuple) -> Key:
        """Return the key of a batch of ``count`` samples with this graph."""
        shapes = count, tuple(graph.sizes), saved_axes(graph)
        return Key(graph.signature(), shapes, shared_inputs)

    def of_inputs(self, x: Any) -> tuple:
        """Return the key of which inputs ``x`` of such a batch carry samples."""
        return self.shapes[0], input_shapes(x), self.shared_inputs

    @property
    def plan(self) -> tuple:
        """Key of the plan of a structure."""
        return self.shapes, self.shared_inputs


@dataclass
class ShapePlan:
    """Where the samples are in batches of one shape.

    Attributes:
        layouts: Layouts of the outputs of nodes with uses of parameters.
        reason_to_look: Why rows may belong to other samples in every batch, so that they are found
            again in each; "" where the graph says it.
    """

    layouts: dict[Place, Layout]
    reason_to_look: str = ""


@dataclass(eq=False)
class KnownStructure:
    """One structure of the graph.

    Attributes:
        sides: Side of each node (see `Graph`).
        keys: Key of each node (see `Graph`).
        uses: Uses of parameters.
        sizes: Shapes of the nodes on the parameter side.
        plans: Plans by shapes.
        tested_on_copy: Names of parameters that a deep copy has tested.
    """

    sides: list[int]
    keys: list
    uses: Structure
    sizes: dict[int, tuple]
    plans: Recent[tuple, ShapePlan] = field(default_factory=Recent)
    tested_on_copy: set[str] = field(default_factory=set)

    @staticmethod
    def of(graph: Graph) -> KnownStructure:
        """Return the structure of a classified graph."""
        sizes = {i: graph.sizes[i] for i, side in enumerate(graph.side) if side == PARAMETER}
        return KnownStructure(graph.side, graph.keys, Structure.of(graph), sizes)

    def classify(self, graph: Graph) -> None:
        """Give a graph of this structure the sides and keys of its nodes."""
        graph.side, graph.keys = self.sides, self.keys

    def fits(self, graph: Graph) -> bool:
        """Return True if sides are known, and the parameter side of a graph has its shapes."""
        return bool(self.sides) and all(graph.sizes[i] == sizes for i, sizes in self.sizes.items())


@dataclass(eq=False)
class KnownFlags:
    """What is known of a model in one state of its flags.

    Attributes:
        flags: Key of this state.
        ledger: Routes of the parameters.
        structures: Structures of the graph by their signatures.
        largest_compared: Most elements in the graph of a batch that was compared with halves of
            it, by structure.
        inputs_with_samples: Inputs that carry samples, by number of samples and shapes.
        shapes_of_one_sample: Shapes of inputs that are one sample.
        deep_copies: Number of structures that deep copies have tested.
    """

    flags: tuple
    ledger: Ledger = field(default_factory=Ledger)
    structures: Recent[tuple, KnownStructure] = field(default_factory=lambda: Recent(_FEW))
    largest_compared: Recent[tuple, int] = field(default_factory=lambda: Recent(_FEW))
    inputs_with_samples: Recent[tuple, list[int]] = field(default_factory=Recent)
    shapes_of_one_sample: Recent[tuple, bool] = field(default_factory=Recent)
    deep_copies: int = 0


@dataclass(eq=False)
class Plan:
    """The plan of a batch.

    Attributes:
        flags: State of the flags.
        structure: Structure of the batch's graph.
        shapes: Plan of its shapes.
        key: Key of the batch.
        elements: Number of elements in the graph.
        is_new: Whether nothing was planned for its shapes before.
    """

    flags: KnownFlags
    structure: KnownStructure
    shapes: ShapePlan
    key: Key
    elements: int
    is_new: bool

    @property
    def count(self) -> int:
        """Number of samples."""
        return self.key.shapes[0]

    def keep(self) -> None:
        """Keep the plan for the next batch, once the audits of this one have passed."""
        key, largest = self.key, self.flags.largest_compared
        self.flags.structures.put(key.structure, self.structure).plans.put(key.plan, self.shapes)
        largest.put(key.structure, max(self.elements, largest.get(key.structure) or 0))


class Known:
    """What is known of one model: a tree of caches with flags at its root.

    Attributes:
        by_flags: States by flags.
        are_caches: Whether the dicts of tensors in the model are caches of its parameters.
        comparisons: Number of batches whose outputs were compared with those of their parts.
    """

    def __init__(self) -> None:
        self.by_flags: Recent[tuple, KnownFlags] = Recent(_FEW)
        self.are_caches: Recent[tuple, bool] = Recent(1)
        self.comparisons = 0
