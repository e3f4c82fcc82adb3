"""The plan of a batch: three of the four stages of docs/trust.md.

What is new of its structure is `proven`; its outputs are `compared` with those of its parts; where
its samples are is `known_of_the_graph`, or found. What was found is kept (fastlr.ghost.known).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastlr.errors import FastlrError, InputError, InteractionError, first_line
from fastlr.ghost import ownership
from fastlr.ghost.backward import Structure
from fastlr.ghost.batch import Batch
from fastlr.ghost.fusion.conv_bn import FoldRefuted, refuse_parts_of_samples
from fastlr.ghost.fusion.mode import Folding, unfolded
from fastlr.ghost.graph import Graph, Place
from fastlr.ghost.known import Key, Known, KnownFlags, KnownStructure, ShapePlan
from fastlr.ghost.model_io import ModelView
from fastlr.ghost.sample_axis import Layout, Regular
from fastlr.ghost.verification.batch_checks import (
    every_layout,
    explained,
    first_explained,
    likely_layouts,
)
from fastlr.ghost.verification.company import copies_of_each, in_batch_of
from fastlr.ghost.verification.forward_checks import SAMPLES
from fastlr.ghost.verification.prover import Prover, generic_cotangent
from fastlr.ghost.verification.record import Ledger, ParameterProof
from fastlr.ops.deferred_checks import out_of_memory
from fastlr.ops.torch_private import tree_flatten

ALONE = 32  # samples run alone where a batch is looked at that may well interact
MAX_PROOFS = 8  # triples of samples tried where a data-dependent graph hides uses from the first
HOOK = "a hook of a gradient"  # which may move gradients between rows
UNSEEN = (
    "no proof has met its use, which the data choose. The values are exact; it is faster where "
    f"the first {MAX_PROOFS * SAMPLES} inputs of the first batch include some that use it"
)


@dataclass(eq=False)
class Chunk:
    """A batch that is measured.

    Attributes:
        view: the model.
        folding: what of the model ran otherwise than it says.
        known: what is known of the model.
        flags: what is known of it with its flags of now.
        x: its inputs.
        z: the output for them, with its graph.
        count: number of samples.
        graph: below ``z``.
        key: by what it is found again.
        compared: True once its outputs were compared with those of its parts.
    """

    view: ModelView
    folding: Folding
    known: Known
    flags: KnownFlags
    x: Any
    z: Tensor
    count: int
    graph: Graph
    key: Key
    compared: bool = False

    @property
    def ledger(self) -> Ledger:
        """What was proven of the model."""
        return self.flags.ledger

    @property
    def batched_key(self) -> tuple:
        """By what is found which of the inputs carry samples."""
        return self.count, input_shapes(self.x), self.key.program


def input_shapes(x: Any) -> tuple:
    """Return the shapes of all tensors among the inputs."""
    leaves = tree_flatten(x)[0]
    return tuple(tuple(t.shape) if isinstance(t, Tensor) else None for t in leaves)


def proven(chunk: Chunk) -> KnownStructure:
    """Return what is known of this structure of the graph; what is not proven yet is proven.

    That is the stage "Proven" of docs/trust.md. The sides of the chunk's graph are decided then.
    """
    graph, ledger = chunk.graph, chunk.ledger
    known, plan = chunk.flags.find(chunk.key)
    if known is not None:
        one = chunk.count == 1  # needs no layouts
        if one or plan is not None or _has_these_sides(chunk, known):
            known.classify(graph)
            return known
    by_loop = _unproven(chunk)
    rows, by_data = ownership.trace(graph, chunk.z, chunk.view.out_dim)
    # A new structure is proven anew, but one that the data choose goes by the proofs of its uses.
    by_its_uses = bool(by_data and ledger.parameters)
    if not by_its_uses or by_loop or not _absence_is_proven(chunk):
        refuse_parts_of_samples(graph, rows)  # needs no proof
        by_loop = _prove_on_triples(chunk)
        for name in by_loop:
            # One sample needs no rule; its graph may look like that of no larger batch.
            if chunk.count > 1 or name not in ledger.parameters:
                ledger.parameters[name] = ParameterProof("loop", alive=True, reason=UNSEEN)
    found = KnownStructure(graph.side, graph.keys, Structure.of(graph), frozenset(by_loop))
    return chunk.flags.structures.put(chunk.key.structure, found)


def _absence_is_proven(chunk: Chunk) -> bool:
    """Return True if a proof has found that the parameters not in the graph move nothing."""
    absent = frozenset(chunk.view.parameters) - frozenset(chunk.graph.parameters.values())
    return not absent or any(absent <= tested for tested in chunk.ledger.absent)


def _prove_on_triples(chunk: Chunk) -> list[str]:
    """Prove on three samples after the other until nothing is left to prove.

    Returns:
        The parameters of which no proof has met some use.
    """
    batch = batch_of(chunk)
    unproven: list[str] = []
    for start in range(0, min(chunk.count, MAX_PROOFS * SAMPLES), SAMPLES):
        chunk.known.proofs += 1
        _prove(chunk, batch, start)
        chunk.flags.programs.put(chunk.key.program[0], True)
        unproven = _unproven(chunk)
        if not unproven and _absence_is_proven(chunk):
            break
    return unproven


def _prove(chunk: Chunk, batch: Batch, start: int) -> None:
    """Prove on a few samples of the batch, folded as they will be measured.

    The first is number ``start`` of the batch.
    """
    prover = Prover(chunk.view, chunk.ledger, chunk.folding)
    chunk.known.few.take(prover, batch, partial(prover.prove, seed=start), start)


def _has_these_sides(chunk: Chunk, known: KnownStructure) -> bool:
    """Return True if nodes of a known structure fall on the known sides with new shapes."""
    graph = chunk.graph
    graph.classify(chunk.ledger.decide(graph))
    return graph.side == known.side and not graph.undecided


def _unproven(chunk: Chunk) -> list[str]:
    """Return the parameters of which some use, or the absence, is not in the ledger.

    The graph is classified on the way.
    """
    graph, ledger = chunk.graph, chunk.ledger
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
    for name in chunk.view.parameters:
        proof = ledger.parameters.get(name)
        if proof is None or (name in present and proof.route == "zero"):
            missing[name] = None
    return [
        name
        for name in missing
        if ledger.parameters.get(name) is None or ledger.parameters[name].route != "loop"
    ]


def shape_plan(chunk: Chunk, known: KnownStructure, *, look: bool) -> ShapePlan:
    """Return the plan for this batch's shapes and program, and keep it.

    Where there is none yet, where the data decide whose the rows are, and where ``look`` asks for
    it, outputs are compared, the program is tried and rows are found anew.
    """
    plan = known.plans.get(chunk.key.plan)
    if chunk.count == 1:  # there is nothing to find
        return plan or ShapePlan({})
    if plan is None or plan.by_data or look:
        if not chunk.compared:
            compared(chunk)
        try_program(chunk)
        plan = known_of_the_graph(chunk, known, fresh=plan is None)
    return known.plans.put(chunk.key.plan, plan)


def try_program(chunk: Chunk) -> None:
    """Prove in float64 that samples of a program not tried yet do not interact.

    They must not under other conditions either (`ForwardChecks._otherwise`). Where activations
    saturate, the batch at hand may hide in its few digits what the next one shows.
    """
    tried = chunk.key.program[0]
    if tried in chunk.flags.programs:
        return

    prover = Prover(chunk.view, chunk.ledger)
    chunk.known.few.take(prover, batch_of(chunk), prover.compare_outputs)
    chunk.flags.programs.put(tried, True)


def batch_of(chunk: Chunk) -> Batch:
    """Return the inputs, from which samples can be picked.

    Where it is not known which of them carry samples, the outputs are compared.
    """
    known = chunk.flags.batched.get(chunk.batched_key)
    if known is None and chunk.count > 1:
        return compared(chunk)
    return chunk.view.batch(chunk.x, chunk.count, known)


def compared(chunk: Chunk) -> Batch:
    """Require that samples do not depend on their company, and find which inputs carry them.

    With the batch's samples in other company all outputs must be what they are in the batch: the
    stage "Compared" of docs/trust.md.

    Raises:
        InteractionError: the outputs depend on the company.
        InputError: the model fails on parts of the batch.
    """
    count = chunk.count
    known = chunk.flags.batched.get(chunk.batched_key)
    batch = chunk.view.batch(chunk.x, count, known)
    chunk.known.comparisons += 1
    chunk.compared = True
    failures = []
    choices = _which_may_be_batched(batch, known)
    for choice in choices:
        trial = chunk.view.batch(chunk.x, count, choice)
        try:
            alike = _is_same_in_parts(chunk, trial)
        except Exception as error:  # a model may raise anything
            if isinstance(error, (FastlrError, FoldRefuted)) or out_of_memory(error):
                raise
            failures.append(f"{type(error).__name__}: {first_line(error)}")
            continue
        if alike:
            chunk.flags.batched.put(chunk.batched_key, trial.batched)
            return trial
    if count > SAMPLES and len(failures) == len(choices):
        raise InputError(
            f"the model fails on parts of the {count} samples ({failures[0]}); check "
            f"in_dim={chunk.view.in_dim}, or pass inputs whose every batched tensor has the "
            "samples along it"
        )
    blame(chunk, batch, alike=not failures)
    chunk.flags.batched.put(chunk.batched_key, batch.batched)
    return batch


def _which_may_be_batched(batch: Batch, known: list[int] | None) -> list[list[int]]:
    """Return the choices of inputs that may carry samples, the likeliest first.

    Where that is not known, they are all that look so, or all but one.
    """
    choices = [batch.batched]
    if known is None:
        choices += [[i for i in batch.batched if i != shared] for shared in batch.batched]
    return [choice for choice in choices if choice]


def _other_company(chunk: Chunk) -> list[list[int]]:
    """Return the samples of the batches to which a batch is compared; see `_is_same_in_parts`."""
    count = chunk.count
    generator = torch.Generator().manual_seed(chunk.known.comparisons)
    order = torch.randperm(count, generator=generator).tolist()
    groups: list[list[int]] = []
    if count > SAMPLES:
        # Even ones of an even batch: the model may take no others.
        half = count // 2 if count % 2 else count // 4 * 2
        groups = [order[:half], order[half:]]
    if chunk.ledger.by_data or not groups:
        groups += copies_of_each(order[:ALONE])
    return groups


def _is_same_in_parts(chunk: Chunk, batch: Batch) -> bool:
    """Return True if the batch's samples give in other company what they gave in it."""
    view = chunk.view

    def run(samples: Sequence[int]) -> Tensor:
        return view.outputs(batch.pick(samples))

    in_batch = in_batch_of(view, batch, chunk.z)
    difference = in_batch.first_difference(_other_company(chunk), run)
    if difference is not None and chunk.folding.active:
        with unfolded():
            plain = replace(in_batch, output=run(range(batch.count)))
        if plain.holds(*difference):
            raise FoldRefuted([], "the folded model gives another output")
    return difference is None


def blame(chunk: Chunk, batch: Batch, *, alike: bool) -> None:
    """Find out exactly, on the copy, why samples in other company give something else.

    The error names who is to blame.
    """
    count, few = batch.count, chunk.known.few
    prover = Prover(chunk.view, Ledger())
    few.take(prover, batch.part(few.spread(count)), prover.prove)
    if alike:
        raise InteractionError(
            "samples give another output in parts of the batch than within the batch of "
            f"{count}: samples interact, or an input is shared that in_dim={chunk.view.in_dim} "
            "makes look batched. Make the forward pass work on each sample alone"
        )


def known_of_the_graph(chunk: Chunk, known: KnownStructure, *, fresh: bool) -> ShapePlan:
    """Return where the samples are at all uses, told by the graph or found in this batch.

    The stage "Known of the graph" of docs/trust.md. Parameters where no axis explains the
    gradients go to the loop.

    Args:
        chunk: the batch.
        known: of its structure.
        fresh: whether nothing was planned yet for these shapes and this program.
    """
    graph, uses, ledger = chunk.graph, known.uses, chunk.ledger
    rows, by_data = _rows_of_the_graph(chunk)
    candidates = likely_layouts(graph, uses, ledger, chunk.count, rows)
    layouts = _likeliest(candidates)
    told = {place for place in candidates if place in rows}
    v = generic_cotangent(chunk.z)
    if fresh and not (by_data and known.plans):
        # What the graph tells is held to the marks once.
        trials = {place: candidates[place] if place in told else [] for place in candidates}
        confirmed = explained(graph, uses, chunk.z, v, chunk.view.out_dim, trials, rows)
        refuted = {place for place, held in confirmed.items() if place in told and not held}
        # No gradient arrives at places that are not among the confirmed.
        candidates = {place: candidates[place] for place in confirmed}
        if refuted:
            candidates |= {place: every_layout(graph, place, chunk.count) for place in refuted}
            told -= refuted
            ledger.hooked, by_data = True, HOOK
    untold = {place: held for place, held in candidates.items() if place not in told}
    found: dict[Place, list[Layout]] = {}
    if untold:
        found = first_explained(graph, uses, chunk.z, v, chunk.view.out_dim, untold)
    layouts |= _likeliest(found)
    _unexplained_to_loop(chunk, uses, found)
    return ShapePlan(layouts, _what_the_data_decide(chunk, uses, by_data if found else ""))


def _rows_of_the_graph(chunk: Chunk) -> tuple[dict[Place, Regular], str]:
    """Return where the graph tells that samples are, and the kind of node that hides the rest."""
    if chunk.flags.hooked:
        return {}, HOOK
    return ownership.trace(chunk.graph, chunk.z, chunk.view.out_dim)


def _likeliest(candidates: dict[Place, list[Layout]]) -> dict[Place, Layout]:
    return {place: held[0] for place, held in candidates.items() if held}


def _unexplained_to_loop(chunk: Chunk, uses: Structure, found: dict[Place, list[Layout]]) -> None:
    """Send parameters to the loop at whose uses no sample axis explains the gradients."""
    graph, ledger = chunk.graph, chunk.ledger
    unexplained = {place[0] for place, held in found.items() if not held}
    for node in unexplained:
        for use in uses.by_node[node]:
            for name in graph.names_below(use.child):
                old = ledger.parameters.get(name)
                if old is None or old.route != "loop":
                    kinds = old.kinds if old else ()
                    reason = f"its sample axis was not found in a batch of {chunk.count}"
                    ledger.parameters[name] = ParameterProof(
                        "loop", alive=True, kinds=kinds, reason=reason
                    )


def _what_the_data_decide(chunk: Chunk, uses: Structure, by_data: str) -> str:
    """Return why the rows of every batch are to be found anew; "" where they need not be."""
    graph, ledger = chunk.graph, chunk.ledger
    if not by_data and any(graph.keys[use.child] in ledger.varying for use in uses.uses):
        by_data = "data among what is computed of parameters"
    by_data = by_data or ledger.by_data
    if by_data:
        kind = by_data.removesuffix("Backward0")
        note = f"rows are found and outputs compared anew in every batch: {kind}"
        if note not in ledger.notes:
            ledger.notes.append(note)
    return by_data
