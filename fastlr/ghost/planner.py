"""Plans: what is checked of a batch before it is measured.

For a new shape, outputs are `compared` with those of parts of the batch, the sides of a new graph
are found, and `locate_samples` finds the rows of each sample. `fastlr.ghost.known` keeps the plans.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from fastlr.ghost.cotangents import generic_cotangent
from fastlr.ghost.fusion.conv_bn import FoldRefuted, refuse_folds_of_several_images
from fastlr.ghost.fusion.mode import Folding
from fastlr.ghost.graph import PARAMETER, Graph, Place, walk
from fastlr.ghost.known import Key, Known, KnownFlags, KnownStructure, Plan, ShapePlan
from fastlr.ghost.model_io import FAILURES, ModelView
from fastlr.ghost.ownership import trace, without_rows
from fastlr.ghost.sample_axis import Layout
from fastlr.ghost.verification.agreement import agree, unexplained
from fastlr.ghost.verification.audit import SAMPLES
from fastlr.ghost.verification.batch_checks import Options, every_layout, first_explained
from fastlr.ghost.verification.company import InBatch
from fastlr.ghost.verification.diagnosis import require_independence, unused_parameters
from fastlr.ghost.verification.record import Ledger, ParameterRoute
from fastlr.ghost.writes import passes_write
from fastlr.ops.deferred_checks import out_of_memory

# Samples that a comparison runs alone by output: of any batch, where audits run three others, and
# of one that may well interact.
SOME_ALONE = 5
MANY_ALONE = 32
FEW = 4  # samples that stand for a batch
OTHER_SIZES = (30.0, -1 / 30)  # factors of two samples' values
NESTED = "nested tensors inside the model; padded tensors and a mask go by rule"
IRREGULAR = "the graph of another number of samples has another structure"
COUNTED = "scale_grad_by_freq counts the ids of the whole batch"


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
        """Routes of the parameters."""
        return self.flags.ledger

    def run_folded(self, samples: Sequence[int]) -> Tensor:
        """Return the output, with its graph, for some samples, by the model as it is measured."""
        x = batch_of(self).pick(samples)
        return self.folding.run(self.view.named, lambda: self.view.forward(x))

    @property
    def elements(self) -> int:
        """Number of elements in the graph."""
        return sum(math.prod(shape) for shapes in self.graph.sizes for shape in shapes)

    @property
    def needs_rules(self) -> bool:
        """True but for a single sample: plain autograd measures that, without rules or layouts."""
        return self.count > 1

    @property
    def key_of_inputs(self) -> tuple:
        """Key of which inputs carry samples."""
        return self.key.of_inputs(self.x)


def plan_of(chunk: Chunk, *, look: bool) -> Plan:
    """Return the plan of a batch; what is not known yet is found. `Plan.keep` keeps it.

    Args:
        chunk: Batch.
        look: Whether to look for its samples whatever is known.
    """
    key, structures = chunk.key, chunk.flags.structures
    known = structures.get(key.structure)
    shapes = None if known is None else known.plans.get(key.plan)
    is_new = shapes is None
    if known is None or shapes is None or shapes.reason_to_look or look:
        if chunk.needs_rules:
            if chunk.compared is None:
                compared(chunk)
            known = _with_sides(chunk, known)
        elif known is None:
            require_independence(chunk.view, batch_of(chunk))  # it draws nothing at random
            known = KnownStructure([], [], Structure([]), {})
        if key.structure not in structures:
            _check_absent(chunk)
        shapes = locate_samples(chunk, known) if chunk.needs_rules else ShapePlan({})
    known.classify(chunk.graph)
    return Plan(chunk.flags, known, shapes, key, chunk.elements, is_new)


def _check_absent(chunk: Chunk) -> None:
    """Enter the parameters that are not in the graph, which must not move the output."""
    ledger, graph, batch = chunk.ledger, chunk.graph, batch_of(chunk)
    some = batch.part(spread(batch.count))
    unused = unused_parameters(chunk.view, some, graph, ledger.sets_without_effect)
    if unused:
        ledger.sets_without_effect.append(unused)
    for name in chunk.view.parameters:
        if name in unused:
            zero = ParameterRoute("zero", reason="not used by the output")
            ledger.parameters.setdefault(name, zero)
    ledger.others = tuple(f"shape {tuple(graph.nodes[i].variable.shape)}" for i in graph.others)
    ledger.dtype = graph.lowest_dtype()


def spread(count: int) -> list[int]:
    """Return the numbers of a few samples, from the first to the last of a batch."""
    return sorted({k * (count - 1) // (FEW - 1) for k in range(FEW)})


# -- sides
# --------------------------------------------------------------------------------------------------


def _with_sides(chunk: Chunk, known: KnownStructure | None) -> KnownStructure:
    """Decide the sides of the batch's graph, by that of another number of the same samples.

    What has other shapes there has samples. A model with a loop over samples has another graph:
    then no walk tells samples apart, and all parameters go to the loop.
    """
    graph = chunk.graph
    if known is not None and known.fits(graph):
        known.classify(graph)
        return known
    other = None if graph.has_nested_tensors else _graph_of_another_number(chunk)
    graph.classify(other)
    if graph.side[-1] == PARAMETER:  # as in a part of a padded batch
        other = None
        graph.classify(other)
    if other is None:
        reason = NESTED if graph.has_nested_tensors else IRREGULAR
        chunk.ledger.to_loop(graph.parameters.values(), reason)
    found = KnownStructure.of(graph)
    return known if known is not None and known.sides == found.sides else found


def _graph_of_another_number(chunk: Chunk) -> Graph | None:
    """Return the graph of a pair of the samples, else of every sample twice, if it is the same."""
    graph, count = chunk.graph, chunk.count
    pair, twice = [0, count - 1], [*range(count)] * 2
    for samples in [pair, twice] if count > 2 else [twice]:
        try:
            other = walk(chunk.run_folded(samples), chunk.view.parameters)
        except FAILURES as error:  # the model may take no such number
            if isinstance(error, FastlrError) or out_of_memory(error):
                raise
            continue
        if other.names == graph.names and other.children == graph.children:
            return other
    return None


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

    In other company, each sample must give the output that it gives in the batch. See "For a new
    structure or shape" in docs/trust.md.

    Raises:
        InteractionError: the outputs depend on the company.
        InputError: the model fails on parts of the batch.
        RandomForwardError: a model that writes draws at random what it writes.
    """
    chunk.known.comparisons += 1
    if passes_write():
        _require_the_same_again(chunk)
    batch = _batch_that_can_be_parted(chunk)
    is_first = chunk.key.structure not in chunk.flags.largest_compared
    if is_first and not chunk.ledger.reason_to_look and _would_interact(chunk, batch):
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
    if not agree(first, again, relative, view.out_dim):
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
        raise interaction(chunk, batch)
    raise InputError(
        f"the model fails on parts of the {count} samples ({failures[0]}); check "
        f"in_dim={chunk.view.in_dim}, or pass inputs whose every batched tensor has the "
        "samples along it"
    )


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
    if not InBatch(chunk.view, trial, chunk.z).holds(range(chunk.count), output):
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
    a capacity that samples share. Where there are few samples, there are no halves. Of a batch that
    is no larger than one that was compared before, some samples run alone.
    """
    count = chunk.count
    is_larger = chunk.elements > (chunk.flags.largest_compared.get(chunk.key.structure) or 0)
    whole = is_larger or bool(chunk.ledger.reason_to_look)
    generator = torch.Generator().manual_seed(chunk.known.comparisons)
    order = torch.randperm(count, generator=generator).tolist()
    groups: list[list[int]] = []
    if whole and count > SAMPLES:
        groups = [order[: count // 2], order[count // 2 :]]
    if whole and count > 2:
        groups.append(order[-1:] * count)
    few = max(1, min(SOME_ALONE, count - SAMPLES))
    alone = MANY_ALONE if chunk.ledger.reason_to_look else few
    return groups + [[sample, sample] for sample in order[:alone]]


def _would_interact(chunk: Chunk, batch: Batch) -> bool:
    """Return True if a sample gives something else beside a far larger one.

    The model is not refused for that: such values may not occur.
    """
    two, view = batch.scaled(OTHER_SIZES), chunk.view
    try:
        together = InBatch(view, two, view.outputs(two.pick(range(2))))
        return together.first_difference([[1, 1]]) is not None
    except FAILURES as error:  # the model may take no such values
        if out_of_memory(error):
            raise
        return False


def _is_same_in_other_company(chunk: Chunk, batch: Batch) -> bool:
    """Return True if the batch's samples give in parts of it what they gave in it.

    The parts run as the model says; the batch may have run with folded blocks.

    Raises:
        FoldRefuted: they give what the batch gives, too, where it runs as the model says.
    """
    in_batch = InBatch(chunk.view, batch, chunk.z)
    difference = in_batch.first_difference(_other_company(chunk))
    if difference is None:
        return True
    if chunk.folding.blocks.has_folded:
        plain = replace(in_batch, output=in_batch.run(range(batch.count)))
        if plain.holds(difference.samples, difference.output):
            raise FoldRefuted("the folded model gives another output")
    return False


def interaction(chunk: Chunk, batch: Batch) -> InteractionError:
    """Return the error for samples that interact.

    Raises:
        InteractionError, RandomForwardError: A few samples show what is to blame.
    """
    require_independence(chunk.view, batch.part(spread(batch.count)))
    return InteractionError(
        f"samples give another output within the batch of {chunk.count} than in parts of it, or "
        "among copies of themselves: samples interact (as where experts have a capacity for the "
        f"whole batch), or an input is shared that in_dim={chunk.view.in_dim} makes look batched. "
        "Make the forward pass work on each sample alone"
    )


# -- known of the graph
# --------------------------------------------------------------------------------------------------


def locate_samples(chunk: Chunk, known: KnownStructure) -> ShapePlan:
    """Return where the samples are at all uses, as the graph shows or as marks find.

    See "Known from the graph" in docs/trust.md. Parameters where no axis explains the gradients go
    to the loop.

    Args:
        chunk: Batch, with a classified graph.
        known: Its structure.
    """
    graph, uses, ledger = chunk.graph, known.uses, chunk.ledger
    if ledger.loop.issuperset(graph.parameters.values()):
        return ShapePlan({})
    rows = trace(graph, chunk.z, chunk.view.out_dim)
    refuse_folds_of_several_images(graph, rows.known)
    ledger.without_rows |= without_rows(graph)
    places = [(node, output) for node in uses.by_node for output in range(graph.outputs(node))]
    layouts: dict[Place, Layout] = {p: rows.known[p] for p in places if p in rows.known}
    unknown = {p: every_layout(graph, p, chunk.count) for p in places if p not in rows.known}
    found: Options = {}
    if unknown:
        v = generic_cotangent(chunk.z)
        found = first_explained(graph, uses, chunk.z, v, chunk.view.out_dim, unknown)
    layouts |= {place: options[0] for place, options in found.items() if options}
    _enter_parameters(chunk, uses, layouts)
    _to_loop_where_unexplained(chunk, uses, found)
    reason = (rows.lost_at if found else "") or ledger.reason_to_look
    if reason:
        kind = reason.removesuffix("Backward0")
        ledger.note(f"rows are found and outputs compared in every batch: {kind}")
    return ShapePlan(layouts, reason)


def _enter_parameters(chunk: Chunk, uses: Structure, layouts: dict[Place, Layout]) -> None:
    """Enter the parameters in the graph with what the report says of them."""
    graph, ledger = chunk.graph, chunk.ledger
    by_name: dict[str, ParameterRoute] = {}
    for use in uses.uses:
        kind = graph.names[use.node].removesuffix("Backward0").removesuffix("Backward")
        axis = str(layouts.get((use.node, 0), "unknown"))
        for name in graph.names_below(use.child):
            entry = by_name.setdefault(name, ParameterRoute("rule"))
            entry.kinds = tuple(dict.fromkeys((*entry.kinds, kind)))
            entry.axes = tuple(dict.fromkeys((*entry.axes, axis)))
            entry.keys = tuple(dict.fromkeys((*entry.keys, use.key)))
            if getattr(graph.nodes[use.node], "_saved_scale_grad_by_freq", False):
                entry.route, entry.reason = "loop", COUNTED
    for name, entry in by_name.items():
        ledger.enter(name, entry)


def _to_loop_where_unexplained(chunk: Chunk, uses: Structure, found: Options) -> None:
    """Send parameters to the loop at whose uses no sample axis explains the gradients."""
    graph = chunk.graph
    reason = f"its sample axis was not found in a batch of {chunk.count}"
    for (node, _), options in found.items():
        for use in uses.by_node[node] if not options else ():
            names = set(graph.names_below(use.child)) - chunk.ledger.loop
            chunk.ledger.to_loop(names, reason)
