"""What a first estimate on a GPU will launch is compiled before it, side by side.

A pass over the first chunk in which plain torch serves every op notes the launches. It has an
engine of its own, so that nothing compared or measured by it is known of the model, and
it happens once a machine for a model: a mark beside the kept comparisons says that it was done.
Chunks of other sizes launch the same but for a few kernels, which their launches compile: of 89 of
MobileNetV3-Large's, 1,000 images have 5 that 4 images have not.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from fastlr import ops
from fastlr.estimator.passes import Passes
from fastlr.estimator.progress import late_line
from fastlr.ghost.engine import Engine
from fastlr.ghost.verification.audit import Draw
from fastlr.ops import compile_ahead, kept_comparisons
from fastlr.ops.compile_ahead import Architecture, Launch
from fastlr.ops.cudnn import never_cudnn
from fastlr.ops.process_state import quiet_rng, warnings_ignored
from fastlr.ops.torch_private import tree_leaves


class Ahead:
    """Compiles what chunks will launch.

    Args:
        passes: over one chunk.

    Attributes:
        told: True to say on a terminal that kernels are compiled.
    """

    def __init__(self, passes: Passes) -> None:
        self._of_the_estimate = passes
        self._asked = False
        self.told = False

    def compile(self, start: int, stop: int) -> None:
        """Compile what a chunk of these inputs launches, unless this machine has.

        Nothing depends on it: what is not compiled here is compiled when it is launched.
        """
        if self._asked:
            return
        self._asked = True
        target = self._target()
        if target is None:
            return
        # The estimate itself says what is wrong, and draws what it would have drawn.
        with suppress(Exception), quiet_rng(self._of_the_estimate.view.device):
            mark = self._mark()
            if mark is None or mark.exists():
                return
            with late_line("fastlr: compiling kernels, once a machine", self.told):
                complete = compile_ahead.compile_side_by_side(
                    lambda: self._launches(start, stop), target
                )
            if complete:
                mark.parent.mkdir(parents=True, exist_ok=True)
                mark.touch()

    def _target(self) -> Architecture | None:
        """Return what Triton compiles for here; None where fastlr launches no kernels of Triton."""
        view = self._of_the_estimate.view
        if view.device.type != "cuda" or not ops.has_triton():
            return None
        major, minor = torch.cuda.get_device_capability(view.device)
        return Architecture("cuda", 10 * major + minor, 32)

    def _mark(self) -> Path | None:
        """Return the file that says that the model was compiled for; None for nowhere.

        Its name tells the model by its parameters and the inputs by their shapes.
        """
        passes = self._of_the_estimate
        device, folder = passes.view.device, kept_comparisons.folder()
        key = kept_comparisons.made_for(-1 if device.index is None else device.index)
        if key is None or folder is None:
            return None
        tensors = list(passes.engine.view.module.parameters()) + tree_leaves(passes.inputs(0, 1))
        layouts = [(t.dtype, t.shape, t.stride()) for t in tensors if isinstance(t, Tensor)]
        told = repr((key, layouts, passes.options.dtype, passes.options.probe))
        return folder / f"compiled-{kept_comparisons.digest(told)[:32]}"

    def _launches(self, start: int, stop: int) -> list[Launch]:
        """Return what a chunk of these inputs launches, one for each compiled variant.

        cuDNN is off: it would plan convolutions that kernels serve in the measurement.
        """
        own = Passes(self._of_the_estimate.options, self._of_the_estimate.view)
        own.engine = Engine(own.view)
        launches, note = compile_ahead.noted()
        try:
            with warnings_ignored(), never_cudnn(), ops.noting_launches(note):
                own.norms(start, stop, Draw(0))
        finally:
            if own.view.device.type == "cuda":
                torch.cuda.empty_cache()  # plain torch takes more than kernels do
        return list(launches.values())
