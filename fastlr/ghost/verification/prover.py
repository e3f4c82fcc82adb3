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

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import CheckpointError

from fastlr.distributed import on_demand
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
from fastlr.ghost.backward import Structure, sq_norms
from fastlr.ghost.batch import Batch
from fastlr.ghost.fallback import Beside, beside_copies
from fastlr.ghost.fusion.conv_bn import FoldRefuted, parameters_of, refuse_blocks, weight_of
from fastlr.ghost.fusion.mode import OURS
from fastlr.ghost.graph import CASTS, Graph, Place, Use, walk
from fastlr.ghost.model_io import FAILURES, require_graph
from fastlr.ghost.ownership import trace, without_rows
from fastlr.ghost.sample_axis import Layout, Unsupported
from fastlr.ghost.verification.batch_checks import every_layout, explained
from fastlr.ghost.verification.copies import Subject, subjects
from fastlr.ghost.verification.forward_checks import ForwardChecks
from fastlr.ghost.verification.record import Ledger, ParameterProof, UseProof
from fastlr.ghost.verification.stand_in import StandIn

SCALES = (-20, 20)  # powers of two of cotangents that gradients must follow


def tolerance(dtype: torch.dtype) -> tuple[float, float]:
    """Return the tolerances of a rule against the truth.

    These are (relative to the parameter's own squared norm, relative to the sample's total).
    """
    return {torch.float64: (1e-10, 1e-13), torch.float32: (1e-4, 1e-5)}.get(dtype, (0.1, 0.02))


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


class Prover(ForwardChecks):
    """Proves the uses of a model on three samples, or four.

    `prove` adds what it finds to a ledger.
    """

    def prove(self, batch: Batch, ledger: Ledger, seed: int = 0) -> None:
        """Prove on the samples of ``batch``; raises what makes per-sample gradients meaningless."""
        self._on_copies(self._prove_on, batch, ledger, seed)

    def compare_outputs(self, batch: Batch, ledger: Ledger) -> None:
        """Prove of a model whose gradients are proven that its samples do not interact now."""
        self._on_copies(self._apart, batch, ledger, 0)

    def _on_copies(
        self,
        step: Callable[[Subject, Batch, Ledger], None],
        batch: Batch,
        ledger: Ledger,
        seed: int,
    ) -> None:
        """Take a step on the strictest of the copies that can.

        Then see if samples would interact otherwise.
        """
        failure: Exception | None = None
        stand_in = StandIn(self.model, batch.pick(self.all[:2]), self.output)

        def both(subject: Subject, scale: float) -> None:
            with self._precision(subject):
                step(subject, batch, ledger)
                self._otherwise(subject, stand_in, batch, scale, seed, ledger)

        for scale in (1.0, 0.1, 0.0):
            for subject in subjects(self.model, self.parameters, scale, seed, stand_in):
                try:
                    stand_in.trusted(partial(both, subject, scale))
                    return
                except (
                    InteractionError,
                    RandomForwardError,
                    HiddenParameterError,
                    NonlinearBackwardError,
                ):
                    raise
                except NonFiniteError as error:
                    failure = error
                    if scale:
                        break  # a gentler perturbation
                    # not even an exact copy: perhaps the model is, in its own precision
                    ledger.notes.append(f"{subject.name}: {one_line(error)[:200]}")
                except CheckpointError as error:
                    ledger.to_loop(
                        self.parameters, f"activation checkpointing: {first_line(error)}"
                    )
                    return
                except Unsupported as error:  # not even the nodes' own formulas apply
                    if self.is_folded:
                        raise FoldRefuted([], str(error)) from error
                    ledger.to_loop(self.parameters, str(error))
                    return
                except FAILURES as error:
                    text = one_line(error)[:200]
                    if self.is_folded:
                        raise FoldRefuted([], text) from error
                    if isinstance(error, torch.OutOfMemoryError) and subject.dtype is None:
                        raise
                    ledger.notes.append(f"{subject.name}: {text}")
                    failure = error
        assert failure is not None
        if isinstance(failure, ModelError):
            raise failure
        raise ModelError(
            f"the model could not be proven on {self.count} samples: {'; '.join(ledger.notes)}"
        ) from failure

    def _prove_on(self, subject: Subject, batch: Batch, ledger: Ledger) -> None:
        """Prove on one copy; raises what is wrong with it or with the model."""
        with on_demand.structure_only():
            z = self._forward(subject, batch, self.all, fold=True)
        if not torch.isfinite(z.detach()[~torch.isneginf(z.detach())]).all():
            raise NonFiniteError(
                f"the model's output is not finite on {self.count} samples of the inputs"
            )
        require_graph(z)
        graph = walk(z, subject.parameters)
        originals = {id(p) for p in self.parameters.values()}
        if subject.dtype is not None and any(
            id(graph.nodes[i].variable) in originals for i in graph.others
        ):
            raise TypeError(
                "the forward pass uses parameters held outside the module, which a copy does not "
                "replace"
            )
        irregular = self._sides(subject, batch, z, graph, ledger)
        if irregular and self.is_folded:
            raise FoldRefuted([], irregular)
        self._absent(subject, batch, z, graph, ledger)
        ledger.others = tuple(f"shape {tuple(graph.nodes[i].variable.shape)}" for i in graph.others)
        v = generic_cotangent(z)
        truth = self._truth(subject, batch, z, v, ledger)
        if on_demand.active():  # only now a graph that can be run backward: one at a time
            sides = graph.side, graph.keys
            z = self._forward(subject, batch, self.all, fold=True)
            graph = walk(z, subject.parameters)
            graph.side, graph.keys = sides
        if irregular:
            ledger.to_loop(self.parameters, irregular)
        else:
            ledger.without_rows |= without_rows(graph)
            structure = Structure.of(graph)
            self._compare(
                graph, structure, z, v, truth, self._layouts(graph, structure, z, v), ledger
            )
        ledger.dtype, ledger.subject = graph.lowest_dtype(), subject.name

    # -- forward checks
    # ---------------------------------------------------------------------------------------------

    def _sides(
        self, subject: Subject, batch: Batch, z: Tensor, graph: Graph, ledger: Ledger
    ) -> str:
        """Tell the parameter side from the sample side of the graph.

        With every sample twice, the sample side doubles, the other does not.

        Returns why that cannot be (a loop over samples within the model), or an empty string.
        """
        with on_demand.structure_only():
            z6 = self._forward(subject, batch, self.all * 2, fold=True)
        self._same(subject, batch, z, torch.cat([z, z], self.out_dim), z6)
        twice = walk(z6, subject.parameters)
        if graph.names != twice.names or graph.children != twice.children:
            return "the graph of a batch of 6 has another structure than that of 3"

        def decide(i: int, key: tuple) -> bool:
            same = graph.sizes(i) == twice.sizes(i)
            if same:
                ledger.parameter_side.add((key, graph.sizes(i)))
            else:
                ledger.sample_side.add(key)
            return same

        graph.classify(decide)
        self._varying(subject, batch, graph, ledger)
        return ""

    def _varying(self, subject: Subject, batch: Batch, graph: Graph, ledger: Ledger) -> None:
        """Note what seems computed of parameters alone but depends on the data, too.

        Such is a buffer of fixed size that samples fill.

        With other samples the same cotangents must give the same gradients there.
        """
        sources = {u.source for u in graph.uses() if graph.view_chain(u.child) is None}
        if not sources:
            return
        again = graph  # of the few samples
        if on_demand.active():  # it was walked for its structure alone
            again = walk(self._forward(subject, batch, self.all, fold=True), subject.parameters)
        one = self._pulled_back(graph, again, sources)
        again = walk(self._forward(subject, batch, [0] * self.count, fold=True), subject.parameters)
        other = self._pulled_back(graph, again, sources)
        for place in sources:
            pairs = zip(one.get(place, ()), other.get(place, ()), strict=False)
            gradients = [(a, b) for a, b in pairs if a is not None and b is not None]
            alike = (
                torch.allclose(a, b, rtol=1e-6, atol=1e-9 * float(a.abs().max()))
                for a, b in gradients
            )
            if place not in one or place not in other or not all(alike):
                ledger.varying.add(graph.keys[place[0]])

    @staticmethod
    def _pulled_back(
        graph: Graph, again: Graph, sources: set[Place]
    ) -> dict[Place, tuple[Tensor | None, ...]]:
        """Gradients in ``again`` of the parameters below each of the sources.

        That is where it is as ``graph`` there.

        The cotangents at the sources are always the same.
        """
        pulled: dict[Place, tuple[Tensor | None, ...]] = {}
        if graph.names != again.names or graph.children != again.children:
            return pulled
        for node, output in sources:
            if graph.sizes(node) != again.sizes(node):
                continue
            variables = [again.nodes[p].variable for p in graph.parameters_below(node)]
            v = generic_cotangent(
                variables[0].new_empty(graph.shape(node, output), dtype=graph.dtype(node, output))
            )
            edge = GradientEdge(again.nodes[node], output)
            pulled[node, output] = torch.autograd.grad(
                [edge], variables, [v], retain_graph=True, allow_unused=True
            )
        return pulled

    # -- backward checks
    # --------------------------------------------------------------------------------------------

    def _exact(
        self,
        subject: Subject,
        batch: Batch,
        sample: int,
        cotangents: list[Tensor],
        ledger: Ledger,
    ) -> Beside:
        """Run one sample of a subject beside a copy of itself.

        A model that does not take two samples is run on the sample alone, one that does not take
        one on three copies.
        """
        found = beside_copies(
            partial(self._forward, subject, batch),
            sample,
            [v.narrow(self.out_dim, sample, 1) for v in cotangents],
            self.out_dim,
            subject.parameters,
            (2, 1, self.count),
        )
        if found.copies == 1:
            ledger.notes.append(
                "the model does not take two samples: its gradients were taken from one alone"
            )
        return found

    def _truth(
        self, subject: Subject, batch: Batch, z: Tensor, v: Tensor, ledger: Ledger
    ) -> dict[str, Tensor]:
        """Return the exact squared norms [3] of every parameter, sample by sample.

        Each sample runs beside a copy of itself, with one plain backward pass each.

        So a sample must give what it gave in the batch: samples that interact through anything, be
        it a detached mean, are found here.
        """
        names = list(subject.parameters)
        truth = {
            name: torch.zeros(self.count, dtype=torch.float64, device=v.device) for name in names
        }
        at_scales: list[list[Tensor]] = []
        for sample in range(self.count):
            scaled = (
                [v * 2.0**e for e in SCALES] if sample == 0 and subject.dtype is not None else []
            )
            exact = self._exact(subject, batch, sample, [v, *scaled], ledger)
            norms, *others = exact.norms
            self._same(subject, batch, z, z.narrow(self.out_dim, sample, 1), exact.row)
            at_scales += others
            for name, norm in zip(names, norms, strict=True):
                truth[name][sample] = norm
        if not torch.isfinite(torch.stack(list(truth.values()))).all():
            bad = next(name for name, t in truth.items() if not torch.isfinite(t).all())
            raise NonFiniteError(
                f"the gradient of parameter {bad} is not finite on {self.count} samples of the "
                "inputs"
            )
        self._linear(torch.stack([norms[0] for norms in truth.values()]), at_scales)
        return truth

    def _layouts(
        self, graph: Graph, structure: Structure, z: Tensor, v: Tensor
    ) -> dict[Place, list[Layout]]:
        """Return the layouts of every output of a use.

        What the graph tells and marks confirm, else what marks find.
        """
        known, _ = trace(graph, z, self.out_dim)
        places = [
            (node, output) for node in structure.by_node for output in range(graph.outputs(node))
        ]
        told: dict[Place, list[Layout]] = {
            place: [known[place]] if place in known else [] for place in places
        }
        layouts = explained(graph, structure, z, v, self.out_dim, told, known)
        unknown = {
            place: every_layout(graph, place, self.count)
            for place, held in layouts.items()
            if not held
        }
        return layouts | (
            explained(graph, structure, z, v, self.out_dim, unknown) if unknown else {}
        )

    def _compare(
        self,
        graph: Graph,
        structure: Structure,
        z: Tensor,
        v: Tensor,
        truth: dict[str, Tensor],
        alternatives: dict[Place, list[Layout]],
        ledger: Ledger,
    ) -> None:
        """Run the rules on the three samples at once and record the outcome.

        Each parameter's norms are compared with the truth.
        """
        layouts = {place: held[0] for place, held in alternatives.items() if held}
        # a rule that an earlier proof refuted stays refuted
        routes = {key: use.route for key, use in ledger.uses.items() if use.route == "node"}
        reasons = {key: ledger.uses[key].reason for key in routes}
        uses_of: dict[str, list[Use]] = {}
        for use in structure.uses:
            for name in graph.names_below(use.child):
                uses_of.setdefault(name, []).append(use)
        measure = partial(
            sq_norms,
            graph,
            structure,
            z,
            v,
            layouts,
            self.count,
            routes,
            retain=True,
            reasons=reasons,
            tolerant=True,
        )
        off = Deviations.of(measure(), truth, graph.lowest_dtype())
        self._refute_folds(graph, structure, routes, reasons, off.wrong)
        by_loop: dict[str, str] = {}
        if off.wrong:
            for name in off.wrong:
                _by_their_nodes(uses_of[name], routes, reasons)
            off = Deviations.of(measure(), truth, graph.lowest_dtype())
            for name in off.wrong:
                by_loop[name] = f"no route but the loop is right (off by {off.largest[name]:.1e})"
        for use in structure.uses:
            if getattr(graph.nodes[use.node], "_saved_scale_grad_by_freq", False):
                # No sample's of its own in a batch.
                counted = "scale_grad_by_freq counts the ids of the whole batch"
                by_loop |= dict.fromkeys(graph.names_below(use.child), counted)
            outputs = range(graph.outputs(use.node))
            ledger.uses[use.key] = UseProof(
                {output: alternatives.get((use.node, output), []) for output in outputs},
                routes.get(use.key, "rule"),
                graph.names[use.node],
                reasons.get(use.key, ""),
            )
        for name, deviation in off.largest.items():
            alive = bool((truth[name] > 0).any())
            known = ledger.parameters.get(name)
            if known is not None and (known.route == "loop" or (known.alive and not alive)):
                continue
            uses = uses_of[name]
            kinds = [_kind(graph, use.node) for use in uses]
            axes = [str(layouts.get((use.node, 0), "unknown")) for use in uses]
            route, reason = "rule", ""
            if any(routes.get(use.key) == "node" for use in uses):
                route = "node"
                reason = next((reasons[use.key] for use in uses if use.key in reasons), "")
            if name in by_loop:
                route, reason, deviation = "loop", by_loop[name], 0.0
            ledger.parameters[name] = ParameterProof(
                route,
                deviation,
                alive,
                tuple(dict.fromkeys(kinds)),
                tuple(dict.fromkeys(axes)),
                reason,
            )

    @staticmethod
    def _refute_folds(
        graph: Graph,
        structure: Structure,
        routes: dict[tuple, str],
        reasons: dict[tuple, str],
        wrong: list[str],
    ) -> None:
        """Raise FoldRefuted with all folded blocks whose norms are wrong or have no rule.

        All at once, as each refusal is another proof.
        """
        blocks: dict[tuple[str, ...], str] = {}
        for use in structure.uses:
            if graph.names[use.node] not in OURS:
                continue
            if routes.get(use.key) == "node":  # its batch norm alone may do
                blocks.setdefault(tuple(weight_of(graph, use.node)), reasons[use.key])
            elif any(name in wrong for name in graph.names_below(use.child)):
                blocks.setdefault(
                    tuple(parameters_of(graph, use.node)), "its norms differ from the exact ones"
                )
        if blocks:
            refuse_blocks(map(list, blocks), next(iter(blocks.values())))

    @staticmethod
    def _linear(want: Tensor, at_scales: list[list[Tensor]]) -> None:
        """Require that a sample's gradients scale as the cotangent does.

        The test is of squared norms at SCALES, if any were taken.
        """
        for exponent, norms in zip(SCALES, at_scales, strict=False):
            scaled = torch.stack(norms) * 4.0**-exponent
            if not bool(((scaled - want).abs() <= 1e-6 * want.sum()).all()):
                raise NonlinearBackwardError(
                    f"gradients do not scale as the output's do: 2^{exponent} times the one does "
                    f"not give 2^{exponent} times the others. Something changes them on the way, "
                    "such as a hook that clips them or adds to them; remove it for the measurement"
                )


def _by_their_nodes(uses: list[Use], routes: dict[tuple, str], reasons: dict[tuple, str]) -> None:
    """Let the nodes' own backward formulas do uses that go by a rule, which was wrong."""
    for use in uses:
        if routes.get(use.key, "rule") == "rule":
            routes[use.key] = "node"
            reasons[use.key] = "the rule's result differs from the truth"


def _kind(graph: Graph, node: int) -> str:
    name = graph.names[node].removesuffix("Backward0")
    return name.removesuffix("Backward") if graph.names[node] not in CASTS else name


def generic_cotangent(z: Tensor) -> Tensor:
    """Return a dense random cotangent for an output, always the same."""
    generator = torch.Generator().manual_seed(1)
    v = torch.empty_like(z, memory_format=torch.contiguous_format)
    for part in v if v.ndim > 1 else [v]:
        # No float64 copy of the whole: it may be a language model's logits.
        part.copy_(torch.randn(part.shape, generator=generator, dtype=torch.float64))
    return v
