"""The forward passes of an engine: folded, on copies of the inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fastlr.errors import NonFiniteError
from fastlr.ghost.fusion.mode import Folding, unfolded
from fastlr.ghost.graph.walk import Graph, walk
from fastlr.ghost.model.batch import Batch, along, copied
from fastlr.ghost.model.non_finite import first_module_not_finite
from fastlr.ghost.model.view import ModelView, require_graph
from fastlr.ghost.model.writes import passes_have_written
from fastlr.ops.cudnn import cudnn_as_user_set
from fastlr.ops.deferred_checks import refuse_beyond
from fastlr.ops.torch_private import tree_leaves


@dataclass(eq=False)
class ForwardPass:
    """A forward pass over a batch that is measured.

    Attributes:
        view: Model.
        folding: Folding under which it ran.
        x: Inputs.
        z: Output, with its graph.
        count: Number of samples.
        graph: Graph below ``z``.
        has_folded: Whether the pass differed from the model's own.
        carriers: Indices of the flattened inputs that carry samples; None: those that look so.
    """

    view: ModelView
    folding: Folding
    x: Any
    z: Tensor
    count: int
    graph: Graph
    has_folded: bool
    carriers: list[int] | None = None

    @staticmethod
    def of(view: ModelView, folding: Folding, x: Any) -> ForwardPass:
        """Run the model forward and walk the graph of its output.

        Raises:
            NonFiniteError: The output is not finite.
            ModelError: No parameter acts on the output.
        """
        z = _output(view, folding, x)
        count = view.sample_count(z)
        require_finite(z, lambda: first_module_not_finite(view, x))
        require_graph(z)
        graph = walk(z, view.parameters)
        return ForwardPass(view, folding, x, z, count, graph, folding.blocks.has_folded)

    @property
    def batch(self) -> Batch:
        """The inputs, from which samples can be picked."""
        return self.view.batch(self.x, self.count, self.carriers)

    @property
    def elements(self) -> int:
        """Number of elements in the graph."""
        return sum(math.prod(shape) for shapes in self.graph.sizes for shape in shapes)

    def run(self, samples: Sequence[int]) -> Tensor:
        """Run some samples in the same way, and return their output with its graph."""
        return run_folded(self.view, self.folding, self.batch.pick(samples))

    def run_again(self) -> Tensor:
        """Run the batch again, and return its output with its graph."""
        return _output(self.view, self.folding, self.x)


def _output(view: ModelView, folding: Folding, x: Any) -> Tensor:
    """Return the output for a batch. A single sample runs unfolded.

    Its norms are compared with nothing, as plain autograd itself computes them.
    """
    if folding.idle:
        return run_measured(view, folding, x)
    tensors = [i for i, leaf in enumerate(tree_leaves(x)) if isinstance(leaf, Tensor)]
    looks_like_one_sample = along(x, 1, view.in_dim) == tensors
    with unfolded() if looks_like_one_sample else nullcontext():
        z = run_measured(view, folding, x)
    if not folding.blocks.has_folded or view.sample_count(z) > 1:
        return z
    with unfolded():
        return run_measured(view, folding, x)


def run_measured(view: ModelView, folding: Folding, x: Any) -> Tensor:
    """Run the model folded, with cuDNN as the user has set it."""
    with cudnn_as_user_set(view.device):
        return run_folded(view, folding, x)


def run_folded(view: ModelView, folding: Folding, x: Any) -> Tensor:
    """Run the model folded on copies of the inputs, as it may write to them."""
    given, known_to_write = copied(x), passes_have_written()
    z = folding.run(view.named, lambda: view.forward(given))
    if passes_have_written() and not known_to_write:
        return run_folded(view, folding, x)  # this graph has no copies of what the pass has written
    return z


def require_finite(z: Tensor, where: Callable[[], str] = str) -> None:
    """Refuse an output that is not finite, and say where that begins.

    Minus infinity is allowed: it is a logit that classes may have.
    """
    if z.numel():
        refuse_beyond(
            z.detach(),
            lambda: NonFiniteError(
                "the model's output has infinite values or values that are not a number" + where()
            ),
        )
