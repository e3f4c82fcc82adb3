"""The plan of a model: what was proven of it and where its samples are.

The proofs are kept by the structure of the graph, the samples' places by the shapes at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastlr.distributed import on_demand
from fastlr.errors import FastlrError, HiddenParameterError, InputError, InteractionError
from fastlr.ghost import model_io as adapt
from fastlr.ghost import ownership, program
from fastlr.ghost.backward import Structure
from fastlr.ghost.fusion.conv_bn import FoldRefuted, refuse_parts_of_samples
from fastlr.ghost.fusion.mode import Folding, unfolded
from fastlr.ghost.graph import Graph, Place, walk
from fastlr.ghost.known import Key, Known, KnownFlags, KnownStructure, ShapePlan
from fastlr.ghost.model_io import ModelView
from fastlr.ghost.sample_axis import Layout
from fastlr.ghost.state import emptied, tensor_caches
from fastlr.ghost.tokens import version
from fastlr.ghost.verification.agreement import agree, low_precision, model_noise, rounding
from fastlr.ghost.verification.batch_checks import (
    every_layout,
    explained,
    first_explained,
    likely_layouts,
)
from fastlr.ghost.verification.few_samples import FewSamples
from fastlr.ghost.verification.forward_checks import SAMPLES
from fastlr.ghost.verification.noise import Noise
from fastlr.ghost.verification.prover import Prover, generic_cotangent
from fastlr.ghost.verification.record import Ledger, ParameterProof
from fastlr.ops.deferred_checks import out_of_memory
from fastlr.ops.model_lock import all_modules
from fastlr.ops.recent import Recent

ALONE = 32  # samples run alone where a batch is looked at that may well interact
MAX_PROOFS = 8  # triples of samples tried where a data-dependent graph hides uses from the first
UNSEEN = (
    "no proof has met its use, which the data choose. The values are exact; it is faster where "
    f"the first {MAX_PROOFS * SAMPLES} inputs of the first batch include some that use it"
)


@dataclass(eq=False)
class Chunk:
    """A batch that is measured.

    Attributes:
        x: its inputs.
        z: the output for them, with its graph.
        count: number of samples.
        graph: below ``z``.
        key: by what it is found again.
    """

    x: Any
    z: Tensor
    count: int
    graph: Graph
    key: Key


class Planner:
    """Plans of one model, made and proven when a structure or a shape is first seen.

    Args:
        view: the model.
    """

    def __init__(self, view: ModelView) -> None:
        self.view = view
        self.folding = Folding()
        self.known = Known()
        self._current = KnownFlags(())  # with the flags of the last call
        self._emptied: Recent[tuple, list[tuple[nn.Module, str]]] = Recent(1)
        self._few = FewSamples()
        self.proofs = 0
        self.comparisons = 0
        self._compared = False  # whether this batch's outputs were

    @property
    def model(self) -> nn.Module:
        """The unwrapped model; ModelError once it no longer exists."""
        return self.view.module

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters by name, as the last call found them."""
        return self.view.parameters

    @property
    def names(self) -> list[str]:
        """Names of the trainable parameters."""
        return list(self.parameters)

    @property
    def ledger(self) -> Ledger:
        """The proofs for the model as the last call found it."""
        return self._current.ledger

    @property
    def _hooked(self) -> bool:
        """Return True if hooks may move gradients between rows, which no graph shows."""
        return self.ledger.hooked or self._current.hooks_gradients

    @property
    def _hooked_parameters(self) -> bool:
        """Return True if hooks of parameters may change their gradients.

        Rules do not take such hooks.
        """
        return any(p._backward_hooks for p in self.parameters.values())

    def _flags(self) -> tuple:
        model, kind = self.model, self.view.device.type
        return (
            tuple([m.training for m in all_modules(model)]),
            tuple((n, p.dtype) for n, p in self.parameters.items()),
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
            program.hook_programs(model),
        )

    def without_caches(self, x: Any) -> AbstractContextManager[None]:
        """Run the model within this context without what earlier forward passes have left in it.

        See `_caches`.
        """
        return emptied(self._caches(x))

    def _caches(self, x: Any) -> list[tuple[nn.Module, str]]:
        """Return the dicts of tensors in the model that forward passes of ours run without.

        They are caches of what the model's parameters give.

        A forward pass without a graph may have filled them (LeViT's attention biases): then
        parameters would seem unused.

        Raises:
            HiddenParameterError: one holds something else than what its parameters give now.
        """
        caches = tensor_caches(self.model)
        if not caches:
            return []
        held = [
            *self.parameters.values(),
            *(t for module, name in caches for t in vars(module)[name].values()),
        ]
        key = (self._flags(), *((id(t), version(t)) for t in held))
        known = self._emptied.get(key)
        if known is None:
            known = self._emptied.put(key, caches if self._are_caches(caches, x) else [])
        return known

    def _are_caches(self, caches: list[tuple[nn.Module, str]], x: Any) -> bool:
        with_caches = self.view.forward(adapt.copied(x))
        try:
            with emptied(caches):
                without = self.view.forward(adapt.copied(x))
        except Exception:  # whatever a model raises that misses what it needs
            return False
        same = self._same_outputs(with_caches, without)
        hidden = self._used_parameters(without) - self._used_parameters(with_caches)
        if not same and hidden:
            module, name = caches[0]
            raise HiddenParameterError(
                f"parameter {min(hidden)} moves the output only through what an earlier forward "
                f"pass left in {name} of {type(module).__name__}, and that is no longer what it "
                "gives: clear it (model.train() and model.eval() does so in timm's models)"
            )
        return same

    def _used_parameters(self, z: Tensor) -> set[str]:
        return set(walk(z, self.parameters).parameters.values()) if z.requires_grad else set()

    def _proven(self, chunk: Chunk) -> KnownStructure:
        """Return what is known of this structure of the graph; what is not proven yet is proven."""
        graph, count, key = chunk.graph, chunk.count, chunk.key
        known, plan = self._current.find(key)
        if known is not None and (
            count == 1  # one needs no layouts
            or plan is not None
            or self._has_these_sides(graph, known)
        ):
            known.classify(graph)
            return known
        ledger = self.ledger
        unproven = self._unproven(graph, ledger)
        absent = frozenset(self.parameters) - frozenset(graph.parameters.values())
        # a new structure is proven anew, but one that the data choose goes by what is proven of its
        # uses
        rows, by_data = ownership.trace(graph, chunk.z, self.view.out_dim)
        fresh = not ledger.parameters or not by_data

        def open_questions() -> bool:
            return bool(unproven) or not any(
                absent <= tested for tested in [frozenset[str](), *ledger.absent]
            )

        if fresh or open_questions():
            refuse_parts_of_samples(graph, rows)  # needs no proof
            batch = self._batch(chunk)
            for start in range(0, min(count, MAX_PROOFS * SAMPLES), SAMPLES):
                if start and not open_questions():
                    break
                self.proofs += 1
                self._prove(batch, start, ledger)
                self._current.programs.put(key.program[0], True)
                unproven = self._unproven(graph, ledger)
            for name in unproven:
                if count == 1 and name in ledger.parameters:
                    # One sample needs no rule; its graph may look like that of no larger batch.
                    continue
                ledger.parameters[name] = ParameterProof("loop", alive=True, reason=UNSEEN)
        found = KnownStructure(graph.side, graph.keys, Structure.of(graph), frozenset(unproven))
        return self._current.structures.put(key.structure, found)

    def _try_program(self, chunk: Chunk) -> None:
        """Prove in float64 that samples of a program not tried yet do not interact.

        They must not under other conditions either (`ForwardChecks._otherwise`).

        Where activations saturate, the batch at hand may hide in its few digits what the next one
        shows.
        """
        ledger, tried = self.ledger, chunk.key.program[0]
        if tried in self._current.programs:
            return
        batch = self._batch(chunk)
        self._few.take(
            self.view, batch, ledger, lambda prover, few: prover.compare_outputs(few, ledger)
        )
        self._current.programs.put(tried, True)

    def _prove(self, batch: adapt.Batch, start: int, ledger: Ledger) -> None:
        """Prove on a few samples of the batch, folded as they will be measured.

        The first is number ``start`` of the batch.
        """

        def prove(prover: Prover, few: adapt.Batch) -> None:
            prover.prove(few, ledger, seed=start)

        self._few.take(self.view, batch, ledger, prove, start, self.folding)

    def _has_these_sides(self, graph: Graph, known: KnownStructure) -> bool:
        """Return True if nodes of a known structure fall on the known sides with new shapes."""
        graph.classify(self.ledger.decide(graph))
        return graph.side == known.side and not graph.undecided

    def _unproven(self, graph: Graph, ledger: Ledger) -> list[str]:
        """Return the parameters of which some use, or the absence, is not in the ledger.

        The graph is classified on the way.
        """
        graph.classify(ledger.decide(graph))
        missing: dict[str, None] = {}
        for i in graph.undecided:
            for child, _ in graph.children[i]:
                if child >= 0:
                    missing |= dict.fromkeys(
                        graph.parameters[p] for p in graph.parameters_below(child)
                    )
        for use in graph.uses():
            if use.key not in ledger.uses:
                missing |= dict.fromkeys(
                    graph.parameters[p] for p in graph.parameters_below(use.child)
                )
        present = set(graph.parameters.values())
        for name in self.parameters:
            proof = ledger.parameters.get(name)
            if proof is None or (name in present and proof.route == "zero"):
                missing[name] = None
        return [
            name
            for name in missing
            if ledger.parameters.get(name) is None or ledger.parameters[name].route != "loop"
        ]

    def _slice_key(self, x: Any, count: int) -> tuple:
        shapes = tuple(
            tuple(t.shape) if isinstance(t, Tensor) else None for t in adapt.tree_flatten(x)[0]
        )
        return count, shapes

    def _batch(self, chunk: Chunk, *, compare: bool = False) -> adapt.Batch:
        """Find the batched inputs, and require that samples do not depend on their company.

        With their samples in other company, all outputs must be what they are in the batch.

        The outputs are compared once for each shape, and where ``compare`` asks for it.

        Raises:
            InteractionError: the outputs depend on the company.
            InputError: the model fails on parts of the batch.
        """
        x, count = chunk.x, chunk.count
        key = (*self._slice_key(x, count), chunk.key.program)
        known = self._current.batched.get(key)
        batch = self.view.batch(x, count, known)
        if count == 1 or (known is not None and not compare):
            return batch
        self.comparisons += 1
        self._compared = True
        failures = []
        options = [batch.batched] + [
            [i for i in batch.batched if i != drop] for drop in batch.batched if known is None
        ]
        for option in filter(None, options):
            trial = self.view.batch(x, count, option)
            try:
                alike = self._alike(trial, chunk.z)
            except Exception as error:
                if isinstance(error, (FastlrError, FoldRefuted)) or out_of_memory(error):
                    raise
                # A model may raise anything.
                failures.append(f"{type(error).__name__}: {error}".splitlines()[0])
                continue
            if alike:
                break
        else:
            if count > SAMPLES and len(failures) == len([o for o in options if o]):
                raise InputError(
                    f"the model fails on parts of the {count} samples ({failures[0]}); check "
                    f"in_dim={self.view.in_dim}, or pass inputs whose every batched tensor has the "
                    "samples along it"
                )
            self._blame(batch, alike=not failures)
            trial = batch
        self._current.batched.put(key, trial.batched)
        return trial

    @on_demand.structure_only()
    def _alike(self, batch: adapt.Batch, z: Tensor) -> bool:
        """Return True if random halves of the batch, shuffled, give what they gave in it.

        Where there are few samples, each is run beside a copy instead.

        Where samples are known to interact under other conditions, as many as ALONE also each
        beside a copy.
        """
        count = batch.count
        order = torch.randperm(
            count, generator=torch.Generator().manual_seed(self.comparisons)
        ).tolist()
        # Even ones of an even batch: the model may take no others.
        half = count // 2 if count % 2 else count // 4 * 2
        groups = [order[:half], order[half:]] if count > SAMPLES else []
        groups += [[j, j] for j in (order[:ALONE] if self.ledger.by_data or not groups else [])]
        noise = self._noise_of(batch)
        for samples in groups:
            in_parts = self.view.forward(batch.pick(samples)).detach()
            index = torch.tensor(samples, device=z.device)
            whole = z.detach().index_select(self.view.out_dim, index)
            if self._same_outputs(whole, in_parts, noise):
                continue
            if self.folding.active:
                with unfolded():
                    whole = (
                        self.view.forward(batch.pick(range(count)))
                        .detach()
                        .index_select(self.view.out_dim, index)
                    )
                if self._same_outputs(whole, in_parts, noise):
                    raise FoldRefuted([], "the folded model gives another output")
            return False
        return True

    def _same_outputs(
        self,
        want: Tensor,
        got: Tensor,
        noise: Callable[[], Noise | None] | None = None,
    ) -> bool:
        """Return True if outputs of the same samples agree within the model's own precision.

        See `agree`.
        """
        low = low_precision(want.device, {p.dtype for p in self.parameters.values()})
        return agree(want, got, rounding(want.dtype, low=low), noise, self.view.out_dim)

    def _noise_of(self, batch: adapt.Batch) -> Callable[[], Noise | None]:
        few, view = range(min(batch.count, 8)), self.view

        def noise() -> Noise | None:
            return model_noise(view.module, batch.pick(few), view.output, view.out_dim)

        return noise

    def _blame(self, batch: adapt.Batch, *, alike: bool) -> None:
        """Find out exactly, on the copy, why samples in other company give something else.

        The error names who is to blame.
        """
        count, ledger = batch.count, Ledger()
        some = batch.part(self._few.spread(count))
        self._few.take(self.view, some, ledger, lambda prover, few: prover.prove(few, ledger))
        if alike:
            raise InteractionError(
                "samples give another output in parts of the batch than within the batch of "
                f"{count}: samples interact, or an input is shared that in_dim={self.view.in_dim} "
                "makes look batched. Make the forward pass work on each sample alone"
            )

    def _known_of_the_graph(
        self, chunk: Chunk, proven: KnownStructure, *, fresh: bool
    ) -> ShapePlan:
        """Return the layouts of all uses, told by the graph or found in this batch.

        Parameters where none holds go to the loop.
        """
        ledger, structure, graph = self.ledger, proven.uses, chunk.graph
        z, count, out_dim = chunk.z, chunk.count, self.view.out_dim
        known, by_data = ownership.trace(graph, z, out_dim)
        if self._hooked:
            known, by_data = {}, "a hook of a gradient"
        options = likely_layouts(graph, structure, ledger, count, known)
        by_graph = {place: held for place, held in options.items() if place in known}
        layouts: dict[Place, Layout] = {place: held[0] for place, held in options.items() if held}
        v = generic_cotangent(z)
        if fresh and not (by_data and proven.plans):
            # What the graph tells is held to the marks once.
            candidates = {place: by_graph.get(place, []) for place in options}
            confirmed = explained(graph, structure, z, v, out_dim, candidates, known)
            # No gradient arrives at the others.
            options = {place: options[place] for place in confirmed}
            for place in [
                place for place, held in confirmed.items() if not held and place in by_graph
            ]:
                options |= {place: every_layout(graph, place, count)}
                ledger.hooked, by_data = True, "a hook of a gradient"
                del by_graph[place]
        open_places = {place: held for place, held in options.items() if place not in by_graph}
        by_marks = (
            first_explained(graph, structure, z, v, out_dim, open_places) if open_places else {}
        )
        layouts |= {place: held[0] for place, held in by_marks.items() if held}
        lost = {place[0] for place, held in by_marks.items() if not held}
        for use in (u for node in lost for u in structure.by_node[node]):
            for name in (graph.parameters[p] for p in graph.parameters_below(use.child)):
                old = ledger.parameters.get(name)
                if old is not None and old.route == "loop":
                    continue
                kinds = old.kinds if old else ()
                reason = f"its sample axis was not found in a batch of {count}"
                ledger.parameters[name] = ParameterProof(
                    "loop", alive=True, kinds=kinds, reason=reason
                )
        if not by_marks:
            by_data = ""
        if any(graph.keys[use.child] in ledger.varying for use in structure.uses):
            by_data = by_data or "data among what is computed of parameters"
        by_data = by_data or ledger.by_data
        note = (
            "rows are found and outputs compared anew in every batch: "
            f"{by_data.removesuffix('Backward0')}"
        )
        if by_data and note not in ledger.notes:
            ledger.notes.append(note)
        return ShapePlan(layouts, by_data)
