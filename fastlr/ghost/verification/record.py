"""The record of what has been proven of a model, by local structure.

That is by node kind, slot, and the parameter side below.

So a larger batch, whose graph has the same uses, needs no new proof.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from fastlr.ghost.backward import Routes
from fastlr.ghost.graph import Graph
from fastlr.ghost.sample_axis import Layout


@dataclass
class UseProof:
    """The proof of one kind of use."""

    layouts: dict[int, list[Layout]]  # by output of the node, likelier ones first
    route: str  # "rule", "node"
    reason: str = ""


@dataclass
class ParameterProof:
    """The proof of one parameter."""

    route: str  # "rule", "node", "loop", "zero"
    deviation: float = (
        0.0  # largest |fast - truth| over the samples, relative to the sample's total
    )
    was_tested: bool = True  # False: its gradient was zero on the samples of the proof
    kinds: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()
    reason: str = ""


@dataclass
class Ledger:
    """Everything proven so far of a model in one state of its flags."""

    parameter_side: set[tuple] = field(default_factory=set)  # (key, shapes)
    sample_side: set[tuple] = field(default_factory=set)  # keys
    uses: dict[tuple, UseProof] = field(default_factory=dict)
    parameters: dict[str, ParameterProof] = field(default_factory=dict)
    # Of parameters that a proof has found not to move the output.
    sets_without_effect: list[frozenset[str]] = field(default_factory=list)
    # Keys of what is computed of parameters and data.
    varying: set[tuple] = field(default_factory=set)
    reason_to_look: str = ""  # why all batches are compared with parts of them
    others: tuple[str, ...] = ()
    dtype: torch.dtype | None = None
    subject: str = ""
    notes: list[str] = field(default_factory=list)
    # Kinds of nodes of which nobody said how they keep the rows of samples apart.
    without_rows: set[str] = field(default_factory=set)

    def decide(self, graph: Graph) -> Callable[[int, tuple], bool | None]:
        """Sides of nodes as far as proven (see Graph.classify)."""

        def answer(i: int, key: tuple) -> bool | None:
            if (key, graph.sizes[i]) in self.parameter_side:
                return True
            return False if key in self.sample_side else None

        return answer

    def routes(self, *, tolerant: bool = False) -> Routes:
        """Return the routes of uses as far as proven; in a proof any error gives up a rule."""
        given_up = {key: self.uses[key].reason for key in self.rules_given_up}
        return Routes(given_up, tolerant=tolerant)

    def enter_routes(self, routes: Routes) -> None:
        """Keep which rules of proven uses were given up."""
        for key in routes.given_up:
            if key in self.uses:
                self.uses[key].route = "node"

    @property
    def rules_given_up(self) -> list[tuple]:
        """Keys of the uses that no rule measures any more, but their node's own formula."""
        return [key for key, use in self.uses.items() if use.route == "node"]

    def note(self, text: str) -> None:
        """Keep a note for the report, once."""
        if text not in self.notes:
            self.notes.append(text)

    def to_loop(self, names: Iterable[str], reason: str) -> None:
        """Measure these parameters by the loop over samples from now on."""
        self.parameters |= {name: ParameterProof("loop", reason=reason) for name in names}

    def send_to_loop(self, name: str, reason: str) -> None:
        """Measure a proven parameter by the loop from now on; the rest of its proof stays."""
        proof = self.parameters[name]
        proof.route, proof.reason = "loop", reason

    @property
    def loop(self) -> frozenset[str]:
        """Names of parameters that only the loop over samples gets right."""
        return frozenset(name for name, p in self.parameters.items() if p.route == "loop")
