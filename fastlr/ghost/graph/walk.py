"""The autograd graph of an output, walked once: every node, every use of every parameter.

In: an output ``z`` of a forward pass and the parameters by name (`walk`). Out: a `Graph`, nodes in
post-order. `Graph.classify` gives each node one of three sides. *Parameter-side* nodes compute
something of parameters alone (a transposed weight, W + B A, a normalised weight). *Sample-side*
nodes have a sample axis. The others have no parameter below them. A `Use` is a parameter-side input
of a sample-side node: there the gradient of each sample can be had, and nowhere below.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fastlr.ops.torch_private import output_metadata, own_function

ACCUMULATE = "torch::autograd::AccumulateGrad"


def kinds(names: str) -> frozenset[str]:
    """Return kinds of nodes; "Backward0" is added to names without Backward."""
    return frozenset(name if "Backward" in name else f"{name}Backward0" for name in names.split())


# Pairs of numbers as one, and back.
OF_COMPLEX = kinds("ViewAsComplex ViewAsReal")
CASTS = kinds("ToCopy Clone Alias")


# Each element of the output is one element of the input, none twice: the squared norm goes through
# unchanged.
VIEWS = (
    OF_COMPLEX
    | CASTS
    | kinds(
        "T Transpose Permute View UnsafeView ReshapeCopy Split SplitWithSizes UnsafeSplit Chunk "
        "Slice Select Unbind Unsqueeze Squeeze SqueezeBackward1 SqueezeBackward2 SqueezeBackward3 "
        "Narrow Flip Roll Detach Swapaxes Moveaxis"
    )
)


# One operation, whose node is another by library, size or mode.
ALIASES = {
    "CudnnBatchNormBackward0": "NativeBatchNormBackward0",
    "MiopenBatchNormBackward0": "NativeBatchNormBackward0",
    "EuclideanDistBackward0": "CdistBackward0",  # of more than 25 rows or points
    "ReshapeAliasBackward0": "ViewBackward0",  # what reshape is within a dispatch mode
}


_VIEW_ARGUMENTS = "start end step index dim dims shifts split_size split_sizes dim0 dim1".split()


CUSTOM = "own "  # begins the kind of a node of a user's own Function


RAGGED = (-1,)  # no shape of any tensor


NEITHER, PARAMETER, SAMPLE = range(3)


Place = tuple[int, int]  # a node, and the number of one of its outputs


@dataclass(frozen=True)
class Use:
    """One parameter-side input of a sample-side node."""

    node: int
    slot: int
    source: Place  # output of the parameter-side node (or AccumulateGrad) that feeds the slot
    key: tuple  # node kind, slot, the parameter side below: a rule is given up by it

    @property
    def kind(self) -> str:
        """Kind of the node."""
        return self.key[0][0]


@dataclass
class Graph:
    """The graph below one output: ``nodes`` in post-order (inputs before what consumes them)."""

    nodes: list
    names: list[str]
    children: list[tuple[Place, ...]]  # by slot; node -1 for an input that needs no gradient
    parameters: dict[int, str]  # AccumulateGrad node -> parameter name
    # AccumulateGrad nodes of leaves that are not trainable parameters of the model.
    unregistered: list[int]
    side: list[int] = field(default_factory=list)
    keys: list = field(default_factory=list)
    keepalive: Any = field(default=None, repr=False)  # holds the nodes

    @cached_property
    def sizes(self) -> list[tuple[tuple[int, ...], ...]]:
        """Shapes of all outputs of each node, as `shape` gives them."""
        return [tuple(map(_sizes, output_metadata(node))) for node in self.nodes]

    def shape(self, node: int, output: int = 0) -> torch.Size:
        """Shape of an output of a node in the forward pass; ``RAGGED`` of a nested tensor."""
        return torch.Size(self.sizes[node][output])

    def dtype(self, node: int, output: int = 0) -> torch.dtype:
        """Dtype of an output of a node in the forward pass."""
        return output_metadata(self.nodes[node])[output].dtype

    def outputs(self, node: int) -> list[Place]:
        """Return the outputs of a node."""
        return [(node, output) for output in range(len(self.sizes[node]))]

    @property
    def has_nested_tensors(self) -> bool:
        """True if some output of a node is a nested tensor."""
        return any(RAGGED in sizes for sizes in self.sizes)

    @property
    def has_custom_functions(self) -> bool:
        """True if some node is a user's own `torch.autograd.Function`."""
        return any(name.startswith(CUSTOM) for name in self.names)

    def float_dtypes(self) -> set[torch.dtype]:
        """Floating-point dtypes in the graph."""
        return {
            m.dtype for n in self.nodes for m in output_metadata(n) if m.dtype.is_floating_point
        }

    def lowest_dtype(self) -> torch.dtype:
        """Least precise floating-point dtype in the graph."""
        return max(self.float_dtypes(), key=lambda d: torch.finfo(d).eps, default=torch.float64)

    def signature(self) -> tuple:
        """Return the structure of the graph, without shapes.

        Kinds, edges, parameters, and what views show of parameters that are seen in several ways:
        there it matters which parts.
        """
        root = {i: i for i in self.parameters}  # parameters, and views of them -> which parameter
        for i, name in enumerate(self.names):
            if name in VIEWS and self.children[i][0][0] in root:
                root[i] = root[self.children[i][0][0]]
        used = Counter([child for children in self.children for child, _ in children])
        several = {parameter for i, parameter in root.items() if used[i] > 1}
        shown = tuple(
            getattr(self.nodes[i], f"_saved_{attribute}", None)
            for i, parameter in root.items()
            if parameter in several
            for attribute in _VIEW_ARGUMENTS
        )
        return tuple(self.names), tuple(self.children), tuple(self.parameters.items()), shown

    def classify(self, of_other_batch_size: Graph | None) -> None:
        """Decide the side of each node, bottom up.

        A node whose differentiable inputs are all parameter-side is so too if it has the same
        shapes for another number of samples.

        Args:
            of_other_batch_size: Graph of the same structure for another number of samples. None:
                all such nodes are sample-side.
        """
        self.side, self.keys = [], []
        for i in range(len(self.names)):
            side, key = self._side(i, of_other_batch_size)
            self.side.append(side)
            self.keys.append(key)

    def _side(self, i: int, of_other_batch_size: Graph | None) -> tuple[int, tuple | None]:
        """Side and key of a node whose inputs are classified."""
        if i in self.parameters:
            return PARAMETER, ("parameter", self.parameters[i])
        below = [
            child for child, _ in self.children[i] if child >= 0 and self.side[child] != NEITHER
        ]
        if not below:
            return NEITHER, None
        key = self._key(i)
        if any(self.side[child] == SAMPLE for child in below):
            return SAMPLE, key
        if self.names[i] in VIEWS:
            return PARAMETER, self.keys[below[0]] if self.names[i] in CASTS else key
        has_no_samples = (
            of_other_batch_size is not None and self.sizes[i] == of_other_batch_size.sizes[i]
        )
        return PARAMETER if has_no_samples else SAMPLE, key

    def _key(self, i: int) -> tuple:
        def below(child: int, output: int) -> tuple | str | None:
            if child < 0 or self.side[child] == NEITHER:
                return None
            return "sample" if self.side[child] == SAMPLE else (self.keys[child], output)

        return (self.names[i], tuple(below(*place) for place in self.children[i]))

    def uses(self) -> list[Use]:
        """Every parameter-side input of a sample-side node.

        None where tensors are nested: no rule serves there.
        """
        if self.has_nested_tensors:
            return []
        return [
            Use(i, slot, source, (self.keys[i], slot))
            for i in range(len(self.nodes))
            if self.side[i] == SAMPLE
            for slot, source in enumerate(self.children[i])
            if source[0] >= 0 and self.side[source[0]] == PARAMETER
        ]

    def below(self, node: int) -> set[int]:
        """Return the nodes at or below a parameter-side node."""
        seen, stack = {-1}, [node]
        while stack:
            i = stack.pop()
            if i not in seen:
                seen.add(i)
                stack.extend(child for child, _ in self.children[i])
        return seen - {-1}

    def parameters_below(self, node: int) -> list[int]:
        """AccumulateGrad nodes of parameters at or below a parameter-side node."""
        return sorted(self.below(node) & self.parameters.keys())

    def names_below(self, source: Place) -> list[str]:
        """Names of the parameters at or below an output of a parameter-side node."""
        return [self.parameters[p] for p in self.parameters_below(source[0])]


def walk(z: Tensor, parameters: Mapping[str, Tensor]) -> Graph:
    """Collect the graph below ``z``, inputs before consumers.

    The order is fixed by the graph alone.
    """
    names_of = {id(p): name for name, p in parameters.items()}
    index: dict = {}
    graph = Graph([], [], [], {}, [], keepalive=_node_that_holds_the_others(z))
    stack: list = [(z.grad_fn, None)]
    while stack:
        node, inputs = stack.pop()
        if node in index:  # several consumers have put it there
            continue
        if inputs is None:
            inputs = node.next_functions
            waiting = [(c, None) for c, _ in inputs[::-1] if c is not None and c not in index]
            if waiting:
                stack += [(node, inputs), *waiting]
                continue
        i = index[node] = len(graph.nodes)
        name = _kind(node)
        graph.nodes.append(node)
        graph.names.append(name)
        graph.children.append(
            tuple([(-1, 0) if c is None else (index[c], output) for c, output in inputs])
        )
        if name == ACCUMULATE:
            known = names_of.get(id(node.variable))
            if known is None:
                graph.unregistered.append(i)
            else:
                graph.parameters[i] = known
    return graph


def _sizes(metadata: Any) -> tuple[int, ...]:
    """Return the shape of an output; ``RAGGED`` of a nested tensor, which has none."""
    return RAGGED if metadata.is_nested_tensor else tuple(metadata.shape)


def _node_that_holds_the_others(z: Tensor) -> Any:
    """Return a node above that of ``z``, which holds it without the memory of ``z``.

    A Python Function's node dies with the tensors and nodes that use its outputs, whoever else
    holds it.
    """
    dies_with_its_outputs = isinstance(z.grad_fn, torch.autograd.function.BackwardCFunction)
    if not dies_with_its_outputs:
        return z.grad_fn
    with torch.enable_grad():
        return z.view_as(z).grad_fn


def _kind(node: Any) -> str:
    """Return the kind of a node: its name, marked if it is a user's own Function.

    A user's Function must not pass for one of fastlr's.
    """
    name, function = node.name(), own_function(node)
    if function is None:
        return ALIASES.get(name, name)
    return name if function.__module__.startswith("fastlr.") else f"{CUSTOM}{name}"
