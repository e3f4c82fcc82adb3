"""The folded path: blocks with a convolution run as one node of the autograd graph.

A block is a convolution, batch norm in eval mode and an activation.

While a `Folding` is active, every call of a torch function comes here first, and a table
(calls.py) says what is done with it. A convolution's result is a `Pending` tensor that has not been
computed. If batch norm, and then perhaps an activation, is the only thing that happens to it, the
three run as one `FoldedConv` with folded weights (see fastlr.ops.reference.folded), whose rule
gives the norms of the *original* parameters from the pass that gives the input gradient. Anything
else computes what is pending as the model says. So blocks are found in whatever the forward pass
does, control flow and functional calls included, and nothing is remembered that could become stale.

A block is left as it is (its name and the reason go into `Folding.refused`) where its parts are
seen by anything else, where a parameter serves twice, and where a proof refutes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fastlr import ops
from fastlr.distributed import on_demand
from fastlr.ghost import recurrent
from fastlr.ghost.fusion import batch_norm as fixed_norm
from fastlr.ghost.fusion import conv_bn
from fastlr.ghost.fusion.blocks import Blocks
from fastlr.ghost.fusion.calls import CONVOLUTIONS, HANDLERS, NO_NORM, Call, metadata
from fastlr.ghost.fusion.pending import METADATA, computed
from fastlr.ops.torch_private import saved_tensors_are_hooked, tree_leaves

_enabled: ContextVar[bool] = ContextVar("fastlr_folding", default=True)


@contextmanager
def unfolded() -> Iterator[None]:
    """Run models as they are within this context: no convolution is folded with its batch norm."""
    token = _enabled.set(False)
    try:
        yield
    finally:
        _enabled.reset(token)


def enabled() -> bool:
    """Return True if models are folded where they can be."""
    return _enabled.get()


# Kinds of nodes that a folded forward pass has and the model has not.
OURS = frozenset({conv_bn.NODE, fixed_norm.NODE})
_DTYPE: Any = Tensor.dtype


class Folding(Blocks, TorchFunctionMode):
    """Finds the blocks of one model and folds them; used as a context around its forward pass.

    What it finds is in the attributes of `Blocks`.

    Attributes:
        inputs: of the forward pass, where kernels serve.
        casts_inputs: True if convolutions that autocast converts the inputs for were all that read
            them, by kernels.
        idle: the model has nothing to fold, and is run as it is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inputs: Any = None
        self.casts_inputs: bool | None = None
        self.idle = False

    def run(
        self, tensors: Mapping[str, Tensor], forward: Callable[[], Any], inputs: Any = None
    ) -> Any:
        """Run ``forward`` with its blocks folded.

        Once more where something turned out that forbids folding one.

        Args:
            tensors: the model's parameters by name, as this forward pass uses them.
            forward: the forward pass.
            inputs: of which it is.
        """
        by_kernels = isinstance(inputs, Tensor) and ops.backend_for(inputs) == "triton"
        self.inputs = inputs if by_kernels else None
        self.casts_inputs = None if by_kernels else self.casts_inputs
        has_steps = recurrent.expected(tensors)
        self.names = {id(t): name for name, t in tensors.items()}
        for _ in range(3):
            self.begin()
            if self.disabled or self.idle or not enabled():
                break
            with self:
                result = forward()
            result = computed(result)
            self.weights.begin()
            if not self.again and not self.disabled:
                # Look no more.
                self.idle = not (self.active or has_steps) and set(self.plain.values()) <= {NO_NORM}
                return result
        else:
            self.disabled = self.disabled or "its blocks change from one forward pass to the next"
        self.begin()
        with self.unfused if has_steps else nullcontext():
            return forward()

    def __torch_function__(
        self, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # noqa: D105
        call = Call(func, args, kwargs or {})
        if self.inputs is not None:
            self._note_reader_of_inputs(call)
        handler = HANDLERS.get(func)
        if handler is None:
            return call.run()
        if handler is not metadata and saved_tensors_are_hooked(on_demand.hooks()):
            return call.run()  # checkpointing: the part is run again, as the model says
        result = handler(self, call)
        return call.run() if result is None else result

    def _note_reader_of_inputs(self, call: Call) -> None:
        """Note in ``casts_inputs`` what a call that gets the inputs has to do with their dtype."""
        if not any(t is self.inputs for t in tree_leaves((call.args, call.kwargs))):
            return
        if call.func in METADATA and call.func != _DTYPE.__get__:
            return
        autocast = torch.is_autocast_enabled(self.inputs.device.type)
        casts = call.func in CONVOLUTIONS and autocast
        self.casts_inputs = casts and self.casts_inputs is not False
