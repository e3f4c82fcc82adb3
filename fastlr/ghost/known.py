"""What is known of a model, and by what it is found again.

In four levels, each within the one before:

- *flags*: the modes of its modules, its parameters' names and dtypes, autocast, its hooks. The
  proofs are of a model in one state of these.
- *structure*: of the autograd graph of its output, without shapes. Each is proven.
- *shapes*: of the inputs and of everything in the graph.
- *program*: all else that a forward pass may branch on. For each shape and program the outputs are
  compared and the samples' rows found.

What is forgotten at one level is forgotten below it, too. What was not used for long is dropped:
it is proven, compared and found again when it comes back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from fastlr.ghost.backward import Structure
from fastlr.ghost.fallback import RightCopies
from fastlr.ghost.graph import Graph, Place
from fastlr.ghost.ownership import saved_axes
from fastlr.ghost.sample_axis import Layout
from fastlr.ghost.verification.few_samples import FewSamples
from fastlr.ghost.verification.record import Ledger
from fastlr.ops.recent import Recent

_FEW = 64  # states of the flags, and structures of one, that are kept


class Key(NamedTuple):
    """By what a batch is found again among those with the same flags."""

    structure: tuple
    shapes: tuple
    program: bytes
    shared_inputs: bytes

    @staticmethod
    def of(graph: Graph, count: int, program: bytes, shared_inputs: bytes) -> Key:
        """Return the key of a batch of ``count`` samples with this graph and program.

        And with the inputs that carry no samples, as far as a forward pass may branch on them.
        """
        shapes = count, tuple(graph.sizes), saved_axes(graph)
        return Key(graph.signature(), shapes, program, shared_inputs)

    @property
    def plan(self) -> tuple:
        """By what the plan of a structure is found."""
        return self.shapes, self.program, self.shared_inputs


@dataclass
class ShapePlan:
    """Where the samples are in batches of one shape whose forward pass sees the same program.

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
        plans: by shapes and program.
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
        running_statistics: ids of the buffers whose values change nothing of a plan, as a forward
            pass uses them as running statistics only.
        forward_hooks_tensors: True if a forward pass gives tensors hooks, which may move gradients
            between samples as no graph shows.
        ledger: what was proven.
        structures: by the signature of the graph.
        tried_programs: those of which it was tried whether samples interact under other conditions.
        inputs_with_samples: which of the inputs carry samples, by number of samples, shapes and
            program.
        shapes_of_one_sample: shapes of inputs that are one sample.
        right_copies: how often a single sample is run at once.
    """

    flags: tuple
    running_statistics: frozenset[int] = frozenset()
    forward_hooks_tensors: bool = False
    ledger: Ledger = field(default_factory=Ledger)
    structures: Recent[tuple, KnownStructure] = field(default_factory=lambda: Recent(_FEW))
    tried_programs: Recent[bytes, bool] = field(default_factory=Recent)
    inputs_with_samples: Recent[tuple, list[int]] = field(default_factory=Recent)
    shapes_of_one_sample: Recent[tuple, bool] = field(default_factory=Recent)
    right_copies: RightCopies = field(default_factory=RightCopies)

    @property
    def hooked(self) -> bool:
        """True if hooks may move gradients between samples' rows, which no graph shows."""
        return self.ledger.hooked or self.forward_hooks_tensors


@dataclass(eq=False)
class Plan:
    """What is known of a batch at every level.

    Attributes:
        flags: of the model with the batch's flags.
        structure: of the batch's graph.
        shapes: of its shapes and program.
        key: by what these are found.
        is_new: True if nothing was planned for its shapes and program before.
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
