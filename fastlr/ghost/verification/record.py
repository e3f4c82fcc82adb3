"""How the parameters of a model are measured, as far as its graphs and audits have shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from fastlr.ghost.backward import Routes


@dataclass
class ParameterRoute:
    """How one parameter is measured.

    Attributes:
        route: "rule", "node", "loop" or "zero".
        deviation: Largest ``|fast - exact|`` of its squared norm in audits of new plans, in parts
            of the sample's total.
        was_tested: Whether its gradient was nonzero for some audited sample.
        kinds: Kinds of the nodes that use it.
        axes: Sample axes at these nodes.
        reason: Why it is not measured by rules.
        keys: Keys of its uses.
    """

    route: str
    deviation: float = 0.0
    was_tested: bool = False
    kinds: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()
    reason: str = ""
    keys: tuple[tuple, ...] = ()


@dataclass
class Ledger:
    """What graphs and audits have shown of a model in one state of its flags.

    Attributes:
        parameters: Routes by name of parameter.
        rules_given_up: Keys of uses that their nodes' own formulas measure, with the reasons.
        sets_without_effect: Sets of parameters that were found not to move the output.
        reason_to_look: Why all batches are compared with parts of them; "" if they are not.
        others: Shapes of leaves that require grad and are no parameters.
        dtype: Least precise dtype in the graph.
        notes: Notes for the report.
        without_rows: Kinds of nodes below which the graph does not say whose rows are whose.
    """

    parameters: dict[str, ParameterRoute] = field(default_factory=dict)
    rules_given_up: dict[tuple, str] = field(default_factory=dict)
    sets_without_effect: list[frozenset[str]] = field(default_factory=list)
    reason_to_look: str = ""
    others: tuple[str, ...] = ()
    dtype: torch.dtype | None = None
    notes: list[str] = field(default_factory=list)
    without_rows: set[str] = field(default_factory=set)

    def routes(self, *, tolerant: bool = False) -> Routes:
        """Return the routes of uses; with ``tolerant`` any error of a rule gives it up."""
        return Routes(self.rules_given_up, tolerant=tolerant)

    def give_up(self, reasons: Mapping[tuple, str]) -> None:
        """Measure uses with these keys by their nodes' own formulas from now on."""
        for key, reason in reasons.items():
            if key in self.rules_given_up:
                continue
            self.rules_given_up[key] = reason
            for entry in self.parameters.values():
                if entry.route == "rule" and key in entry.keys:
                    entry.route, entry.reason = "node", reason

    def enter(self, name: str, entry: ParameterRoute) -> None:
        """Enter a parameter that a graph has, unless an earlier entry says more."""
        known = self.parameters.get(name)
        if known is None or known.route == "zero":
            self.parameters[name] = entry
        elif known.route != "loop":
            known.keys = tuple(dict.fromkeys((*known.keys, *entry.keys)))
        entry = self.parameters[name]
        given_up = [key for key in entry.keys if key in self.rules_given_up]
        if given_up and entry.route == "rule":
            entry.route, entry.reason = "node", self.rules_given_up[given_up[0]]

    def enter_audit(self, name: str, deviation: float) -> None:
        """Enter an audited sample in which a parameter had a gradient."""
        entry = self.parameters[name]
        entry.was_tested = True
        entry.deviation = max(entry.deviation, deviation)

    def step_down(self, name: str, reason: str) -> None:
        """Measure a parameter by the next slower route: its nodes' own formulas, then the loop."""
        entry = self.parameters[name]
        if entry.route == "rule" and entry.keys:
            self.give_up(dict.fromkeys(entry.keys, reason))
        else:
            entry.route, entry.reason = "loop", reason

    def note(self, text: str) -> None:
        """Keep a note for the report, once."""
        if text not in self.notes:
            self.notes.append(text)

    def to_loop(self, names: Iterable[str], reason: str) -> None:
        """Measure these parameters by the loop over samples from now on."""
        for name in names:
            entry = self.parameters.setdefault(name, ParameterRoute("loop"))
            entry.route, entry.reason = "loop", reason

    @property
    def parameters_in_graph(self) -> frozenset[str]:
        """Names of parameters that graphs have had."""
        return frozenset(name for name, p in self.parameters.items() if p.route != "zero")

    @property
    def loop(self) -> frozenset[str]:
        """Names of parameters that only the loop over samples gets right."""
        return frozenset(name for name, p in self.parameters.items() if p.route == "loop")
