"""The convolutions that would reach cuDNN in a measurement on a GPU, counted on a CPU."""

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastlr import ops
from fastlr.ops import cudnn, dispatch
from fastlr.ops.torch_private import cudnn_enabled


class Problems(TorchDispatchMode):
    """Notes the distinct problems: direction, shapes, strides, padding, groups, dtype and layout.

    Attributes:
        planned: Those met while cuDNN was on, which it would plan.
        others: Those met while it was off.
    """

    def __init__(self):
        super().__init__()
        self.planned, self.others = set(), set()
        self.within_kernel = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not self.within_kernel and name == "convolution":
            self._note("forward", *args[:2], *args[3:9])
        elif not self.within_kernel and name == "convolution_backward":
            for direction, wanted in zip(("input", "weight"), args[10], strict=False):
                if wanted:
                    self._note(direction, *args[1:3], *args[4:10])
        return func(*args, **(kwargs or {}))

    def _note(self, direction, x, weight, stride, padding, dilation, _, __, groups):
        channels_last = x.is_contiguous(memory_format=torch.channels_last)
        problem = (direction, x.shape, weight.shape, *map(tuple, (stride, padding, dilation)))
        kind = (groups, x.dtype, channels_last and not x.is_contiguous())
        never_by_cudnn = x.dtype == torch.float64 and 1 < groups == x.shape[1]
        if not never_by_cudnn:
            (self.planned if cudnn_enabled() else self.others).add(problem + kind)


@contextmanager
def counted(monkeypatch):
    """Run models as on a GPU, plain torch serving as the kernels, and note convolutions."""
    problems, real = Problems(), dispatch.run

    def run(name, *args):
        by_kernel = ops.TABLE[name].kernel is not None and dispatch.backend_for(*args) == "triton"
        if by_kernel:
            from fastlr.kernels import launching

            with launching.noting(lambda *launch: None):
                by_kernel = ops.get(name, "triton")(*args) is not NotImplemented
        before, problems.within_kernel = problems.within_kernel, by_kernel or problems.within_kernel
        try:
            return real(name, *args)
        finally:
            problems.within_kernel = before

    monkeypatch.setattr(ops, "run", run)
    monkeypatch.setattr(cudnn, "PLANNED_ON", ("cpu",))
    with ops.noting_launches(), problems:
        yield problems
