"""What a folding knows of the blocks of one model: what was found, and what is refused."""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from fastlr.ghost.fusion.recurrent import Unfused


class Blocks:
    """What was found in the last forward pass, and what forbids folding from now on.

    Attributes:
        names: id of a parameter, as the forward pass uses it -> its name.
        used: ids of the parameters that convolutions and batch norms have used in the last forward
            pass.
        folded: name of a convolution's weight -> what follows it in its block there.
        not_folded: name of a convolution's weight -> why it had no block there.
        fixed: names of the weights of batch norms that ran by themselves as a scaling and a shift
            there.
        replaced: how many calls of a kind ran in another way there: "gate" and
            "squeeze" (squeeze_excitation.py), "pixel" (pending.py), "attention", "recurrent".
        must_run_again: something turned out there that forbids folding, and it has to be made once
            more.
        refused: name of a weight -> why it runs as the model says from now on; grows.
        disabled: why nothing is folded any more.
        unfused: runs recurrent layers step by step where they cannot be replaced.
    """

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.refused: dict[str, str] = {}
        self.disabled: str | None = None
        self.unfused = Unfused()
        self.begin()

    def begin(self) -> None:
        """Begin a forward pass."""
        self.must_run_again = False
        self.used: set[int] = set()
        self.folded: dict[str, str] = {}
        self.not_folded: dict[str, str] = {}
        self.fixed: set[str] = set()
        self.replaced: Counter[str] = Counter()
        self.unfused.calls = 0

    @property
    def has_folded(self) -> bool:
        """True if the last forward pass differed from the model's own."""
        return bool(self.folded or self.fixed or self.replaced)

    @property
    def may_have_changed_the_pass(self) -> bool:
        """True if the last forward pass may have differed from the model's own, had it ended."""
        return self.has_folded or bool(self.used)

    def refuse(self, weight: Tensor, reason: str) -> None:
        """Leave a convolution unfolded from now on."""
        self.refused[self.names.get(id(weight), "?")] = reason
        self.must_run_again = True

    def refuse_all(self, reason: str) -> None:
        """Fold nothing from now on."""
        self.disabled, self.must_run_again = reason, True

    def is_computed(self, t: Tensor | None) -> bool:
        """Return True for a tensor that needs a gradient and is no parameter of the model."""
        return t is not None and t.requires_grad and id(t) not in self.names
