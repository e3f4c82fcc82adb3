"""A new plan: what is asked once about batches of one structure and shape.

1. Do samples depend on each other? (`Independence`)
2. Which nodes have samples? The graph of another number of samples has other shapes there.
3. Do parameters outside the graph move the output? (`require_no_hidden_parameters`)
4. Where are the samples? The graph says it, or marked backward passes find it.
"""

from __future__ import annotations

from dataclasses import replace

from torch.utils.checkpoint import CheckpointError

from fastlr.errors import FastlrError
from fastlr.ghost.fusion.forward import ForwardPass
from fastlr.ghost.graph.marks import layouts_by_marks
from fastlr.ghost.graph.plan import Key, Plan
from fastlr.ghost.graph.rows import trace, uncovered
from fastlr.ghost.graph.uses import Uses
from fastlr.ghost.graph.walk import PARAMETER, Graph, walk
from fastlr.ghost.model.view import FAILURES
from fastlr.ghost.norms.cotangents import generic_cotangent
from fastlr.ghost.trust.culprits import require_not_random
from fastlr.ghost.trust.hidden import require_no_hidden_parameters
from fastlr.ghost.trust.independence import Independence
from fastlr.ops.cudnn import cudnn_as_user_set
from fastlr.ops.deferred_checks import out_of_memory

NESTED = "nested tensors inside the model; padded tensors and a mask go by rule"
IRREGULAR = "the graph of another number of samples has another structure"
COUNTED = "scale_grad_by_freq counts the ids of the whole batch"


def new_plan(
    forward: ForwardPass, key: Key, earlier: Plan | None, independence: Independence
) -> Plan:
    """Return a plan for a batch.

    Args:
        forward: Forward pass over the batch.
        key: Key of the plan.
        earlier: Last plan of the same structure.
        independence: Comparisons of the engine.

    Raises:
        InteractionError, RandomForwardError, InputError: See `Independence`.
        HiddenParameterError: Parameters outside the graph move the output.
    """
    graph = forward.graph
    largest_compared = earlier.largest_compared if earlier else 0
    if forward.count > 1:
        forward.carriers = independence.require_and_find_carriers(forward, largest_compared)
    elif earlier is None:
        require_not_random(forward.view, forward.batch)
    shared_by_all_shapes = earlier or Plan()
    plan = replace(
        shared_by_all_shapes,
        key=key,
        carriers=forward.batch.batched,
        names=tuple(dict.fromkeys(graph.parameters.values())),
        unregistered=tuple(
            f"shape {tuple(graph.nodes[i].variable.shape)}" for i in graph.unregistered
        ),
        dtype=graph.lowest_dtype(),
        largest_compared=max(forward.elements, largest_compared),
    )
    if forward.count > 1:
        _find_sides(forward, plan, earlier)
    if earlier is None:
        require_no_hidden_parameters(forward.view, forward.batch, graph)
    if forward.count > 1:
        _locate_samples(forward, plan)
    return plan


def _find_sides(forward: ForwardPass, plan: Plan, earlier: Plan | None) -> None:
    """Find the side of each node from the graph of another number of the same samples.

    Nodes whose shapes differ there have samples. A model with a loop over samples has another
    graph: then no walk tells samples apart, and all parameters go to the loop.
    """
    graph = forward.graph
    if earlier is not None and earlier.fits(graph):
        plan.classify(graph)
        return
    other = None if graph.has_nested_tensors else _graph_of_another_batch_size(forward)
    graph.classify(other)
    if graph.side[-1] == PARAMETER:  # as in a part of a padded batch
        other = None
        graph.classify(other)
    if other is None:
        reason = NESTED if graph.has_nested_tensors else IRREGULAR
        plan.measure_by_sample(plan.names, reason)
    if plan.sides != graph.side:
        plan.uses = Uses.of(graph)
    plan.sides, plan.node_keys = graph.side, graph.keys


def _graph_of_another_batch_size(forward: ForwardPass) -> Graph | None:
    """Return the graph of a pair of the samples, else of every sample twice, if it is the same."""
    graph, count = forward.graph, forward.count
    pair, twice = [0, count - 1], [*range(count)] * 2
    for samples in [pair, twice] if count > 2 else [twice]:
        try:
            other = walk(forward.run(samples), forward.view.parameters)
        except FAILURES as error:  # the model may take no such number
            if isinstance(error, FastlrError) or out_of_memory(error):
                raise
            continue
        if other.names == graph.names and other.children == graph.children:
            return other
    return None


def _locate_samples(forward: ForwardPass, plan: Plan) -> None:
    """Find where the samples are at all uses, as the graph shows or as marks find.

    See "Known from the graph" in docs/trust.md. Parameters go to the loop if no axis explains their
    gradients.
    """
    graph, uses, view = forward.graph, plan.uses, forward.view
    plan.layouts, plan.rows_lost_at = {}, ""
    if plan.by_sample.keys() >= set(plan.names):
        return
    rows = trace(graph, forward.z, view.out_dim)
    plan.uncovered = uncovered(graph)
    places = [place for node in uses.at_node for place in graph.outputs(node)]
    layouts: dict = {place: rows.layouts.get(place) for place in places}
    unknown = [place for place, layout in layouts.items() if layout is None]
    if unknown:
        v = generic_cotangent(forward.z)
        given = graph, uses, forward.z, v, view.out_dim, unknown
        try:
            found = layouts_by_marks(*given)
        except CheckpointError:
            # The forward pass ran by cuDNN's operators, which save other tensors.
            with cudnn_as_user_set(view.device):
                found = layouts_by_marks(*given)
        layouts |= found
        plan.rows_lost_at = rows.lost_at if found else ""
        reason = f"its sample axis was not found in a batch of {forward.count}"
        for node, _ in [place for place, layout in found.items() if layout is None]:
            for use in uses.at_node[node]:
                plan.measure_by_sample(graph.names_below(use.source), reason)
    for (node, output), layout in layouts.items():
        if layout is not None:
            plan.layouts.setdefault(node, {})[output] = layout
    for use in uses.every:
        if getattr(graph.nodes[use.node], "_saved_scale_grad_by_freq", False):
            plan.measure_by_sample(graph.names_below(use.source), COUNTED)
