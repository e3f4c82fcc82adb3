"""The ladder: ways to measure a model, from the fastest to the plainest.

If plain autograd refutes the norms of a batch, or the model fails, the engine takes one step down
and measures the batch again. It stays there. First the whole model steps down (`Rung`). If that
does not help, parameters with wrong norms are measured by the formulas of their nodes, then by
sample (`Plan.step_down`). Errors that say that the model has no per-sample norms end the
measurement.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import IntEnum

from torch.utils.checkpoint import CheckpointError

from fastlr import ops
from fastlr.errors import FastlrError, few, first_line, warn
from fastlr.ghost.fusion.mode import Folding, unfolded
from fastlr.ghost.norms.sq_norms import MeasureAgain
from fastlr.ghost.trust.audits import Refuted
from fastlr.ops.deferred_checks import out_of_memory


class Rung(IntEnum):
    """A rung of the ladder."""

    KERNELS = 0
    PLAIN_TORCH = 1
    UNFOLDED = 2
    BY_SAMPLE = 3


WORDS = "by kernels", "in plain torch", "unfolded", "by sample"


class Ladder:
    """The rung on which an engine stands.

    Args:
        folding: Folding of the engine.

    Attributes:
        rung: Current rung.
        reason: Why the engine has stepped down; "" if it has not.
        refuted_blocks: Folded blocks with wrong norms, which run unfolded, and why.
    """

    def __init__(self, folding: Folding) -> None:
        self.folding = folding
        self.rung, self.reason = Rung.KERNELS, ""
        self.refuted_blocks: dict[str, str] = {}

    def __str__(self) -> str:
        """Return the rung in words, and the reason."""
        return f"{WORDS[self.rung]}: {self.reason}"

    def context(self) -> ExitStack:
        """Return the context in which the model runs on this rung."""
        context = ExitStack()
        if self.rung >= Rung.PLAIN_TORCH:
            context.enter_context(ops.using("torch"))
        if self.rung >= Rung.UNFOLDED:
            context.enter_context(unfolded())
        return context

    @contextmanager
    def restored_on_failure(self) -> Iterator[None]:
        """Return to the present rung if this context ends with an error."""
        before = self.rung, self.reason
        try:
            yield
        except BaseException:
            self.rung, self.reason = before
            raise

    def step_down(self, rung: int, reason: str) -> bool:
        """Use a lower rung from now on; return False if it is not lower."""
        if rung <= self.rung:
            return False
        self.rung, self.reason = Rung(rung), reason
        return True

    def can_try_again_after(self, error: Exception, *, uses_kernels: bool) -> bool:
        """Step down after an error; return False if the measurement would fail again."""
        refused = self.folding.blocks.refused
        if isinstance(error, MeasureAgain):
            blocks = error.refused_blocks
            something_changes = not blocks or not blocks.keys() <= refused.keys()
            refused |= blocks
            return something_changes
        reason = first_line(error)[:200]
        if isinstance(error, Refuted):
            return self._step_down_once(error, reason, uses_kernels)
        if isinstance(error, CheckpointError):
            return self.step_down(Rung.BY_SAMPLE, f"activation checkpointing: {reason}")
        if isinstance(error, FastlrError) or out_of_memory(error):
            return False
        may_be_foldings_fault = self.folding.blocks.may_have_changed_the_pass
        named = f"{type(error).__name__}: {reason}"
        return may_be_foldings_fault and self.step_down(Rung.UNFOLDED, named)

    def _step_down_once(self, error: Refuted, reason: str, uses_kernels: bool) -> bool:
        """Change the next thing that may make wrong norms right, and say so in a warning."""
        if error.blocks:
            self.refuted_blocks |= dict.fromkeys(error.blocks, reason)
            self.folding.blocks.refused |= self.refuted_blocks
            return True
        is_lower = uses_kernels and self.step_down(Rung.PLAIN_TORCH, reason)
        if not is_lower and self.folding.blocks.has_folded:
            is_lower = self.step_down(Rung.UNFOLDED, reason)
        if is_lower:
            warn(f"plain autograd refutes the norms: from now on they are measured {self}")
        elif error.plan is not None and error.plan.step_down(error.names, reason):
            names = few(error.names)
            warn(f"plain autograd refutes the norms of {names} ({reason}): a slower route serves")
            is_lower = True
        return is_lower
