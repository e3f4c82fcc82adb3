"""Plans: what is checked of a batch before it is measured.

A new structure of the graph is `proven`. For a new shape, outputs are `compared` with those of
parts of the batch, and `locate_samples` finds the rows of each sample. `fastlr.ghost.known` keeps
both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastlr.errors import (
    FastlrError,
    InputError,
    InteractionError,
    RandomForwardError,
    first_line,
    warn,
)
from fastlr.ghost.backward import Structure
from fastlr.ghost.batch import Batch, copied
from fastlr.ghost.fusion.conv_bn import FoldRefuted, refuse_folds_of_several_images
from fastlr.ghost.fusion.mode import Folding
from fastlr.ghost.graph import Graph, Place
from fastlr.ghost.known import Key, Known, KnownFlags, KnownStructure, Plan, ShapePlan
from fastlr.ghost.model_io import FAILURES, ModelView
from fastlr.ghost.ownership import trace
from fastlr.ghost.sample_axis import Layout
from fastlr.ghost.verification.agreement import agree, unexplained
from fastlr.ghost.verification.batch_checks import (
    Options,
    first_explained,
    likely_layouts,
)
from fastlr.ghost.verification.company import copies_of_each, in_batch_of
from fastlr.ghost.verification.few_samples import takes_even_only
from fastlr.ghost.verification.forward_checks import EVEN_SAMPLES, SAMPLES
from fastlr.ghost.verification.prover import Prover, generic_cotangent
from fastlr.ghost.verification.record import Ledger, ParameterProof
from fastlr.ghost.writes import passes_write
from fastlr.ops.deferred_checks import out_of_memory

# Samples that a comparison runs alone by output: of any batch, where audits run three more, and of
# one that may well interact.
SOME_ALONE = 5
MANY_ALONE = 32
OTHER_SIZES = (30.0, -1 / 30, 1.0, 1.0)  # factors of a few samples' values
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
        compared: the inputs, from which samples can be picked, once the outputs were compared with
            those of parts of the batch.
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
    compared: Batch | None = None

    @property
    def ledger(self) -> Ledger:
        """What was proven of the model."""
        return self.flags.ledger

    @property
    def needs_rules(self) -> bool:
        """True but for a single sample: plain autograd measures that, without rules or layouts."""
        return self.count > 1

    @property
    def key_of_inputs(self) -> tuple:
        """Key of which inputs carry samples."""
        return self.key.of_inputs(self.x)


def plan_of(chunk: Chunk, *, look: bool) -> Plan:
    """Return what is known of a batch at every level; what is not known yet is found.

    Args:
        chunk: the batch.
        look: whether to look for its samples whatever is known.
    """
    structure = proven(chunk)
    shapes = structure.plans.get(chunk.key.plan)
    is_new = shapes is None
    if not chunk.needs_rules:
        shapes = ShapePlan({})
    elif shapes is None or shapes.reason_to_look or look:
        if chunk.compared is None:
            compared(chunk)
        shapes = locate_samples(chunk, structure)
        structure.plans.put(chunk.key.plan, shapes)
    return Plan(chunk.flags, structure, shapes, chunk.key, is_new)


# -- proven
# --------------------------------------------------------------------------------------------------


def proven(chunk: Chunk) -> KnownStructure:
    """Return what is known of this structure of the graph; what is not proven yet is proven.

    See "Once per structure of the graph" in docs/trust.md. The sides of the chunk's graph are
    decided then.
    """
    graph = chunk.graph
    known = chunk.flags.structures.get(chunk.key.structure)
    if known is not None and _fits(chunk, known):
        known.classify(graph)
        return known
    unproven = _prove_structure(chunk)
    found = KnownStructure(graph.side, graph.keys, Structure.of(graph), frozenset(unproven))
    return chunk.flags.structures.put(chunk.key.structure, found)


def _fits(chunk: Chunk, known: KnownStructure) -> bool:
    """Return True if nodes of a known structure fall on the known sides with the chunk's shapes."""
    if not chunk.needs_rules or chunk.key.plan in known.plans:
        return True
    graph = chunk.graph
    graph.classify(chunk.ledger.decide(graph))
    return graph.side == known.sides and not graph.undecided


def _prove_structure(chunk: Chunk) -> list[str]:
    """Prove what is not proven of a new structure.

    One that the data may have chosen goes by the proofs of its parts.

    Returns:
        The parameters of which no proof has met some use. They go to the loop.
    """
    graph, ledger = chunk.graph, chunk.ledger
    graph.classify(ledger.decide(graph))
    rows = trace(graph, chunk.z, chunk.view.out_dim)
    graph_may_vary_with_data, was_proven_before = bool(rows.lost_at), bool(ledger.parameters)
    if graph_may_vary_with_data and was_proven_before and _parts_are_proven(chunk):
        return []
    refuse_folds_of_several_images(graph, rows.known)  # needs no proof
    unproven = _prove_on_triples(chunk)
    if chunk.needs_rules:
        ledger.to_loop(unproven, UNSEEN)
    else:
        # Plain autograd measures a single sample, whose graph may look like that of no larger
        # batch: what larger batches have proven stays.
        proven_in_no_batch = [name for name in unproven if name not in ledger.parameters]
        ledger.to_loop(proven_in_no_batch, UNSEEN)
    return unproven


def _parts_are_proven(chunk: Chunk) -> bool:
    """Return True if proofs have met every use in the graph, and every absence from it."""
    return not _unproven(chunk) and _absence_is_proven(chunk)


def _absence_is_proven(chunk: Chunk) -> bool:
    """Return True if a proof has found that the parameters not in the graph move nothing."""
    absent = frozenset(chunk.view.parameters) - frozenset(chunk.graph.parameters.values())
    return not absent or any(absent <= tested for tested in chunk.ledger.sets_without_effect)


def _prove_on_triples(chunk: Chunk) -> list[str]:
    """Prove on three samples after the other until nothing is left to prove.

    The model runs folded as it will be measured.

    Returns:
        The parameters of which no proof has met some use.
    """
    batch, prover = batch_of(chunk), Prover(chunk.view, chunk.ledger, chunk.folding)
    for start in range(0, min(chunk.count, MAX_PROOFS * SAMPLES), SAMPLES):
        chunk.known.proofs += 1
        prove = partial(prover.prove, seed=start)
        chunk.known.few_samples.step_on_three_or_four(prover, batch, prove, start)
        chunk.graph.classify(chunk.ledger.decide(chunk.graph))
        if _parts_are_proven(chunk):
            break
    return _unproven(chunk)


def _unproven(chunk: Chunk) -> list[str]:
    """Return the parameters of which the ledger lacks some use in the graph, or absence."""
    graph, ledger = chunk.graph, chunk.ledger
    missing = _with_unproven_uses(graph, ledger)
    present = set(graph.parameters.values())
    for name in chunk.view.parameters:
        proof = ledger.parameters.get(name)
        if proof is None or (name in present and proof.route == "zero"):
            missing.append(name)
    by_loop = ledger.loop
    return [name for name in dict.fromkeys(missing) if name not in by_loop]


def _with_unproven_uses(graph: Graph, ledger: Ledger) -> list[str]:
    """Return the parameters below nodes whose side is not proven, or below uses that are not."""
    nodes = [child for i in graph.undecided for child, _ in graph.children[i] if child >= 0]
    nodes += [use.child for use in graph.uses() if use.key not in ledger.uses]
    return [name for node in nodes for name in graph.names_below(node)]


# -- compared
# --------------------------------------------------------------------------------------------------


def batch_of(chunk: Chunk) -> Batch:
    """Return the inputs, from which samples can be picked.

    Where it is not known which of them carry samples, the outputs are compared.
    """
    known = chunk.flags.inputs_with_samples.get(chunk.key_of_inputs)
    if known is None and chunk.count > 1:
        return compared(chunk)
    return chunk.view.batch(chunk.x, chunk.count, known)


def compared(chunk: Chunk) -> Batch:
    """Require that samples do not depend on their company, and find which inputs carry them.

    In other company, each sample must give the output that it gives in the batch. See "Once per
    structure and shape" in docs/trust.md.

    Raises:
        InteractionError: the outputs depend on the company.
        InputError: the model fails on parts of the batch.
        RandomForwardError: a model that writes draws at random what it writes.
    """
    chunk.known.comparisons += 1
    if passes_write():
        _require_the_same_again(chunk)
    batch = _batch_that_can_be_parted(chunk)
    if not chunk.ledger.reason_to_look and _depends_on_others_of_other_size(chunk, batch):
        chunk.ledger.reason_to_look = "samples of other sizes would interact"
        batch = _batch_that_can_be_parted(chunk)
    chunk.compared = batch
    chunk.flags.inputs_with_samples.put(chunk.key_of_inputs, batch.batched)
    return batch


def _require_the_same_again(chunk: Chunk) -> None:
    """Require that two passes over the batch, by the model as it is, give the same output.

    A few samples do not show it where each is a cluster of its own, as in a vector quantiser.
    """
    view = chunk.view
    first, again = [view.outputs(copied(chunk.x)) for _ in range(2)]
    relative = unexplained(first, view.parameters.values())
    if not agree(first, again, relative, None, view.out_dim):
        raise RandomForwardError(
            "two forward passes on the same inputs differ: the model fits itself to its first "
            "batch at random. Run it once on data, then measure it"
        )


def _batch_that_can_be_parted(chunk: Chunk) -> Batch:
    """Return the inputs such that parts of them give what they gave in the batch."""
    count = chunk.count
    known = chunk.flags.inputs_with_samples.get(chunk.key_of_inputs)
    batch = chunk.view.batch(chunk.x, count, known)
    failures = []
    another_output = False
    choices = _which_may_carry_samples(batch, known)
    for choice in choices:
        trial = chunk.view.batch(chunk.x, count, choice)
        try:
            is_same = _is_same_in_other_company(chunk, trial)
            if is_same and another_output:
                is_same = _may_be_shared(chunk, batch, trial)
            if is_same:
                return trial
            another_output = True
        except Exception as error:  # a model may raise anything
            if isinstance(error, (FastlrError, FoldRefuted)) or out_of_memory(error):
                raise
            failures.append(f"{type(error).__name__}: {first_line(error)}")
    if another_output:
        # Not all samples of the next batch need show it.
        chunk.ledger.reason_to_look = "samples that interacted in an earlier batch"
        let_a_proof_name_the_culprit(chunk, batch)  # names the culprit where it can
        raise interaction(chunk)
    proof_is_of_the_whole_batch = count <= SAMPLES
    if not proof_is_of_the_whole_batch:
        raise InputError(
            f"the model fails on parts of the {count} samples ({failures[0]}); check "
            f"in_dim={chunk.view.in_dim}, or pass inputs whose every batched tensor has the "
            "samples along it"
        )
    let_a_proof_name_the_culprit(chunk, batch)
    return batch


def _which_may_carry_samples(batch: Batch, known: list[int] | None) -> list[list[int]]:
    """Return the choices of inputs that may carry samples, the likeliest first.

    Where that is not known, they are all that look so, or all but one.
    """
    choices = [batch.batched]
    if known is None:
        choices += [[i for i in batch.batched if i != shared] for shared in batch.batched]
    return [choice for choice in choices if choice]


def _may_be_shared(chunk: Chunk, batch: Batch, trial: Batch) -> bool:
    """Return False if inputs taken as shared are numbers of the samples, used together only.

    So are lengths, of which a model looks at the largest. Of other inputs that are used so, as a
    memory that all samples attend to, a warning says how they are taken.

    Args:
        chunk: what is measured.
        batch: its inputs, with all that may carry samples.
        trial: the same with fewer, the others being shared.
    """
    shared = [i for i in batch.batched if i not in trial.batched]
    leaves = [batch.leaves[i] for i in shared]
    if all(torch.equal(leaf, leaf.flip(batch.in_dim)) for leaf in leaves):
        return True
    whole = chunk.view.batch(chunk.x, chunk.count, shared)
    output = chunk.view.outputs(whole.pick(list(reversed(range(chunk.count)))))
    if not in_batch_of(chunk.view, trial, chunk.z).holds(range(chunk.count), output):
        return True  # whose rows they are counts
    if all(leaf.ndim == 1 for leaf in leaves):
        return False
    warn(
        f"an input of shape {tuple(leaves[0].shape)} has as many rows as there are samples, and is "
        "taken as shared by all of them, as the model uses its rows together only. If they are the "
        "samples' own, the model makes samples interact through them, and norms are those within "
        "this very batch"
    )
    return True


def _other_company(chunk: Chunk) -> list[list[int]]:
    """Return the companies in which the samples of a batch are run again.

    These are random halves of the batch, shuffled; some samples, each beside a copy; and one sample
    as often as fills the batch. That crowd goes one way where the model routes samples, and exceeds
    a capacity that samples share. Where there are few samples, there are no halves.
    """
    count = chunk.count
    generator = torch.Generator().manual_seed(chunk.known.comparisons)
    order = torch.randperm(count, generator=generator).tolist()
    groups: list[list[int]] = []
    if count > SAMPLES:
        half = _half_that_the_model_takes(count)
        groups = [order[:half], order[half:]]
        groups.append(order[-1:] * count)
    alone = MANY_ALONE if chunk.ledger.reason_to_look else SOME_ALONE
    return groups + copies_of_each(order[:alone])


def _depends_on_others_of_other_size(chunk: Chunk, batch: Batch) -> bool:
    """Return True if samples far larger or smaller than each other give something else together.

    The model is not refused for that: such values may not occur.
    """
    few, view = batch.scaled(OTHER_SIZES[: chunk.count]), chunk.view
    samples = range(few.count)
    try:
        together = in_batch_of(view, few, view.outputs(few.pick(samples)))
        alone = together.first_difference(
            copies_of_each(samples), lambda s: view.outputs(few.pick(s))
        )
    except FAILURES as error:  # the model may take no such values
        if out_of_memory(error):
            raise
        return False
    return alone is not None


def _company_of_enough(chunk: Chunk) -> list[list[int]]:
    """Return companies for a model that takes no smaller batch than one of four, or of this size.

    They are `_other_company` with each sample several times: halves as often as fills the batch.
    """
    parts = _other_company(chunk)
    sizes = [EVEN_SAMPLES if len(set(part)) == 1 else chunk.count for part in parts]
    return [(part * size)[:size] for part, size in zip(parts, sizes, strict=True)]


def _half_that_the_model_takes(count: int) -> int:
    """Return the half of a batch; an even one of an even batch, as the model may take no others."""
    half = count // 2
    model_may_take_even_counts_alone = count % 2 == 0
    return half - half % 2 if model_may_take_even_counts_alone else half


def _is_same_in_other_company(chunk: Chunk, batch: Batch) -> bool:
    """Return True if the batch's samples give in parts of it what they gave in it.

    Where the model takes four samples, not three, and not the parts: in batches of enough.
    """
    try:
        return _is_same_in(_other_company(chunk), chunk, batch)
    except Exception as error:  # a model may raise anything
        of_ours = isinstance(error, (FastlrError, FoldRefuted))
        if of_ours or out_of_memory(error) or not takes_even_only(chunk.view, batch):
            raise
    return _is_same_in(_company_of_enough(chunk), chunk, batch)


def _is_same_in(companies: list[list[int]], chunk: Chunk, batch: Batch) -> bool:
    """Return True if the batch's samples give in some companies what they gave in it.

    The companies run as the model says; the batch may have run with folded blocks.

    Raises:
        FoldRefuted: they give what the batch gives, too, where it runs as the model says.
    """
    view = chunk.view

    def run_plain(samples: Sequence[int]) -> Tensor:
        return view.outputs(batch.pick(samples))

    in_batch = in_batch_of(view, batch, chunk.z)
    difference = in_batch.first_difference(companies, run_plain)
    if difference is None:
        return True
    if chunk.folding.blocks.has_folded:
        plain = replace(in_batch, output=run_plain(range(batch.count)))
        if plain.holds(difference.samples, difference.output):
            raise FoldRefuted("the folded model gives another output")
    return False


def let_a_proof_name_the_culprit(chunk: Chunk, batch: Batch) -> None:
    """Prove the model, unfolded, on samples from the first to the last of a batch.

    So the error names what is to blame where samples give something else in other company.
    """
    few = chunk.known.few_samples
    prover = Prover(chunk.view, Ledger())
    few.step_on_three_or_four(prover, batch.part(few.spread(batch.count)), prover.prove)


def interaction(chunk: Chunk) -> InteractionError:
    """Return the error that says that samples interact, although no proof says how."""
    return InteractionError(
        f"samples give another output within the batch of {chunk.count} than in parts of it, or "
        "among copies of themselves: samples interact (as where experts have a capacity for the "
        f"whole batch), or an input is shared that in_dim={chunk.view.in_dim} makes look batched. "
        "Make the forward pass work on each sample alone"
    )


# -- known of the graph
# --------------------------------------------------------------------------------------------------


def locate_samples(chunk: Chunk, known: KnownStructure) -> ShapePlan:
    """Return where the samples are at all uses, told by the graph or found in this batch.

    See "Known from the graph" in docs/trust.md. Parameters where no axis explains the
    gradients go to the loop.

    Args:
        chunk: the batch.
        known: of its structure.
    """
    graph, uses = chunk.graph, known.uses
    rows = trace(graph, chunk.z, chunk.view.out_dim)
    options = likely_layouts(graph, uses, chunk.ledger, chunk.count, rows.known)
    untold = {place: options[place] for place in options if place not in rows.known}
    found: dict[Place, list[Layout]] = {}
    if untold:
        v = generic_cotangent(chunk.z)
        found = first_explained(graph, uses, chunk.z, v, chunk.view.out_dim, untold)
    _to_loop_where_unexplained(chunk, uses, found)
    plan_rests_on_search = bool(found)
    why_searched = rows.lost_at if plan_rests_on_search else ""
    reason = _reason_to_look(chunk, uses, why_searched)
    if reason:
        kind = reason.removesuffix("Backward0")
        chunk.ledger.note(f"rows are found and outputs compared in every batch: {kind}")
    return ShapePlan(_likeliest(options) | _likeliest(found), reason)


def _likeliest(options: Options) -> dict[Place, Layout]:
    return {place: layouts[0] for place, layouts in options.items() if layouts}


def _to_loop_where_unexplained(chunk: Chunk, uses: Structure, found: Options) -> None:
    """Send parameters to the loop at whose uses no sample axis explains the gradients."""
    ledger = chunk.ledger
    nodes = {node for (node, _), layouts in found.items() if not layouts}
    reason = f"its sample axis was not found in a batch of {chunk.count}"
    for name in _names_used_at(chunk.graph, uses, nodes):
        proof = ledger.parameters.get(name)
        if proof is None or proof.route != "loop":
            kinds = proof.kinds if proof else ()
            ledger.parameters[name] = ParameterProof("loop", kinds=kinds, reason=reason)


def _names_used_at(graph: Graph, uses: Structure, nodes: Iterable[int]) -> list[str]:
    """Return the names of the parameters that have a part in uses at some nodes."""
    at_nodes = [use for node in nodes for use in uses.by_node[node]]
    return [name for use in at_nodes for name in graph.names_below(use.child)]


def _reason_to_look(chunk: Chunk, uses: Structure, lost_at: str) -> str:
    """Return why the rows are to be found in every batch; "" where they need not be.

    Args:
        chunk: the batch.
        uses: of parameters.
        lost_at: where the graph loses the rows, so that they were found in this batch; "" if
            nowhere.
    """
    varying = chunk.ledger.varying
    if not lost_at and any(chunk.graph.keys[use.child] in varying for use in uses.uses):
        return "data among what is computed of parameters"
    return lost_at or chunk.ledger.reason_to_look
