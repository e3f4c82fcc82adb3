"""A function of a model captured as a CUDA graph, and replayed on other inputs.

The graph reads and writes memory where it is. So a captured function has inputs of its own, into
which those of a call are copied, and results that each replay fills. It holds as long as the
model's tensors are where they were and its attributes have the same values (`graph_key`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fastlr.ghost.model.attributes import Attributes
from fastlr.ghost.model.writes import put_back_writes
from fastlr.ops.objects import INTERNAL, address
from fastlr.ops.torch_private import forget_cublas_workspaces, stop_allocating_from

# Runs before the capture: kernels are compiled, libraries choose algorithms and take workspaces.
WARM_UP = 2


class Recorder(Protocol):
    """Captures a function that works on fixed memory, and repeats it."""

    def capture(self, function: Callable[[], Any]) -> Any:
        """Run the function to warm up, then capture it; return its result.

        Every replay fills the tensors of the result.
        """

    def replay(self) -> None:
        """Repeat what was captured."""


class CudaRecorder:
    """A CUDA graph.

    Args:
        device: Where its work is done.
        pool: Result of `torch.cuda.graph_pool_handle`, for graphs that may share memory: the
            results of one are used before another is replayed.
    """

    def __init__(self, device: torch.device, pool: Any = None) -> None:
        self.device, self.graph = device, torch.cuda.CUDAGraph()
        self.pool = torch.cuda.graph_pool_handle() if pool is None else pool

    def capture(self, function: Callable[[], Any]) -> Any:
        """Warm up on a side stream of the device, then capture on it.

        Without a stream of its own, `torch.cuda.graph` takes the one that it made for the first
        capture of the process, on whatever device that was: on another, nothing is captured, and
        replays leave stale values.
        """
        with torch.cuda.device(self.device):
            side = torch.cuda.Stream(self.device)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UP):
                    function()
            torch.cuda.current_stream().wait_stream(side)
            before = torch.cuda.current_stream()
            _capture_with_own_generator(self.graph)
            # So that captured products have workspaces of the graph's pool: those of the warm-up
            # may be given to others while the graph goes on writing there.
            forget_cublas_workspaces()
            try:
                # thread_local: a thread that loads the next task may allocate meanwhile
                with torch.cuda.graph(
                    self.graph, pool=self.pool, stream=side, capture_error_mode="thread_local"
                ):
                    return function()
            except BaseException:
                # torch 2.11 may stay on the capture's stream, and allocate from its pool, after an
                # error
                torch.cuda.set_stream(before)
                with suppress(RuntimeError):
                    stop_allocating_from(self.pool, before.device_index)
                raise
            finally:
                forget_cublas_workspaces()

    def replay(self) -> None:
        """Launch the graph on the device's current stream."""
        with torch.cuda.device(self.device):
            self.graph.replay()


def _capture_with_own_generator(graph: Any) -> None:
    """Let a capture take a new generator of random numbers in place of the device's default one.

    torch makes the default generator part of every capture, and until its end a draw from it in any
    other thread raises. What is captured here draws nothing. So another one stands in its place
    while the capture begins, and no longer.
    """
    begin = getattr(graph, "capture_begin", None)
    if begin is None:
        return

    def capture_begin(*args: Any, **options: Any) -> None:
        default = torch.cuda.default_generators[torch.cuda.current_device()]
        own = default.graphsafe_get_state()
        default.graphsafe_set_state(torch.Generator(default.device))
        try:
            begin(*args, **options)
        finally:
            default.graphsafe_set_state(own)

    graph.capture_begin = capture_begin


NUMBERS = frozenset((bool, int, float, str))  # attributes that a capture may have read as constants


def graph_key(model: nn.Module, others: Iterable[Tensor] = ()) -> tuple:
    """Return what a graph was captured with that reads a model and other tensors.

    These are the addresses and dtypes of tensors, and which are trained (their values may change);
    numbers and texts among the attributes of each module, and the code of its hooks.
    """
    put_back_writes(model)  # which puts back what passes have changed
    attributes = Attributes(model)
    tensors = [t for _, t in attributes.tensors] + [*others]
    memory = tuple((address(t), t.dtype, t.requires_grad) for t in tensors)
    hooks = [hook for held in attributes.hooks for hook in held.values()]
    code = tuple(getattr(hook, "__code__", type(hook)) for hook in hooks)
    return memory, code, *map(_constants, attributes.modules)


def _constants(module: nn.Module) -> tuple:
    """Return the numbers and texts of a module, and in its containers one deep; and its id."""
    held: list[tuple[Any, Any]] = [
        (name, value) for name, value in vars(module).items() if name not in INTERNAL
    ]
    for name, value in list(held):
        if type(value) in (list, tuple, dict):
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            held += [((name, key), entry) for key, entry in entries]
    return id(module), *[entry for entry in held if type(entry[1]) in NUMBERS]


class ShapeChanged(Exception):
    """A batch has other shapes than the captured one."""


class Captured:
    """A function captured on copies of its inputs, to be replayed on others of their shapes.

    Args:
        recorder: Captures.
        function: Works on fixed memory and makes no decision by the values of tensors.
        inputs: Its arguments, tensors and others.
        model: Which the function runs; memory that its attributes hold is kept as long as this, so
            that no replay reads memory that was given back.

    Attributes:
        result: The function's result, whose tensors every replay fills.
    """

    def __init__(
        self,
        recorder: Recorder,
        function: Callable[..., Any],
        inputs: Sequence[Any],
        model: nn.Module,
    ) -> None:
        self.recorder = recorder
        self._inputs = [t.clone() if isinstance(t, Tensor) else t for t in inputs]
        tensors = [t for _, t in Attributes(model).tensors]
        self._held = [t.detach() for t in tensors if not isinstance(t, nn.Parameter)]
        self.result = recorder.capture(lambda: function(*self._inputs))

    def replay(self, inputs: Sequence[Any]) -> Any:
        """Repeat the function on other inputs and return its result.

        Raises:
            ShapeChanged: An input has another shape than the captured one, or another value if it
                is no tensor.
        """
        for fixed, given in zip(self._inputs, inputs, strict=True):
            if getattr(given, "shape", given) != getattr(fixed, "shape", fixed):
                raise ShapeChanged
            if isinstance(fixed, Tensor):
                fixed.copy_(given)
        self.recorder.replay()
        return self.result
