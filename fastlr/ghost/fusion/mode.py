"""The folded path: blocks with a convolution run as one node of the autograd graph.

A block is a convolution, batch norm in eval mode and an activation.

While a `Folding` is active, every call of a torch function comes here first, and a table
(calls.py) says what is done with it. A convolution's result is a `Pending` tensor that has not been
computed. If batch norm, and then perhaps an activation, is the only thing that happens to it, the
three run as one `FoldedConv` with folded weights (see fastlr.ops.folded), whose rule
gives the norms of the *original* parameters from the pass that gives the input gradient. Anything
else computes what is pending as the model says. So blocks are found in whatever the forward pass
does, control flow and functional calls included, and nothing is remembered that could become stale.

A block is left as it is (its name and the reason go into `Folding.refused`) where its parts are
seen by anything else, where a parameter serves twice, and where an audit refutes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fastlr.ghost.fusion import batch_norm as fixed_norm
from fastlr.ghost.fusion import conv_bn, recurrent
from fastlr.ghost.fusion.blocks import Blocks
from fastlr.ghost.fusion.calls import HANDLERS, NO_NORM, Call
from fastlr.ghost.fusion.checkpoints import is_checkpointed
from fastlr.ghost.fusion.control_flow import run_watched, runs_functions
from fastlr.ghost.fusion.pending import METADATA, computed

_enabled: ContextVar[bool] = ContextVar("fastlr_folding", default=True)


@contextmanager
def unfolded() -> Iterator[None]:
    """Run models as they are within this context: no convolution is folded with its batch norm."""
    token = _enabled.set(False)
    try:
        yield
    finally:
        _enabled.reset(token)


# Kinds of nodes that a folded forward pass has and the model has not.
OURS = frozenset({conv_bn.NODE, fixed_norm.NODE})
_MOST_PASSES = 3  # that may turn out not to be what the model computes


class Folding(TorchFunctionMode):
    """Finds the blocks of one model and folds them; used as a context around its forward pass.

    Attributes:
        blocks: what was found, and what is refused.
        idle: the model has nothing to fold, and is run as it is.
        hooks_tensors: Whether a forward pass has registered hooks on tensors, which may change any
            gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Blocks()
        self.idle = self.hooks_tensors = False

    def run(self, tensors: Mapping[str, Tensor], forward: Callable[[], Any]) -> Any:
        """Run ``forward`` with its blocks folded.

        Once more where something turned out that forbids folding one.

        Args:
            tensors: the model's parameters by name, as this forward pass uses them.
            forward: the forward pass.
        """
        blocks, has_recurrent_layers = self.blocks, recurrent.expected(tensors)
        if self.idle and not has_recurrent_layers:
            return forward()
        blocks.names = {id(t): name for name, t in tensors.items()}
        for _ in range(_MOST_PASSES):
            blocks.begin()
            if blocks.disabled or not _enabled.get():
                break
            with self:
                result = forward()
            result = computed(result)
            if not blocks.must_run_again:
                self.idle = self._found_nothing() and not has_recurrent_layers
                if self.idle:  # later passes do not begin any
                    blocks.begin()
                return result
        else:
            reason = "its blocks change from one forward pass to the next"
            blocks.disabled = blocks.disabled or reason
            blocks.begin()
        with blocks.unfused if has_recurrent_layers else nullcontext():
            return forward()

    def _found_nothing(self) -> bool:
        """Return True if the last forward pass had nothing to fold: nor will the next."""
        reasons = set(self.blocks.not_folded.values())
        return not self.blocks.has_folded and reasons <= {NO_NORM}

    def __torch_function__(
        self, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # noqa: D105
        if func in METADATA:  # which pending results know
            return func(*args, **(kwargs or {}))
        call = Call(func, args, kwargs or {})
        self.hooks_tensors |= func is Tensor.register_hook
        if runs_functions(func):
            return run_watched(func, args, call.kwargs, self.blocks.names)
        handler = HANDLERS.get(func)
        if handler is None or is_checkpointed() or not torch.is_grad_enabled():
            return call.run()
        result = handler(self.blocks, call)
        return call.run() if result is None else result
