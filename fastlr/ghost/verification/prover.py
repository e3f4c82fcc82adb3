"""The proof on a few samples.

Rules against one backward pass a sample, the sample axes, interaction, randomness.

In: a model and three of its samples (four, where it does not take three). Out: entries of a
`Ledger`, or an error that says why per-sample gradients would mean nothing. The truth for sample b
is the gradient of <v_b, z_b> from a plain backward pass, the sample run beside a copy of itself
whose cotangent is zero; a rule holds if
| |g|^2 - |truth|^2 | <= 1e-10 |truth|^2 + 1e-13 of the sample's total.

It runs on a functional copy in float64 with every parameter and buffer perturbed, so that nothing
is zero by initialisation; where that copy cannot run or is not finite, on a deep copy; where that
cannot either, on the model itself in its own dtype (and the report says so). What is proven is kept
by local structure (node kind, slot, parameter side).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import CheckpointError

from fastlr.errors import (
    HiddenParameterError,
    InteractionError,
    ModelError,
    NonFiniteError,
    NonlinearBackwardError,
    RandomForwardError,
    first_line,
    one_line,
)
from fastlr.ghost.backward import Routes, Structure, sq_norms
from fastlr.ghost.batch import Batch
from fastlr.ghost.fallback import SingleSamples
from fastlr.ghost.fusion.conv_bn import FoldRefuted, parameters_of, refuse_blocks, weight_of
from fastlr.ghost.fusion.mode import OURS, Folding
from fastlr.ghost.graph import Graph, Place, Use, walk
from fastlr.ghost.model_io import FAILURES, ModelView, require_graph
from fastlr.ghost.ownership import trace, without_rows
from fastlr.ghost.sample_axis import Layout, Unsupported
from fastlr.ghost.verification.batch_checks import every_layout, explained
from fastlr.ghost.verification.clone_or_model import CloneOrModel
from fastlr.ghost.verification.company import InBatch
from fastlr.ghost.verification.copies import subjects
from fastlr.ghost.verification.forward_checks import (
    require_same,
    unused_parameters,
)
from fastlr.ghost.verification.record import Ledger, ParameterProof, UseProof
from fastlr.ghost.verification.trial import Trial
from fastlr.ops.cudnn import without_cudnn

ALL_SCALES = (-20, 20)  # exponents of two: so much larger cotangents, so much larger gradients
SMALL_SCALES = (3,)  # where the model casts to a dtype that holds no such range
LARGEST_OF_NARROW_DTYPES = 2.0**20
PERTURBATIONS = (1.0, 0.1, 0.0)  # of parameters and buffers; gentler where values are not finite
Gradients = tuple[Tensor | None, ...]  # None where an output does not use a parameter
NESTED = "nested tensors inside the model; padded tensors and a mask go by rule"
COUNTED = "scale_grad_by_freq counts the ids of the whole batch"


def tolerance(dtype: torch.dtype) -> tuple[float, float]:
    """Return the tolerances of a rule against the truth.

    These are (relative to the parameter's own squared norm, relative to the sample's total).
    """
    return {torch.float64: (1e-10, 1e-13), torch.float32: (1e-4, 1e-5)}.get(dtype, (0.1, 0.02))


@dataclass(eq=False)
class Prover:
    """Proves a model on three samples, or four, and enters what it finds into a ledger.

    Attributes:
        view: the model.
        ledger: what is known of it.
        folding: what runs otherwise than the model says when it is measured; None: nothing.
    """

    view: ModelView
    ledger: Ledger
    folding: Folding | None = None

    def prove(self, few: Batch, seed: int = 0) -> None:
        """Prove on the samples of ``few``, on the strictest of the model's copies that can run.

        Raises what makes per-sample gradients meaningless.
        """
        clone_or_model = CloneOrModel(self.view, few.pick([0, 1]))

        def prove_on(trial: Trial) -> None:
            parameters = self.view.parameters.values()
            native = without_cudnn(self.view.device, parameters, compared=False)
            with trial.subject.precision(), native:
                _prove_on(trial, self.ledger)

        failure: Exception | None = None
        for perturbation in PERTURBATIONS:
            for subject in subjects(self.view, perturbation, seed, clone_or_model):
                trial = Trial(subject, few, self.folding)
                work = partial(prove_on, trial)
                failure = self._failure_of(trial, partial(clone_or_model.carry_out, work))
                if failure is None:
                    return
                a_gentler_one_may_be_finite = isinstance(failure, NonFiniteError) and perturbation
                if a_gentler_one_may_be_finite:
                    break
                self.ledger.notes.append(f"{subject.name}: {one_line(failure)[:200]}")
        if isinstance(failure, ModelError):
            raise failure
        raise ModelError(
            f"the model could not be proven on {few.count} samples: {'; '.join(self.ledger.notes)}"
        ) from failure

    def _failure_of(self, trial: Trial, work: Callable[[], None]) -> Exception | None:
        """Do the work of a trial; return the failure for which another copy is to be tried.

        Where no copy can do better, as no walk over the graph gets the gradients right, parameters
        go to the loop. What makes per-sample gradients meaningless is raised.
        """
        try:
            work()
        except (
            InteractionError,
            RandomForwardError,
            HiddenParameterError,
            NonlinearBackwardError,
        ):
            raise
        except NonFiniteError as error:
            return error
        except CheckpointError as error:
            reason = f"activation checkpointing: {first_line(error)}"
            self.ledger.to_loop(self.view.parameters, reason)
        except (Unsupported, *FAILURES) as error:
            if trial.is_folded:
                raise FoldRefuted(one_line(error)[:200]) from error
            if isinstance(error, Unsupported):  # not even the nodes' own formulas apply
                self.ledger.to_loop(self.view.parameters, str(error))
                return None
            if isinstance(error, torch.OutOfMemoryError) and not trial.subject.is_copy:
                raise
            return error
        return None


def _prove_on(trial: Trial, ledger: Ledger) -> None:
    """Prove on one copy; raises what is wrong with it or with the model."""
    z = trial.run_folded(trial.all)
    _require_finite(z, trial.count)
    require_graph(z)
    graph = walk(z, trial.subject.parameters)
    _require_own_parameters(trial, graph)
    in_batch = trial.in_batch(z)
    twice = _every_sample_twice(trial, in_batch)
    irregular = _irregularity(graph, twice)
    if irregular and trial.is_folded:
        raise FoldRefuted(irregular)
    if not irregular:
        _enter_sides(graph, twice, ledger)
        ledger.varying |= _computed_of_data_too(trial, graph)
    unused = unused_parameters(trial, z, graph, ledger.sets_without_effect)
    if unused:
        _enter_unused(trial.view, unused, ledger)
    ledger.others = tuple(f"shape {tuple(graph.nodes[i].variable.shape)}" for i in graph.others)
    v = generic_cotangent(z)
    truth = _exact_norms(trial, in_batch, v, graph.float_dtypes())
    if truth.alone:
        ledger.notes.append(
            "the model does not take two samples: its gradients were taken from one alone"
        )
    if irregular:
        ledger.to_loop(trial.view.parameters, irregular)
    else:
        ledger.without_rows |= without_rows(graph)
        structure = Structure.of(graph)
        found = _layouts(graph, structure, z, v, trial.view.out_dim)
        _prove_rules(_Measured(graph, structure, z, v, found, trial.count), truth.norms, ledger)
    ledger.dtype, ledger.subject = graph.lowest_dtype(), trial.subject.name


def _irregularity(graph: Graph, twice: Graph) -> str:
    """Return why no walk over the graph tells samples apart; "" where one may.

    With every sample ``twice`` it is another where the model has a loop over samples within.
    """
    if graph.has_nested_tensors:
        return NESTED
    if graph.names != twice.names or graph.children != twice.children:
        return "the graph of a batch of 6 has another structure than that of 3"
    return ""


def _require_finite(z: Tensor, count: int) -> None:
    output = z.detach()
    if not torch.isfinite(output[~torch.isneginf(output)]).all():
        raise NonFiniteError(f"the model's output is not finite on {count} samples of the inputs")


def _require_own_parameters(trial: Trial, graph: Graph) -> None:
    """Require that a copy's forward pass uses the parameters of the copy, not the model's."""
    if not trial.subject.is_copy:
        return
    of_model = {id(p) for p in trial.view.parameters.values()}
    if any(id(graph.nodes[i].variable) in of_model for i in graph.others):
        raise TypeError(
            "the forward pass uses parameters held outside the module, which a copy does not "
            "replace"
        )


# -- which nodes have samples
# --------------------------------------------------------------------------------------------------


def _every_sample_twice(trial: Trial, in_batch: InBatch) -> Graph:
    """Return the graph of a batch that has every sample twice; each must give what it gave."""
    samples = trial.all * 2
    z = trial.run_folded(samples)
    require_same(trial, in_batch, samples, z)
    return walk(z, trial.subject.parameters)


def _enter_sides(graph: Graph, twice: Graph, ledger: Ledger) -> None:
    """Tell the parameter side from the sample side of the graph.

    With every sample ``twice``, the sample side doubles, the other does not.
    """

    def decide(i: int, key: tuple) -> bool:
        same = graph.sizes[i] == twice.sizes[i]
        if same:
            ledger.parameter_side.add((key, graph.sizes[i]))
        else:
            ledger.sample_side.add(key)
        return same

    graph.classify(decide)


def _computed_of_data_too(trial: Trial, graph: Graph) -> set[tuple]:
    """Return the keys of what seems computed of parameters alone but depends on the data, too.

    Such is a buffer of fixed size that samples fill.

    With other samples the same cotangents must give the same gradients there.
    """
    sources = {use.source for use in graph.uses() if graph.view_chain(use.child) is None}
    if not sources:
        return set()

    one = _gradients_below(graph, graph, sources)
    with_others = walk(trial.run_folded([0] * trial.count), trial.subject.parameters)
    other = _gradients_below(graph, with_others, sources)
    varying = set()
    for place in sources:
        found = place in one and place in other
        if not found or _differ(one[place], other[place]):
            varying.add(graph.keys[place[0]])
    return varying


def _differ(some: Gradients, others: Gradients) -> bool:
    """Return True if gradients that are in both differ by more than rounding."""
    for a, b in zip(some, others, strict=True):
        if a is None or b is None:
            continue
        if not torch.allclose(a, b, rtol=1e-6, atol=1e-9 * float(a.abs().max())):
            return True
    return False


def _gradients_below(graph: Graph, again: Graph, sources: set[Place]) -> dict[Place, Gradients]:
    """Gradients in ``again`` of the parameters below each of the sources.

    That is where it is as ``graph`` there.

    The cotangents at the sources are always the same.
    """
    found: dict[Place, Gradients] = {}
    if graph.names != again.names or graph.children != again.children:
        return found
    for node, output in sources:
        if graph.sizes[node] != again.sizes[node]:
            continue
        variables = [again.nodes[p].variable for p in graph.parameters_below(node)]
        v = generic_cotangent(
            variables[0].new_empty(graph.shape(node, output), dtype=graph.dtype(node, output))
        )
        edge = GradientEdge(again.nodes[node], output)
        found[node, output] = torch.autograd.grad(
            [edge], variables, [v], retain_graph=True, allow_unused=True
        )
    return found


def _enter_unused(view: ModelView, unused: frozenset[str], ledger: Ledger) -> None:
    """Enter parameters that are not in the graph and do not move the output."""
    ledger.sets_without_effect.append(unused)
    for name in view.parameters:
        if name in unused:
            proof = ParameterProof("zero", reason="not used by the output")
            ledger.parameters.setdefault(name, proof)


# -- the truth
# --------------------------------------------------------------------------------------------------


class _Truth(NamedTuple):
    """The exact squared norms of the gradients of a few samples.

    Attributes:
        norms: [samples] of each parameter.
        alone: whether some sample was run alone, as the model does not take two.
    """

    norms: dict[str, Tensor]
    alone: bool


def _exact_norms(
    trial: Trial, in_batch: InBatch, v: Tensor, dtypes: Collection[torch.dtype]
) -> _Truth:
    """Return the truth: each sample run beside a copy of itself, one plain backward pass each.

    A model that does not take two samples is run on the sample alone, one that does not take one on
    three copies.

    So a sample must give what it gave in the batch: samples that interact through anything, be it a
    detached mean, are found here. And gradients of the first sample of a copy must scale as the
    cotangent does.
    """
    out_dim, parameters = trial.view.out_dim, trial.subject.parameters
    scales, close = scales_of(dtypes)
    exponents = scales if trial.subject.is_copy else ()
    pair_else_alone_else_all = 2, 1, trial.count
    samples = SingleSamples(trial.run, out_dim, parameters)
    by_sample: list[Tensor] = []  # [parameters] each
    first_at_scales: dict[int, Tensor] = {}
    alone = False
    for sample in trial.all:
        cotangents = [v.narrow(out_dim, sample, 1)]
        if sample == 0:
            cotangents += [cotangents[0] * 2.0**exponent for exponent in exponents]
        exact = samples.run(sample, cotangents, pair_else_alone_else_all)
        require_same(trial, in_batch, [sample], exact.row)
        norms, *of_scaled = map(torch.stack, exact.norms)
        by_sample.append(norms)
        if sample == 0:
            first_at_scales = dict(zip(exponents, of_scaled, strict=True))
        alone = alone or exact.copies == 1
    table = torch.stack(by_sample, 1)
    if not table.isfinite().all():
        bad = int((~table.isfinite()).any(1).nonzero()[0])
        raise NonFiniteError(
            f"the gradient of parameter {list(parameters)[bad]} is not finite on {trial.count} "
            "samples of the inputs"
        )
    require_scaling(by_sample[0], first_at_scales, close)
    return _Truth(dict(zip(parameters, table, strict=True)), alone)


def scales_of(dtypes: Collection[torch.dtype]) -> tuple[tuple[int, ...], float]:
    """Return exponents of two to scale cotangents by, and what difference is rounding then.

    Args:
        dtypes: of the graph.
    """
    narrow = any(torch.finfo(dtype).max < LARGEST_OF_NARROW_DTYPES for dtype in dtypes)
    return (SMALL_SCALES, 0.05) if narrow else (ALL_SCALES, 1e-6)


def require_scaling(norms: Tensor, at_scales: Mapping[int, Tensor], close: float) -> None:
    """Require that a sample's gradients scale as the cotangent does.

    Args:
        norms: squared norms [parameters] for a cotangent.
        at_scales: exponent -> those for it times two to that power.
        close: difference that is rounding, in parts of the norms' sum.
    """
    for exponent, scaled in at_scales.items():
        if not bool(((scaled * 4.0**-exponent - norms).abs() <= close * norms.sum()).all()):
            raise NonlinearBackwardError(
                f"gradients do not scale as the output's do: 2^{exponent} times the one does "
                f"not give 2^{exponent} times the others. Something changes them on the way, "
                "such as a hook that clips them or adds to them; remove it for the measurement"
            )


# -- the rules
# --------------------------------------------------------------------------------------------------


class Deviations(NamedTuple):
    """How far the squared norms of parameters are from the truth.

    Attributes:
        largest: by parameter, its largest deviation, in parts of the sample's total.
        wrong: the parameters that are off by more than the tolerance.
    """

    largest: dict[str, float]
    wrong: list[str]

    @staticmethod
    def of(norms: dict[str, Tensor], truth: dict[str, Tensor], dtype: torch.dtype) -> Deviations:
        """Return how far norms [samples] of each parameter are off, computed in ``dtype``."""
        relative, part = tolerance(dtype)
        total = torch.stack(list(truth.values())).sum(0)
        largest, wrong = {}, []
        for name, value in norms.items():
            gap = (value - truth[name]).abs()
            largest[name] = float((gap / total.clamp_min(1e-300)).max())
            if not bool((gap <= relative * truth[name] + part * total).all()):
                wrong.append(name)
        return Deviations(largest, wrong)


@dataclass(frozen=True, eq=False)
class _Measured:
    """A few samples as the rules are to measure them, all at once.

    Attributes:
        graph: below the output, classified.
        structure: its uses of parameters.
        z: the output.
        v: the cotangent.
        found: the layouts that hold for each output of a use, likelier ones first.
        count: number of samples.
    """

    graph: Graph
    structure: Structure
    z: Tensor
    v: Tensor
    found: dict[Place, list[Layout]]
    count: int

    @property
    def layouts(self) -> dict[Place, Layout]:
        """The likeliest layout of each output of a use where one holds."""
        return {place: layouts[0] for place, layouts in self.found.items() if layouts}

    def uses_by_name(self) -> dict[str, list[Use]]:
        """Return the uses that each parameter has a part in."""
        uses: dict[str, list[Use]] = {}
        for use in self.structure.uses:
            for name in self.graph.names_below(use.child):
                uses.setdefault(name, []).append(use)
        return uses

    def deviations(self, routes: Routes, truth: dict[str, Tensor]) -> Deviations:
        """Measure by these routes, and return how far the norms are from the truth."""
        norms = sq_norms(
            self.graph,
            self.structure,
            self.z,
            self.v,
            self.layouts,
            self.count,
            routes,
            retain=True,
        )
        return Deviations.of(norms, truth, self.graph.lowest_dtype())


def _layouts(
    graph: Graph, structure: Structure, z: Tensor, v: Tensor, out_dim: int
) -> dict[Place, list[Layout]]:
    """Return the layouts of every output of a use: by the graph, else those that marks find."""
    known = trace(graph, z, out_dim).known
    places = [(node, output) for node in structure.by_node for output in range(graph.outputs(node))]
    found: dict[Place, list[Layout]] = {p: [known[p]] for p in places if p in known}
    every = {p: every_layout(graph, p, z.shape[out_dim]) for p in places if p not in known}
    return found | explained(graph, structure, z, v, out_dim, every) if every else found


def _prove_rules(measured: _Measured, truth: dict[str, Tensor], ledger: Ledger) -> None:
    """Hold what the rules give for all samples at once to the truth, and enter the outcome.

    A rule that is wrong is replaced by its node's own formula, which is held to the truth in turn;
    where that is wrong, too, the parameter goes to the loop.
    """
    uses = measured.uses_by_name()
    routes = ledger.routes(tolerant=True)  # what an earlier proof refuted stays refuted
    off = measured.deviations(routes, truth)
    _refuse_folded_blocks(measured, routes, off.wrong)
    by_loop: dict[str, str] = {}
    if off.wrong:
        for name in off.wrong:
            for use in uses[name]:
                routes.give_up(use, "the rule's result differs from the truth")
        off = measured.deviations(routes, truth)
        for name in off.wrong:
            by_loop[name] = f"no route but the loop is right (off by {off.largest[name]:.1e})"
    by_loop |= _counted_by_the_batch(measured)
    _enter_uses(measured, routes, ledger)
    for name, deviation in off.largest.items():
        was_tested = bool((truth[name] > 0).any())
        known = ledger.parameters.get(name)
        if known is not None and (known.route == "loop" or (known.was_tested and not was_tested)):
            continue  # it says more
        proof = _proof(measured, uses[name], routes)
        proof.was_tested, proof.deviation = was_tested, deviation
        if name in by_loop:
            proof.route, proof.reason, proof.deviation = "loop", by_loop[name], 0.0
        ledger.parameters[name] = proof


def _refuse_folded_blocks(measured: _Measured, routes: Routes, wrong: list[str]) -> None:
    """Raise FoldRefuted with all folded blocks whose norms are wrong or have no rule.

    All at once, as each refusal is another proof.
    """
    graph = measured.graph
    reasons: dict[tuple[str, ...], str] = {}  # by the names of what is to run as the model says
    for use in measured.structure.uses:
        is_folded_block = graph.names[use.node] in OURS
        if not is_folded_block:
            continue
        has_a_rule = routes.by_rule(use)
        is_wrong = any(name in wrong for name in graph.names_below(use.child))
        if not has_a_rule:
            its_convolution_alone = weight_of(graph, use.node)
            reasons.setdefault(its_convolution_alone, routes.reason(use))
        elif is_wrong:
            whole_block = parameters_of(graph, use.node)
            reasons.setdefault(whole_block, "its norms differ from the exact ones")
    if reasons:
        first_reason = next(iter(reasons.values()))
        refuse_blocks(reasons, first_reason)


def _counted_by_the_batch(measured: _Measured) -> dict[str, str]:
    """Return the parameters whose gradient counts the whole batch, so that no sample has its own.

    And why so.
    """
    graph = measured.graph
    names: list[str] = []
    for use in measured.structure.uses:
        if getattr(graph.nodes[use.node], "_saved_scale_grad_by_freq", False):
            names += graph.names_below(use.child)
    return dict.fromkeys(names, COUNTED)


def _enter_uses(measured: _Measured, routes: Routes, ledger: Ledger) -> None:
    """Enter where the samples are at each use, and by which route it is measured."""
    graph, found = measured.graph, measured.found
    for use in measured.structure.uses:
        outputs = range(graph.outputs(use.node))
        layouts = {output: found.get((use.node, output), []) for output in outputs}
        route = "rule" if routes.by_rule(use) else "node"
        ledger.uses[use.key] = UseProof(layouts, route, routes.reason(use))


def _proof(measured: _Measured, uses: list[Use], routes: Routes) -> ParameterProof:
    """Return what is said of a parameter with these uses: its route, node kinds, sample axes."""
    layouts = measured.layouts
    kinds = [_without_ending(measured.graph.names[use.node]) for use in uses]
    axes = [str(layouts.get((use.node, 0), "unknown")) for use in uses]
    proof = ParameterProof("rule", kinds=tuple(dict.fromkeys(kinds)))
    proof.axes = tuple(dict.fromkeys(axes))
    by_nodes = [use for use in uses if not routes.by_rule(use)]
    if by_nodes:
        proof.route, proof.reason = "node", routes.reason(by_nodes[0])
    return proof


def _without_ending(kind: str) -> str:
    """Return the name of a kind of node without autograd's ending."""
    return kind.removesuffix("Backward0").removesuffix("Backward")


def generic_cotangent(z: Tensor) -> Tensor:
    """Return a dense random cotangent for an output, always the same."""
    generator = torch.Generator().manual_seed(1)
    v = torch.empty_like(z, memory_format=torch.contiguous_format)
    for part in v if v.ndim > 1 else [v]:
        # No float64 copy of the whole: it may be a language model's logits.
        part.copy_(torch.randn(part.shape, generator=generator, dtype=torch.float64))
    return v
