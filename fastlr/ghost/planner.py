"""The plan of a batch: three of the four stages of docs/trust.md.

What is new of its structure is `proven`; its outputs are `compared` with those of its parts; where
its samples are is told by the graph or found (`locate_samples`). What was found is kept
(fastlr.ghost.known).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

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
from fastlr.ghost.model_io import ModelView
from fastlr.ghost.ownership import RowsOfGraph, trace
from fastlr.ghost.sample_axis import Layout
from fastlr.ghost.verification.agreement import agree, unexplained
from fastlr.ghost.verification.batch_checks import (
    Options,
    every_layout,
    explained,
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
        compared: the inputs, from which samples can be picked, once the outputs were compared with
            those of parts of the batch.
        compared_with_many: whether many samples were run alone then.
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
    compared_with_many: bool = False

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
        proof_found_a_reason = chunk.ledger.reason_to_look and not chunk.compared_with_many
        if chunk.compared is None or proof_found_a_reason:
            compared(chunk)
        shapes = locate_samples(chunk, structure, is_new=is_new)
        structure.plans.put(chunk.key.plan, shapes)
    return Plan(chunk.flags, structure, shapes, chunk.key, is_new)


# -- proven
# --------------------------------------------------------------------------------------------------


def proven(chunk: Chunk) -> KnownStructure:
    """Return what is known of this structure of the graph; what is not proven yet is proven.

    That is the stage "Proven" of docs/trust.md. The sides of the chunk's graph are decided then.
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

    It is proven anew, but one that the data may have chosen goes by the proofs of its parts.

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

    With the batch's samples in other company all outputs must be what they are in the batch: the
    stage "Compared" of docs/trust.md.

    Raises:
        InteractionError: the outputs depend on the company.
        InputError: the model fails on parts of the batch.
        RandomForwardError: a model that writes draws at random what it writes.
    """
    chunk.known.comparisons += 1
    if passes_write():
        _require_the_same_again(chunk)
    chunk.compared_with_many = bool(chunk.ledger.reason_to_look)
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
    a capacity that samples share. Where there are few samples, there are no halves; where they are
    known to interact under other conditions, many are run beside a copy.
    """
    count = chunk.count
    generator = torch.Generator().manual_seed(chunk.known.comparisons)
    order = torch.randperm(count, generator=generator).tolist()
    groups: list[list[int]] = []
    if count > SAMPLES:
        half = _half_that_the_model_takes(count)
        groups = [order[:half], order[half:]]
    alone = MANY_ALONE if chunk.compared_with_many or not groups else SOME_ALONE
    crowd = [order[-1:] * count] if groups else []
    return groups + crowd + copies_of_each(order[:alone])


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


def locate_samples(chunk: Chunk, known: KnownStructure, *, is_new: bool) -> ShapePlan:
    """Return where the samples are at all uses, told by the graph or found in this batch.

    The stage "Known from the graph" of docs/trust.md. Parameters where no axis explains the
    gradients go to the loop.

    Args:
        chunk: the batch.
        known: of its structure.
        is_new: whether nothing was planned yet for these shapes.
    """
    graph, uses = chunk.graph, known.uses
    rows = _rows_of_the_graph(chunk)
    options = likely_layouts(graph, uses, chunk.ledger, chunk.count, rows.known)
    was_planned_before = bool(known.plans)
    is_searched_in_every_batch = bool(rows.lost_at) and was_planned_before
    marks_have_confirmed_the_graph = not is_new
    if marks_have_confirmed_the_graph or is_searched_in_every_batch:
        search = Search(_untold(options, rows), rows.lost_at)
    else:
        search = _search_what_marks_do_not_confirm(chunk, uses, options, rows)
    found: dict[Place, list[Layout]] = {}
    if search.options:
        v = generic_cotangent(chunk.z)
        found = first_explained(graph, uses, chunk.z, v, chunk.view.out_dim, search.options)
    _to_loop_where_unexplained(chunk, uses, found)
    plan_rests_on_search = bool(found)
    why_searched = search.reason if plan_rests_on_search else ""
    reason = _reason_to_look(chunk, uses, why_searched)
    if reason:
        kind = reason.removesuffix("Backward0")
        chunk.ledger.note(f"rows are found and outputs compared anew in every batch: {kind}")
    return ShapePlan(_likeliest(options) | _likeliest(found), reason)


def _rows_of_the_graph(chunk: Chunk) -> RowsOfGraph:
    """Return where the graph tells that samples are: nowhere if hooks may move gradients."""
    if chunk.flags.hooked:
        return RowsOfGraph({}, HOOK)
    return trace(chunk.graph, chunk.z, chunk.view.out_dim)


class Search(NamedTuple):
    """Where the samples are to be searched in the gradients of a batch.

    Attributes:
        options: layouts that each place may have.
        reason: why the graph does not tell them, such as the node at which it loses the samples.
    """

    options: Options
    reason: str


def _untold(options: Options, rows: RowsOfGraph) -> Options:
    """Return the places at which the graph does not tell where the samples are."""
    return {place: options[place] for place in options if place not in rows.known}


def _search_what_marks_do_not_confirm(
    chunk: Chunk, uses: Structure, options: Options, rows: RowsOfGraph
) -> Search:
    """Compare what the graph tells of the samples with a backward pass of marked cotangents.

    Each sample's cotangent has a mark of its own, which its gradients keep. What the graph does not
    tell is searched where a gradient arrives. Where marks are elsewhere than the graph tells, a
    hook has moved gradients.
    """
    told = {place: options[place] if place in rows.known else [] for place in options}
    z, out_dim = chunk.z, chunk.view.out_dim
    marked = generic_cotangent(z)
    layouts_of_marks = explained(chunk.graph, uses, z, marked, out_dim, told, rows.known)
    places_with_a_gradient = list(layouts_of_marks)
    told_otherwise_than_marked = [
        place for place, layouts in layouts_of_marks.items() if place in rows.known and not layouts
    ]
    untold = {place: options[place] for place in places_with_a_gradient if place not in rows.known}
    if not told_otherwise_than_marked:
        return Search(untold, rows.lost_at)
    chunk.ledger.hooked = True
    any_layout = {
        place: every_layout(chunk.graph, place, chunk.count) for place in told_otherwise_than_marked
    }
    return Search(untold | any_layout, HOOK)


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
            ledger.parameters[name] = ParameterProof(
                "loop", is_settled=True, kinds=kinds, reason=reason
            )


def _names_used_at(graph: Graph, uses: Structure, nodes: Iterable[int]) -> list[str]:
    """Return the names of the parameters that have a part in uses at some nodes."""
    at_nodes = [use for node in nodes for use in uses.by_node[node]]
    return [name for use in at_nodes for name in graph.names_below(use.child)]


def _reason_to_look(chunk: Chunk, uses: Structure, lost_at: str) -> str:
    """Return why the rows of every batch are to be found anew; "" where they need not be.

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
