"""The plan of a model: what was proven, by structure of its graph, and where the samples are, by the shapes at hand."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fastlr.errors import InputError, InteractionError, ModelError
from fastlr.ghost import adapt, program
from fastlr.ghost.execute import Structure
from fastlr.ghost.fuse import Folding
from fastlr.ghost.graph import Graph
from fastlr.ghost.layout import Layout, Ragged
from fastlr.ghost.ledger import Ledger, ParameterProof
from fastlr.ghost.proof import SAMPLES, Prover, generic_cotangent
from fastlr.ghost.verify import far, sample_axes

MAX_PROOFS = 8  # triples of samples tried where a data-dependent graph hides uses from the first


@dataclass
class State:
    """What is known for one structure of the graph."""

    side: list[int]
    keys: list
    structure: Structure
    loop: frozenset[str]
    data_dependent: bool
    signature: tuple
    layouts: dict[tuple, dict[tuple[int, int], Layout]] = field(default_factory=dict)  # by shapes


Plan = tuple[State, dict[tuple[int, int], Layout], int]  # with the layouts of its shapes and the number of samples


class Planner:
    """Plans of one model, made and proven when a structure or a shape is first seen.

    Args:
        module: the unwrapped model, held weakly.
        output: picks the output tensor.
        in_dim: sample axis of the batched input tensors.
        out_dim: sample axis of the output.
    """

    def __init__(self, module: nn.Module, output: adapt.OutputSelector, in_dim: int, out_dim: int) -> None:
        self._model = weakref.ref(module)
        self.output, self.in_dim, self.out_dim = output, in_dim, out_dim
        self.parameters = adapt.trainable(module)
        self.folding = Folding()
        self._ledgers: dict[tuple, Ledger] = {}
        self._states: dict[tuple, State] = {}
        self._slices: dict[tuple, list[int]] = {}
        self._last: tuple | None = None
        self._given: tuple = ()  # what a forward pass may branch on, beside tensors

    @property
    def model(self) -> nn.Module:
        """The unwrapped model."""
        model = self._model()
        if model is None:
            raise ModelError("the model of this engine no longer exists")
        return model

    @property
    def names(self) -> list[str]:
        """Names of the trainable parameters."""
        return list(self.parameters)

    @property
    def ledger(self) -> Ledger:
        """What was proven for the model as the last call found it."""
        return self._ledgers[self._last] if self._last in self._ledgers else Ledger()

    def _flags(self) -> tuple:
        model = self.model
        return (
            tuple(m.training for m in model.modules()),
            tuple((n, p.dtype) for n, p in self.parameters.items()),
            torch.is_autocast_enabled(next(iter(self.parameters.values())).device.type),
            program.hook_programs(model),
        )

    def _state(self, graph: Graph, x: Any, z: Tensor, count: int) -> tuple[tuple, State]:
        """Find or make the plan for this structure; prove what is not proven yet."""
        signature = (self._last, graph.signature())
        state = self._states.get(signature)
        sizes = (count, tuple(graph.sizes(i) for i in range(len(graph.nodes))), self._given)
        if state is not None and (sizes in state.layouts or self._known(graph, state)):
            graph.side, graph.keys = state.side, state.keys
            return sizes, state
        assert self._last is not None
        if len(self._ledgers) > 64 and self._last not in self._ledgers:
            oldest = next(iter(self._ledgers))
            del self._ledgers[oldest]
            self._states = {key: known for key, known in self._states.items() if key[0] != oldest}
        ledger = self._ledgers.setdefault(self._last, Ledger())
        unproven = self._unproven(graph, ledger)
        absent = frozenset(self.parameters) - frozenset(graph.parameters.values())
        fresh = not graph.data_dependent or not ledger.parameters  # a new structure is proven anew

        def open_questions() -> bool:
            return bool(unproven) or not any(absent <= tested for tested in [frozenset[str](), *ledger.absent])

        if fresh or open_questions():
            batch = self._batch(x, z, count)
            generator = torch.Generator().manual_seed(5)
            prover = Prover(self.model, self.parameters, self.output, self.out_dim, self.folding)
            for start in range(0, min(count, MAX_PROOFS * SAMPLES), SAMPLES):
                if start and not open_questions():
                    break
                samples = [(start + k) % count for k in range(min(count, SAMPLES))]
                chosen = adapt.Batch(batch.pick(samples), len(samples), self.in_dim, batch.batched)
                prover.prove(chosen.distinct(SAMPLES, generator), ledger, seed=start)
                unproven = self._unproven(graph, ledger)
            for name in unproven:
                if count == 1 and name in ledger.parameters:
                    continue  # one sample needs no rule; its graph may look like that of no larger batch
                ledger.parameters[name] = ParameterProof("loop", alive=True, reason="its use was in no proof")
        structure = Structure.of(graph)
        by_data = graph.data_dependent or graph.mixes_by_data(count)
        state = State(graph.side, graph.keys, structure, frozenset(unproven), by_data, signature[1])
        if len(self._states) > 64:
            self._states.clear()
        self._states[signature] = state
        return sizes, state

    def _known(self, graph: Graph, state: State) -> bool:
        """Whether nodes of a known structure fall on the known sides with new shapes."""
        graph.classify(self.ledger.decide(graph))
        return graph.side == state.side and not graph.undecided

    def _unproven(self, graph: Graph, ledger: Ledger) -> list[str]:
        """Parameters of which some use, or the absence, is not in the ledger; classifies the graph on the way."""
        graph.classify(ledger.decide(graph))
        missing: dict[str, None] = {}
        for i in graph.undecided:
            for child, _ in graph.children[i]:
                if child >= 0:
                    missing |= dict.fromkeys(graph.parameters[p] for p in graph.parameters_below(child))
        for use in graph.uses():
            if use.key not in ledger.uses:
                missing |= dict.fromkeys(graph.parameters[p] for p in graph.parameters_below(use.child))
        present = set(graph.parameters.values())
        for name in self.parameters:
            proof = ledger.parameters.get(name)
            if proof is None or (name in present and proof.route == "zero"):
                missing[name] = None
        return [
            name for name in missing if ledger.parameters.get(name) is None or ledger.parameters[name].route != "loop"
        ]

    def _slice_key(self, x: Any, count: int) -> tuple:
        shapes = tuple(tuple(t.shape) if isinstance(t, Tensor) else None for t in adapt.tree_flatten(x)[0])
        return count, shapes

    def _batch(self, x: Any, z: Tensor, count: int) -> adapt.Batch:
        """Find the batched inputs: three samples alone must give what they gave in the batch."""
        key = (*self._slice_key(x, count), self._given)
        known = self._slices.get(key)
        batch = adapt.Batch(x, count, self.in_dim, known)
        if known is None and (count > SAMPLES or (count > 1 and len(batch.batched) > 1)):
            picked = [0, count // 2, count - 1] if count > SAMPLES else list(range(count - 1))
            want = z.detach().index_select(self.out_dim, torch.tensor(picked, device=z.device))
            close = 1e-6 if z.dtype == torch.float64 else 1e-2 if z.dtype == torch.float32 else 0.2
            options = [batch.batched] + [[i for i in batch.batched if i != drop] for drop in batch.batched]
            failures = []
            for option in options:
                if not option:
                    continue
                trial = adapt.Batch(x, count, self.in_dim, option)
                try:
                    with torch.enable_grad():  # which models that differentiate in their forward pass need
                        got = adapt.select_output(adapt.call(self.model, trial.pick(picked)), self.output).detach()
                except (RuntimeError, ValueError, IndexError) as error:
                    failures.append(str(error).splitlines()[0])
                    continue
                if not far(want, got, close):
                    batch = trial
                    break
            else:
                if count <= SAMPLES:  # the proof, on copies of them, will tell
                    options = []
                elif len(failures) == len([o for o in options if o]):
                    raise InputError(
                        f"the model fails on three of the {count} samples ({failures[0]}); check in_dim={self.in_dim}, or pass "
                        "inputs whose every batched tensor has the samples along it"
                    )
                if options:  # three samples alone give something else: find out exactly, on the copy, who is to blame
                    chosen = adapt.Batch(batch.pick(picked), SAMPLES, self.in_dim, batch.batched)
                    prover = Prover(self.model, self.parameters, self.output, self.out_dim)
                    prover.prove(chosen.distinct(SAMPLES, torch.Generator().manual_seed(5)), Ledger())
                if options and z.dtype in (torch.float32, torch.float64):
                    raise InteractionError(
                        f"three samples alone give another output than within the batch of {count}: samples interact, or "
                        f"an input is shared that in_dim={self.in_dim} makes look batched. Make the forward pass work on "
                        "each sample alone"
                    )
        if len(self._slices) > 256:
            self._slices.clear()
        self._slices[key] = batch.batched
        return batch

    def _layouts(self, graph: Graph, state: State, z: Tensor) -> dict[tuple[int, int], Layout]:
        """Verified layouts of all uses; parameters at a use where none holds go to the loop."""
        ledger, structure, v = self.ledger, state.structure, generic_cotangent(z)
        layouts, lost = sample_axes(graph, structure, ledger, z, v, self.out_dim, data_dependent=state.data_dependent)
        for use in (u for node in lost for u in structure.by_node[node]):
            for name in (graph.parameters[p] for p in graph.parameters_below(use.child)):
                old = ledger.parameters.get(name)
                if old is not None and old.route == "loop":
                    continue
                kinds = old.kinds if old else ()
                reason = f"its sample axis was not found in a batch of {z.shape[self.out_dim]}"
                ledger.parameters[name] = ParameterProof("loop", alive=True, kinds=kinds, reason=reason)
        if any(isinstance(layout, Ragged) for layout in layouts.values()):
            state.data_dependent = True  # the order of the rows may be another in the next batch of these shapes
        return layouts
