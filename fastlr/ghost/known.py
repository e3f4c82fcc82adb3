"""Cache of what has been verified for a model, and its keys.

It has three levels, each within the one before:

- *flags*: train flags, names and dtypes of the parameters, autocast. Proofs hold for one state of
  these.
- *structure*: the autograd graph of the output, without shapes. Each structure is proven.
- *shapes*: the shapes in the graph, and the inputs without samples. For each, outputs are compared
  and the samples' rows found.

Nothing here says whether the model's code or attributes have changed since: the audits of every
measurement do (fastlr.ghost.auditor). Entries that were not used for long are dropped, and verified
again when they come back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from fastlr.ghost.backward import Structure
from fastlr.ghost.batch import input_shapes
from fastlr.ghost.fallback import RightCopies
from fastlr.ghost.graph import Graph, Place
from fastlr.ghost.ownership import saved_axes
from fastlr.ghost.sample_axis import Layout
from fastlr.ghost.verification.few_samples import FewSamples
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
        layouts: of the outputs of nodes with uses of parameters.
        reason_to_look: why rows may belong to other samples in every batch, so that they are found
            anew in each; "" where the graph tells all.
    """

    layouts: dict[Place, Layout]
    reason_to_look: str = ""


@dataclass(eq=False)
class KnownStructure:
    """What is known of a structure of the graph.

    Attributes:
        sides: parameter side, sample side or neither, of each node (see `Graph`).
        keys: by what the proof of a use transfers, of each node (see `Graph`).
        uses: the uses of parameters, and how their gradients become those of parameters.
        unproven: names of the parameters of which no proof has met a use; they go by the loop.
        plans: by shapes.
    """

    sides: list[int]
    keys: list
    uses: Structure
    unproven: frozenset[str]
    plans: Recent[tuple, ShapePlan] = field(default_factory=Recent)

    def classify(self, graph: Graph) -> None:
        """Give a graph of this structure the sides and keys of its nodes."""
        graph.side, graph.keys = self.sides, self.keys


@dataclass(eq=False)
class KnownFlags:
    """What is known of a model in one state of its flags.

    Attributes:
        flags: by which this is found.
        forward_hooks_tensors: True if a forward pass gives tensors hooks, which may move gradients
            between samples as no graph shows.
        ledger: what was proven.
        structures: by the signature of the graph.
        inputs_with_samples: which of the inputs carry samples, by number of samples and shapes.
        shapes_of_one_sample: shapes of inputs that are one sample.
        right_copies: how often a single sample is run at once.
    """

    flags: tuple
    forward_hooks_tensors: bool = False
    ledger: Ledger = field(default_factory=Ledger)
    structures: Recent[tuple, KnownStructure] = field(default_factory=lambda: Recent(_FEW))
    inputs_with_samples: Recent[tuple, list[int]] = field(default_factory=Recent)
    shapes_of_one_sample: Recent[tuple, bool] = field(default_factory=Recent)
    right_copies: RightCopies = field(default_factory=RightCopies)


@dataclass(eq=False)
class Plan:
    """What is known of a batch at every level.

    Attributes:
        flags: of the model with the batch's flags.
        structure: of the batch's graph.
        shapes: of its shapes.
        key: by what these are found.
        is_new: True if nothing was planned for its shapes before.
    """

    flags: KnownFlags
    structure: KnownStructure
    shapes: ShapePlan
    key: Key
    is_new: bool

    @property
    def count(self) -> int:
        """Number of samples."""
        return self.key.shapes[0]

    @property
    def by_loop(self) -> frozenset[str]:
        """Names of the parameters that go by the loop over samples."""
        return self.structure.unproven | self.flags.ledger.loop


class Known:
    """What is known of one model: a tree of caches, flags at its root.

    Attributes:
        by_flags: what is known of it in each state of its flags, by these.
        few_samples: on how many samples it is proven.
        emptied: of the dicts of tensors in it, those that our forward passes run without.
        proofs: how many were made.
        comparisons: how many batches' outputs were compared with those of their parts.
    """

    def __init__(self) -> None:
        self.by_flags: Recent[tuple, KnownFlags] = Recent(_FEW)
        self.few_samples = FewSamples()
        self.emptied: Recent[tuple, list[tuple[nn.Module, str]]] = Recent(1)
        self.proofs = self.comparisons = 0
