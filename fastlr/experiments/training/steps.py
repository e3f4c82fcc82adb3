"""How training steps run: as they are, with the model compiled, or replayed as a CUDA graph.

A step of a small network is some hundred kernels of a few microseconds; replayed, they follow each
other without the host. What a capture must not do is change anything: parameters, optimiser state,
running statistics and random states are put back afterwards, and the step that it was made for is
then replayed. Dropout draws from torch's generator in a replay as it does in a step that is
launched, so seeding and resuming mean the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fastlr.errors import InputError, ModelError, first_line, warn
from fastlr.estimator.capture import Captured, CudaRecorder, Recorder, graph_key
from fastlr.experiments.runs.folder import random_states, set_random_states
from fastlr.ops.recent import Recent
from fastlr.ops.torch_private import compile_errors

StepMode = Literal["auto", "eager", "compile", "graph"]
HELD = 8  # captures at a time: one for each size of a batch


def resolve_mode(mode: str, device: torch.device) -> str:
    """Return ``eager``, ``compile`` or ``graph``; ``auto`` is ``graph`` on a GPU, else ``eager``.

    Raises:
        InputError: Another word, or ``graph`` on a device that has no CUDA graphs.
    """
    if mode not in get_args(StepMode):
        raise InputError(f"step={mode}: choose one of {', '.join(get_args(StepMode))}")
    if mode == "graph" and device.type != "cuda":
        raise InputError(
            f"step=graph: {device} has no CUDA graphs; choose step=eager or step=compile"
        )
    if mode == "auto":
        return "graph" if device.type == "cuda" else "eager"
    return mode


class TrainingSteps:
    """Calls a training step, or replays it where it has been captured.

    There is one capture for each shape of the inputs.

    A shape is captured when it occurs for the second time. The last `HELD` are kept; they share
    their memory. They are dropped by `check` if the model or what a step changes is not where it
    was.

    Args:
        work: inputs -> a tensor, such as the sum of the losses, or several. It reads the inputs and
            changes tensors in place; it makes no decision by their values. It must set ``.grad`` to
            None before its backward pass. Inputs are tensors and whole numbers; each number has a
            capture of its own.
        model: Trained by ``work``; captures are dropped when its program changes.
        changed: Returns the tensors that a step changes: parameters, buffers, the optimiser's
            state. What a first step adds to them must mean the same as zeros, as the state of SGD
            and AdamW does.
        device: Device of the inputs and the model.
        graph: Capture steps.
        strict: Raise if a capture fails, rather than go on without, with a warning.
        recorder: Captures, on this device with this memory pool; `CudaRecorder` on a GPU.

    Attributes:
        captured: True if steps are captured; becomes False after a failure.
        captures: Number of captures so far.
    """

    def __init__(
        self,
        work: Callable[..., Any],
        model: nn.Module,
        changed: Callable[[], Iterable[Tensor]],
        device: torch.device,
        graph: bool,
        strict: bool = False,
        recorder: Callable[[torch.device, Any], Recorder] = CudaRecorder,
    ) -> None:
        self.work, self.model, self.changed, self.device = work, model, changed, device
        self.captured, self.strict, self.recorder = graph, strict, recorder
        self.captures = 0
        self._pool = torch.cuda.graph_pool_handle() if graph and device.type == "cuda" else None
        self._captures = Recent[tuple, Captured](HELD)
        self._launched: set[tuple] = set()
        self._key: tuple | None = None

    def __call__(self, *inputs: Tensor | int) -> Any:
        """Do a step; the result is valid until the next one."""
        if not self.captured:
            return self.work(*inputs)
        key = tuple(map(_kind, inputs))
        captured = self._captures.get(key)
        if captured is None and key in self._launched:
            captured = self._capture(key, inputs)
        if captured is None:
            self._launched.add(key)
            return self.work(*inputs)
        return captured.replay(inputs)

    def check(self) -> None:
        """Drop the captures if what they refer to has been replaced since they were made.

        This is the model and the tensors that a step changes.
        """
        if len(self._captures) and self._key != graph_key(self.model, self.changed()):
            self.discard()

    def discard(self) -> None:
        """Drop the captures, so that steps are captured anew, in a new memory pool.

        (The pool of no capture cannot be gone on with.)
        """
        self._captures.clear()
        self._pool = torch.cuda.graph_pool_handle() if self._pool is not None else None

    def _capture(self, key: tuple, inputs: tuple[Tensor | int, ...]) -> Captured | None:
        """Capture a step, and change nothing; None where that fails and steps go on without."""
        recorder = self.recorder(self.device, self._pool)
        try:
            with unchanged(self.changed):
                captured = Captured(recorder, self.work, inputs, self.model)
        except RuntimeError as error:
            reason = first_line(error)[:200]
            if self.strict:
                raise ModelError(
                    f"step=graph: a step cannot be captured ({reason}); choose step=eager"
                ) from error
            warn(f"training steps run without a CUDA graph: {reason}")
            self.captured = False
            self.discard()
            return None
        self.captures += 1
        self._key = graph_key(self.model, self.changed())
        return self._captures.put(key, captured)


def _kind(value: Tensor | int) -> Any:
    """Return what inputs of one capture have in common: a tensor's layout and dtype, a number."""
    return (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value


@contextmanager
def unchanged(changed: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
    """Restore tensors and the global random states afterwards.

    Tensors that are new then are filled with zeros.
    """
    before = [(t, t.detach().clone()) for t in changed()]
    states = random_states()
    try:
        yield
    finally:
        with torch.no_grad():
            for t, value in before:
                t.copy_(value)
            known = {id(t) for t, _ in before}
            for t in changed():
                if id(t) not in known:
                    t.zero_()
        set_random_states(states)


class Compiled:
    """A model whose forward pass is compiled by `torch.compile` for some batch sizes.

    Other sizes run as they are.

    So what is compiled is a function of the size alone, not of the sizes that came before.

    Args:
        model: Trained; it keeps its parameters.
        sizes: Batch sizes that occur often.
    """

    def __init__(self, model: nn.Module, sizes: Iterable[int]) -> None:
        self.model, self.sizes = model, frozenset(sizes)
        self.compiled = torch.compile(model, dynamic=False)

    def __call__(self, x: Tensor) -> Any:
        """Run the model.

        Raises:
            ModelError: It cannot be compiled.
        """
        if len(x) not in self.sizes:
            return self.model(x)
        try:
            return self.compiled(x)
        except compile_errors() as error:
            raise ModelError(
                f"step=compile: {first_line(error)[:200]}; choose step=eager"
            ) from error
