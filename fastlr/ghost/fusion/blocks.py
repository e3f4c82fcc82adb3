"""What a folding knows of the blocks of one model: what was found, and what is refused."""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from fastlr.ghost.fusion.conv_bn import FoldedWeights
from fastlr.ghost.recurrent import Unfused


class Blocks:
    """What was found in the last forward pass, and what forbids folding from now on.

    Attributes:
        names: id of a parameter, as the forward pass uses it -> its name.
        seen: ids of the parameters that convolutions and batch norms have used in the last forward
            pass.
        folded: name of a convolution's weight -> what follows it in its block there.
        plain: name of a convolution's weight -> why it had no block there.
        fixed: names of the weights of batch norms that ran by themselves as a scaling and a shift
            there.
        replaced: how many calls of a kind ran in another way there: "gate", "squeeze"
            (squeeze_excitation.py), "attention", "recurrent".
        again: something turned out there that forbids folding, and it has to be made once more.
        refused: name of a weight -> why it runs as the model says from now on; grows.
        calls_refused: why calls of those kinds run as the model says from now on.
        disabled: why nothing is folded any more.
        unfused: runs recurrent layers step by step where they cannot be replaced.
        weights: makes the folded weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[int, str] = {}
        self.refused: dict[str, str] = {}
        self.calls_refused: str | None = None
        self.disabled: str | None = None
        self.unfused = Unfused()
        self.weights = FoldedWeights()
        self.begin()

    def begin(self) -> None:
        """Begin a forward pass."""
        self.again = False
        self.seen: set[int] = set()
        self.folded: dict[str, str] = {}
        self.plain: dict[str, str] = {}
        self.fixed: set[str] = set()
        self.replaced: Counter[str] = Counter()
        self.unfused.calls = 0
        self.weights.begin()

    @property
    def active(self) -> bool:
        """True if the last forward pass differed from the model's own."""
        return bool(self.folded or self.fixed or self.replaced)

    def refuse(self, weight: Tensor, reason: str) -> None:
        """Leave a convolution unfolded from now on."""
        self.refused[self.names.get(id(weight), "?")] = reason
        self.again = True

    def refuse_all(self, reason: str) -> None:
        """Fold nothing from now on."""
        self.disabled, self.again = reason, True

    def refuse_blocks(self, names: list[str], reason: str) -> None:
        """Leave the convolutions with these weights unfolded from now on."""
        self.refused.update(dict.fromkeys(names, reason))

    def refuse_replaced_calls(self, reason: str) -> None:
        """Fold only convolutions and norms from now on; all other calls run as the model says."""
        self.calls_refused = reason

    def fold_nothing(self, reason: str) -> None:
        """Run the model as it is from now on."""
        self.disabled = reason
        self.begin()

    def is_computed(self, t: Tensor | None) -> bool:
        """Return True for a tensor that needs a gradient and is no parameter of the model."""
        return t is not None and t.requires_grad and id(t) not in self.names
