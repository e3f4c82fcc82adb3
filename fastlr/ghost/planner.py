"""The plan of a batch: three of the four stages of docs/trust.md.

What is new of its structure is `proven`; its outputs are `compared` with those of its parts; where
its samples are is `known_of_the_graph`, or found. What was found is kept (fastlr.ghost.known).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastlr.distributed import on_demand
from fastlr.errors import FastlrError, InputError, InteractionError
from fastlr.ghost import model_io as adapt
from fastlr.ghost import ownership
from fastlr.ghost.backward import Structure
from fastlr.ghost.fusion.conv_bn import FoldRefuted, refuse_parts_of_samples
from fastlr.ghost.fusion.mode import Folding, unfolded
from fastlr.ghost.graph import Graph, Place
from fastlr.ghost.known import Key, Known, KnownFlags, KnownStructure, ShapePlan
from fastlr.ghost.model_io import ModelView
from fastlr.ghost.sample_axis import Layout
from fastlr.ghost.verification.agreement import agree, low_precision, model_noise, rounding
from fastlr.ghost.verification.batch_checks import (
    every_layout,
    explained,
    first_explained,
    likely_layouts,
)
from fastlr.ghost.verification.forward_checks import SAMPLES
from fastlr.ghost.verification.noise import Noise
from fastlr.ghost.verification.prover import Prover, generic_cotangent
from fastlr.ghost.verification.record import Ledger, ParameterProof
from fastlr.ops.deferred_checks import out_of_memory

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
    leaves = adapt.tree_flatten(x)[0]
    return tuple(tuple(t.shape) if isinstance(t, Tensor) else None for t in leaves)


def proven(chunk: Chunk) -> KnownStructure:
    """Return what is known of this structure of the graph; what is not proven yet is proven.

    That is the stage "Proven" of docs/trust.md. The sides of the chunk's graph are decided then.
    """
    graph, count, key = chunk.graph, chunk.count, chunk.key
    known, plan = chunk.flags.find(key)
    if known is not None and (
        count == 1  # one needs no layouts
        or plan is not None
        or _has_these_sides(chunk, known)
    ):
        known.classify(graph)
        return known
    ledger = chunk.ledger
    unproven = _unproven(chunk)
    absent = frozenset(chunk.view.parameters) - frozenset(graph.parameters.values())
    # a new structure is proven anew, but one that the data choose goes by what is proven of its
    # uses
    rows, by_data = ownership.trace(graph, chunk.z, chunk.view.out_dim)
    fresh = not ledger.parameters or not by_data

    def open_questions() -> bool:
        return bool(unproven) or not any(
            absent <= tested for tested in [frozenset[str](), *ledger.absent]
        )

    if fresh or open_questions():
        refuse_parts_of_samples(graph, rows)  # needs no proof
        batch = batch_of(chunk)
        for start in range(0, min(count, MAX_PROOFS * SAMPLES), SAMPLES):
            if start and not open_questions():
                break
            chunk.known.proofs += 1
            _prove(chunk, batch, start)
            chunk.flags.programs.put(key.program[0], True)
            unproven = _unproven(chunk)
        for name in unproven:
            if count == 1 and name in ledger.parameters:
                # One sample needs no rule; its graph may look like that of no larger batch.
                continue
            ledger.parameters[name] = ParameterProof("loop", alive=True, reason=UNSEEN)
    found = KnownStructure(graph.side, graph.keys, Structure.of(graph), frozenset(unproven))
    return chunk.flags.structures.put(key.structure, found)


def _prove(chunk: Chunk, batch: adapt.Batch, start: int) -> None:
    """Prove on a few samples of the batch, folded as they will be measured.

    The first is number ``start`` of the batch.
    """

    def prove(prover: Prover, few: adapt.Batch) -> None:
        prover.prove(few, chunk.ledger, seed=start)

    chunk.known.few.take(chunk.view, batch, chunk.ledger, prove, start, chunk.folding)


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

    def compare(prover: Prover, few: adapt.Batch) -> None:
        prover.compare_outputs(few, chunk.ledger)

    chunk.known.few.take(chunk.view, batch_of(chunk), chunk.ledger, compare)
    chunk.flags.programs.put(tried, True)


def batch_of(chunk: Chunk) -> adapt.Batch:
    """Return the inputs, from which samples can be picked.

    Where it is not known which of them carry samples, the outputs are compared.
    """
    known = chunk.flags.batched.get(chunk.batched_key)
    if known is None and chunk.count > 1:
        return compared(chunk)
    return chunk.view.batch(chunk.x, chunk.count, known)


def compared(chunk: Chunk) -> adapt.Batch:
    """Require that samples do not depend on their company, and find which inputs carry them.

    With the batch's samples in other company all outputs must be what they are in the batch: the
    stage "Compared" of docs/trust.md.

    Raises:
        InteractionError: the outputs depend on the company.
        InputError: the model fails on parts of the batch.
    """
    x, count = chunk.x, chunk.count
    known = chunk.flags.batched.get(chunk.batched_key)
    batch = chunk.view.batch(x, count, known)
    chunk.known.comparisons += 1
    chunk.compared = True
    failures = []
    options = [batch.batched] + [
        [i for i in batch.batched if i != drop] for drop in batch.batched if known is None
    ]
    for option in filter(None, options):
        trial = chunk.view.batch(x, count, option)
        try:
            alike = _is_same_in_parts(chunk, trial)
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
                f"in_dim={chunk.view.in_dim}, or pass inputs whose every batched tensor has the "
                "samples along it"
            )
        blame(chunk, batch, alike=not failures)
        trial = batch
    chunk.flags.batched.put(chunk.batched_key, trial.batched)
    return trial


@on_demand.structure_only()
def _is_same_in_parts(chunk: Chunk, batch: adapt.Batch) -> bool:
    """Return True if random halves of the batch, shuffled, give what they gave in it.

    Where there are few samples, each is run beside a copy instead.

    Where samples are known to interact under other conditions, as many as ALONE also each
    beside a copy.
    """
    count = batch.count
    order = torch.randperm(
        count, generator=torch.Generator().manual_seed(chunk.known.comparisons)
    ).tolist()
    # Even ones of an even batch: the model may take no others.
    half = count // 2 if count % 2 else count // 4 * 2
    groups = [order[:half], order[half:]] if count > SAMPLES else []
    groups += [[j, j] for j in (order[:ALONE] if chunk.flags.ledger.by_data or not groups else [])]
    noise, z = noise_of(chunk.view, batch), chunk.z
    for samples in groups:
        in_parts = chunk.view.forward(batch.pick(samples)).detach()
        index = torch.tensor(samples, device=z.device)
        whole = z.detach().index_select(chunk.view.out_dim, index)
        if outputs_agree(chunk.view, whole, in_parts, noise):
            continue
        if chunk.folding.active:
            with unfolded():
                whole = (
                    chunk.view.forward(batch.pick(range(count)))
                    .detach()
                    .index_select(chunk.view.out_dim, index)
                )
            if outputs_agree(chunk.view, whole, in_parts, noise):
                raise FoldRefuted([], "the folded model gives another output")
        return False
    return True


def outputs_agree(
    view: ModelView,
    want: Tensor,
    got: Tensor,
    noise: Callable[[], Noise | None] | None = None,
) -> bool:
    """Return True if outputs of the same samples agree within the model's own precision.

    See `agree`.
    """
    low = low_precision(want.device, {p.dtype for p in view.parameters.values()})
    return agree(want, got, rounding(want.dtype, low=low), noise, view.out_dim)


def noise_of(view: ModelView, batch: adapt.Batch) -> Callable[[], Noise | None]:
    """Return what measures how far outputs of some of the samples are off by rounding."""
    few = range(min(batch.count, 8))

    def noise() -> Noise | None:
        return model_noise(view.module, batch.pick(few), view.output, view.out_dim)

    return noise


def blame(chunk: Chunk, batch: adapt.Batch, *, alike: bool) -> None:
    """Find out exactly, on the copy, why samples in other company give something else.

    The error names who is to blame.
    """
    count, ledger = batch.count, Ledger()
    some = batch.part(chunk.known.few.spread(count))
    chunk.known.few.take(chunk.view, some, ledger, lambda prover, few: prover.prove(few, ledger))
    if alike:
        raise InteractionError(
            "samples give another output in parts of the batch than within the batch of "
            f"{count}: samples interact, or an input is shared that in_dim={chunk.view.in_dim} "
            "makes look batched. Make the forward pass work on each sample alone"
        )


def known_of_the_graph(chunk: Chunk, proven: KnownStructure, *, fresh: bool) -> ShapePlan:
    """Return where the samples are at all uses, told by the graph or found in this batch.

    The stage "Known of the graph" of docs/trust.md.

    Parameters where none holds go to the loop.
    """
    ledger, structure, graph = chunk.flags.ledger, proven.uses, chunk.graph
    z, count, out_dim = chunk.z, chunk.count, chunk.view.out_dim
    known, by_data = ownership.trace(graph, z, out_dim)
    if chunk.flags.hooked:
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
        for place in [place for place, held in confirmed.items() if not held and place in by_graph]:
            options |= {place: every_layout(graph, place, count)}
            ledger.hooked, by_data = True, "a hook of a gradient"
            del by_graph[place]
    open_places = {place: held for place, held in options.items() if place not in by_graph}
    by_marks = first_explained(graph, structure, z, v, out_dim, open_places) if open_places else {}
    layouts |= {place: held[0] for place, held in by_marks.items() if held}
    lost = {place[0] for place, held in by_marks.items() if not held}
    for use in (u for node in lost for u in structure.by_node[node]):
        for name in (graph.parameters[p] for p in graph.parameters_below(use.child)):
            old = ledger.parameters.get(name)
            if old is not None and old.route == "loop":
                continue
            kinds = old.kinds if old else ()
            reason = f"its sample axis was not found in a batch of {count}"
            ledger.parameters[name] = ParameterProof("loop", alive=True, kinds=kinds, reason=reason)
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
