"""The engine: the squared gradient norm of every sample of a batch, compared with plain autograd.

A batch is measured by a plan, which is made once for its structure and shapes, and with one forward
and one backward pass. Random samples run again alone. If plain autograd refutes the norms, the
engine takes one step down its ladder, and measures the batch again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from fastlr import ops
from fastlr.errors import (
    FastlrError,
    NonFiniteError,
    RandomForwardError,
    few,
    first_line,
    warn,
)
from fastlr.ghost.fusion.forward import ForwardPass, require_finite, run_measured
from fastlr.ghost.fusion.mode import Folding, unfolded
from fastlr.ghost.graph.layouts import Unsupported
from fastlr.ghost.graph.plan import Key, Plan
from fastlr.ghost.graph.walk import OWN, Graph, walk
from fastlr.ghost.model.attributes import emptied
from fastlr.ghost.model.batch import Batch, inputs_key
from fastlr.ghost.model.refusals import refusals
from fastlr.ghost.model.view import ModelView
from fastlr.ghost.model.writes import passes_write, unchanged
from fastlr.ghost.norms.cotangents import Cotangent, Pass, generic_cotangent, passes
from fastlr.ghost.norms.sq_norms import Again, sq_norms
from fastlr.ghost.trust.agreement import has_few_digits, norm_tolerance
from fastlr.ghost.trust.audits import SAMPLES, Audits, Check, Draw, Outdated, Refuted, SampleAudit
from fastlr.ghost.trust.caches import Caches
from fastlr.ghost.trust.copies import all_zero, measured_on_copy
from fastlr.ghost.trust.hooks import (
    Scale,
    changed_by_hooks,
    require_hooks_to_scale,
    require_same_among_copies,
)
from fastlr.ghost.trust.independence import Independence, spread
from fastlr.ghost.trust.planning import new_plan
from fastlr.ghost.trust.truth import norms_by_loop, norms_of_one
from fastlr.ops.autocast import autocast_dtype
from fastlr.ops.compiled_parts import again_once_compiled, uncompiled
from fastlr.ops.cudnn import cudnn_as_user_set, without_cudnn
from fastlr.ops.deferred_checks import out_of_memory, refuse_beyond
from fastlr.ops.modules import all_modules
from fastlr.ops.process_state import quiet_rng
from fastlr.ops.recent import Recent

MOST_COPIES = 8  # structures that deep copies test, if the data choose the graph of a model


class Rung(IntEnum):
    """A rung of the ladder: how all parameters of a model are measured at best."""

    KERNELS = 0
    PLAIN_TORCH = 1
    UNFOLDED = 2
    BY_NODE = 3
    BY_SAMPLE = 4

    @property
    def words(self) -> str:
        """The rung in words."""
        ways = "by kernels", "in plain torch", "unfolded", "by formulas of nodes", "by sample"
        return ways[self]


@dataclass(eq=False)
class ChunkNorms:
    """Per-sample squared gradient norms of one call.

    Attributes:
        names: Names of the parameters.
        table: Squared norms [parameters, B], float64.
        routes: How each parameter was measured ("rule": by the rule of its nodes; "node": by their
            own formulas, sample by sample; "loop": by one pass per sample; "zero": not used).
    """

    names: list[str]
    table: Tensor
    routes: dict[str, str]

    @property
    def total(self) -> Tensor:
        """Squared norms [B] by all parameters together."""
        return self.table.sum(0)

    @property
    def per_parameter(self) -> dict[str, Tensor]:
        """Name of each parameter -> its squared norms [B]."""
        return dict(zip(self.names, self.table, strict=True))


class Engine:
    """Per-sample squared gradient norms of a model, by plans that are kept.

    Args:
        model: Any nn.Module, measured in the mode it is in, or a view that says where its samples
            are.
        is_copy: Whether it is a deep copy, made to check another model.

    Attributes:
        view: Model.
        rung: Rung of the ladder.
        reason: Why the engine has stepped down; "" if it has not.
        plans: Plans by their keys.
        plan: Plan of the last batch.
        audits: Counts of audits, and when the next is due.
        independence: Comparisons of samples in other company.
        folding: Blocks of the model that run as one node.

    Raises:
        ModelError: No trainable parameters, or ones that cannot be measured.
    """

    def __init__(self, model: nn.Module | ModelView, *, is_copy: bool = False) -> None:
        self.view = model if isinstance(model, ModelView) else ModelView.of(model)
        self.is_copy = is_copy
        self.rung, self.reason = Rung.KERNELS, ""
        self.plans: Recent[Key, Plan] = Recent()
        self.plan: Plan | None = None
        self.audits, self.independence, self.folding = Audits(), Independence(), Folding()
        self._last_of_structure: Recent[tuple, Plan] = Recent()
        self._caches = Caches()
        self._copies = 0
        self._warned: set[str] = set()

    @property
    def model(self) -> nn.Module:
        """The unwrapped model; ModelError once it no longer exists."""
        return self.view.module

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters by name, as the last call found them."""
        return self.view.parameters

    def run(self, x: Any, cotangent: Cotangent, check: Check = None) -> ChunkNorms:
        """Return the squared norms of the gradient of <cotangent, output> for each sample.

        Args:
            x: A tensor, a tuple (positional) or a dict (keywords).
            cotangent: A tensor shaped like the output, a function of the detached output that
                returns one, or one that returns several: then the squared norms of all passes are
                summed. Any scale and floating-point dtype.
            check: Samples to audit: a `Draw`, one at random (True) or none (False). None: one as
                often as costs at most 3 % of the time. A new plan is always audited.

        Raises:
            InputError, ModelError and its kinds: see fastlr.errors.
        """
        self.view = self.view.renewed()
        x = self.view.inputs(x)
        return again_once_compiled(lambda: self._run(x, cotangent, check))

    def _run(self, x: Any, cotangent: Cotangent, check: Check) -> ChunkNorms:
        """Measure a batch, on a lower rung where plain autograd refutes it."""
        rung, reason = self.rung, self.reason
        with (
            torch.inference_mode(False),
            quiet_rng(self.view.device),
            without_cudnn(self.view.device, self.parameters.values()),
            unchanged(self.model),
            uncompiled(),  # checkpoints run compiled parts again in the backward pass
            refusals(self.view, x),
            self.without_caches(x),
        ):
            while True:
                try:
                    with self._on_rung():
                        return self._measure(x, cotangent, check)
                except Exception as error:
                    if not self._may_hold_on_lower_rung(error):
                        self.rung, self.reason = rung, reason
                        raise
                # Here the traceback no longer holds the memory of the failed pass.

    def without_caches(self, x: Any) -> AbstractContextManager[None]:
        """Run the model within this context without tensors that earlier passes have left in it."""
        return emptied(self._caches.of(self.view, self._flags, x))

    def _flags(self) -> tuple:
        """Return the train flags, dtypes and autocast under which the model would run now."""
        modes = tuple([m.training for m in all_modules(self.model)])
        dtypes = tuple([(name, p.dtype) for name, p in self.parameters.items()])
        return modes, dtypes, autocast_dtype(self.view.device)

    # -- the ladder
    # ----------------------------------------------------------------------------------------------

    def _on_rung(self) -> ExitStack:
        """Return the context in which the model runs on the engine's rung."""
        context = ExitStack()
        if self.rung >= Rung.PLAIN_TORCH:
            context.enter_context(ops.using("torch"))
        if self.rung >= Rung.UNFOLDED:
            context.enter_context(unfolded())
        return context

    def _may_hold_on_lower_rung(self, error: Exception) -> bool:
        """Prepare to measure the batch again after an error; return False if that cannot help."""
        text = f"{type(error).__name__}: {first_line(error)[:200]}"
        if isinstance(error, Again):
            self.folding.blocks.refused |= error.unfolded
            return True
        if isinstance(error, Outdated):
            self.audits.fail(error)
            warn(
                f"an audit failed ({error}): the model has changed since the last audit that "
                "passed, and results since then may be wrong. It is checked again on this batch"
            )
            self.forget_plans()
            return True
        if isinstance(error, Refuted):
            return self.step_down(self._next_rung(), str(error), says_so=True)
        if isinstance(error, (Unsupported, CheckpointError)):
            by = "activation checkpointing: " * isinstance(error, CheckpointError)
            return self.step_down(Rung.BY_SAMPLE, f"{by}{first_line(error)}")
        may_be_the_foldings_fault = self.folding.blocks.may_have_changed_the_pass
        if isinstance(error, FastlrError) or out_of_memory(error) or not may_be_the_foldings_fault:
            return False
        return self.step_down(Rung.UNFOLDED, text)

    def _next_rung(self) -> int:
        """Return the next lower rung on which something would change."""
        rung = self.rung + 1
        if rung == Rung.PLAIN_TORCH and ops.backend_for(*self.parameters.values()) == "torch":
            rung += 1
        if rung == Rung.UNFOLDED and not self.folding.blocks.has_folded:
            rung += 1
        return rung

    def step_down(self, rung: int, reason: str, *, says_so: bool = False) -> bool:
        """Use a lower rung from now on; return False if there is none."""
        if not self.rung < rung <= Rung.BY_SAMPLE:
            return False
        self.rung, self.reason = Rung(rung), reason
        self.forget_plans()
        if says_so:
            warn(
                f"plain autograd refutes the norms ({reason}): from now on the model is measured "
                f"{self.rung.words}"
            )
        return True

    def forget_plans(self) -> None:
        """Make all plans again."""
        self.plans.clear()
        self._last_of_structure.clear()

    # -- one batch
    # ----------------------------------------------------------------------------------------------

    def _measure(self, x: Any, cotangent: Cotangent, check: Check) -> ChunkNorms:
        """Return the norms of a batch: run it, find its plan, measure, audit."""
        begun = time.perf_counter()
        self.plan = None
        forward = ForwardPass.of(self.view, self.folding, x)
        self._warn_of_others(forward.graph)
        key = self._key(forward)
        several = passes(cotangent, forward.z.detach(), self.view.out_dim)
        first = next(several)
        known = self.plans.get(key)
        plan = self._plan(forward, key, known)
        norms = self._norms(forward, plan, first, is_new=known is None)
        table = norms * first.unscaling
        for one in several:
            table = table + self._norms(forward, plan, one) * one.unscaling
        self._refuse_gradients_not_finite(table)
        self._audit(forward, plan, known, first, norms, check)
        self.plans.put(key, plan)
        self._last_of_structure.put(key[:2], plan)
        self.plan = plan
        if check is None:
            self.audits.measured(time.perf_counter() - begun)
        return ChunkNorms(list(self.parameters), table, {n: plan.route(n) for n in self.parameters})

    def _key(self, forward: ForwardPass) -> Key:
        """Return the key of the plan of a batch."""
        inputs = inputs_key(forward.x, forward.count, self.view.in_dim)
        return Key.of(self._flags(), forward.graph, forward.count, inputs)

    def _plan(self, forward: ForwardPass, key: Key, known: Plan | None) -> Plan:
        """Return the plan of a batch: the known one, unless it has to be made in every batch."""
        if known is not None:
            forward.carriers = known.carriers
            if not (known.rows_lost_at or self.independence.suspicion or self.audits.failed):
                known.classify(forward.graph)
                return known
        plan = new_plan(
            forward, key, known or self._last_of_structure.get(key[:2]), self.independence
        )
        if self.rung >= Rung.BY_SAMPLE:
            plan.measure_by_sample(plan.names, self.reason)
        elif self.rung >= Rung.BY_NODE:
            plan.by_node |= dict.fromkeys((use.key for use in plan.uses.every), self.reason)
        if passes_write():  # the backward pass may read what other passes have written since
            forward.z = forward.run_again()
            forward.graph = walk(forward.z, self.parameters)
            if forward.graph.signature() != key.structure:
                raise RandomForwardError(
                    "two forward passes on the same inputs have other graphs: the model draws at "
                    "random, or a pass changes what the next one does"
                )
        plan.classify(forward.graph)
        return plan

    def _norms(
        self, forward: ForwardPass, plan: Plan, one: Pass, *, is_new: bool = False
    ) -> Tensor:
        """Return the squared norms [parameters, B] of a batch for one cotangent."""
        if plan.count == 1:
            if is_new or self.view.has_hooked_parameters:
                require_hooks_to_scale(self.view, forward.z, one.v)
            return self._table(norms_of_one(forward, one.v, retain=one.more), one)
        if self.view.has_hooked_parameters:
            changed = changed_by_hooks(self.parameters)
            plan.measure_by_sample(changed, "a hook of it changes its gradients")
        norms: dict[str, Tensor] = {}
        if not plan.by_sample.keys() >= set(plan.names):
            with cudnn_as_user_set(self.view.device):
                norms = sq_norms(
                    forward.graph,
                    forward.z,
                    one.v,
                    plan,
                    is_new=is_new,
                    retain=one.more or is_new,
                    skip=plan.by_sample,
                )
        by_sample = {name: self.parameters[name] for name in plan.names if name in plan.by_sample}
        if by_sample:
            self._warn_of_loop(plan)
            norms |= norms_by_loop(forward, one.v, by_sample)
        return self._table(norms, one)

    def _table(self, norms: dict[str, Tensor], one: Pass) -> Tensor:
        """Return squared norms [parameters, B] in the order of ``parameters``."""
        zero = torch.zeros_like(one.unscaling)
        return torch.stack([norms.get(name, zero) for name in self.parameters])

    # -- audits
    # ----------------------------------------------------------------------------------------------

    def _audit(
        self,
        forward: ForwardPass,
        plan: Plan,
        known: Plan | None,
        one: Pass,
        norms: Tensor,
        check: Check,
    ) -> None:
        """Run some samples alone, and compare their outputs and norms.

        Args:
            forward: Forward pass over the batch.
            plan: Plan of the batch.
            known: Earlier plan of the same key; None if ``plan`` is new.
            one: Backward pass over the batch.
            norms: Squared norms [parameters, B] of that pass.
            check: Samples that the caller wants audited.

        Raises:
            Outdated: A sample refutes a plan of an earlier batch.
            Refuted: A sample has other norms.
            InteractionError: A sample has another output.
        """
        if plan.count == 1:  # plain autograd has measured the sample alone
            self.audits.passed += isinstance(check, Draw) and any(check)
            return
        hooks = self.folding.hooks_tensors or self.view.has_hooked_parameters
        samples = self.audits.samples(plan.count, check, int(hooks) if known else SAMPLES)
        wrong: dict[str, float] = {}
        with nullcontext() if known is None or check is not None else self.audits.timed():
            for sample in samples:
                measured = forward.batch, sample, forward.z, one, norms
                again = lambda: forward.batch, forward.run_again
                audit = SampleAudit(self.view, plan, *measured, *again)
                scaled = hooks or (known is None and sample == samples[0])
                off = self._errors(audit, forward, plan is known, scaled, one)
                self.audits.passed += not off
                wrong |= off
                if known is None:
                    for name, deviation in audit.deviations().items():
                        plan.deviations[name] = max(deviation, plan.deviations.get(name, 0.0))
        if wrong:
            worst = max(wrong, key=lambda name: wrong[name])
            raise Refuted(f"the norm of {worst} is off by {wrong[worst]:.1e} of its sample's total")
        if known is None and not self.is_copy:
            self._check_on_copy(forward, plan)
        has_own_functions = any(kind.startswith(OWN) for kind in forward.graph.names)
        if hooks or (known is None and has_own_functions):
            tolerance = norm_tolerance(self.parameters.values(), plan.dtype, self.view.device)
            require_same_among_copies(self.view, forward.batch, forward.z, tolerance)

    def _errors(
        self, audit: SampleAudit, forward: ForwardPass, is_known: bool, scaled: bool, one: Pass
    ) -> dict[str, float]:
        """Run an audit; return the parameters with wrong norms, and how far each is off."""
        scale = Scale.of(forward.graph.float_dtypes()) if scaled else None
        may_differ, may_be_wrong = audit.run(scale, self.view.row(one.v, audit.sample)).tolist()
        if may_differ and not audit.has_its_output():
            if is_known:
                alone = f"sample {audit.sample} alone gives another output than within its batch"
                raise Outdated(audit.sample, f"{alone} of {forward.count}")
            self.independence.require(forward, 0)
            raise self.independence.interaction(forward, forward.batch)
        off = audit.refuted() if may_be_wrong else {}
        if off and is_known:
            worst = max(off, key=lambda name: off[name])
            text = f"the norm of {worst} for sample {audit.sample} is off by {off[worst]:.1e}"
            raise Outdated(audit.sample, f"{text} of its total")
        return off

    def _check_on_copy(self, forward: ForwardPass, plan: Plan) -> None:
        """Measure a few samples on a deep copy, where the model's own numbers hide errors.

        Few digits do so, and parameters that are all zero.

        Raises:
            Refuted: The copy was measured on a lower rung.
        """
        by_rules = {name for name in plan.names if name not in plan.by_sample}
        if not has_few_digits(self.parameters.values(), self.view.device):
            by_rules -= plan.deviations.keys()
            if not all_zero(self.parameters.values()):
                return
        if by_rules <= plan.tested_on_copy or self._copies >= MOST_COPIES:
            return
        self._copies += 1
        plan.tested_on_copy |= by_rules
        copy, _ = self.measure_on_copy(forward.batch, plan)
        if copy is None:
            plan.notes.append(
                "no deep copy of it runs like the model: it was checked as it is alone"
            )
        elif copy.rung > max(self.rung, Rung.PLAIN_TORCH):
            raise Refuted(copy.reason)

    def measure_on_copy(self, batch: Batch, plan: Plan) -> tuple[Engine | None, torch.dtype | None]:
        """Measure a few samples on a deep copy in more digits.

        Returns:
            The engine of the copy and its dtype; None if no copy runs like the model.
        """

        def measure(view: ModelView, x: Any) -> Engine:
            engine = Engine(view, is_copy=True)
            engine.run(x, generic_cotangent)
            return engine

        samples = batch.part(spread(batch.count))
        for engine, dtype in measured_on_copy(self.view, samples, measure):
            if engine.plan is not None and set(engine.plan.names) >= set(plan.names):
                return engine, dtype
        return None, None

    # -- refusals and warnings
    # ----------------------------------------------------------------------------------------------

    def _refuse_gradients_not_finite(self, table: Tensor) -> None:
        if not float(table.amax()) < math.inf:  # nor is that so of what is not a number
            bad, sample = (~torch.isfinite(table)).nonzero()[0].tolist()
            raise NonFiniteError(
                f"the gradient of parameter {list(self.parameters)[bad]} is not finite for sample "
                f"{sample} of the batch"
            )

    def _warn_of_others(self, graph: Graph) -> None:
        """Warn, once, of tensors that move the output and are not counted."""
        if not graph.others or "others" in self._warned:
            return
        self._warned.add("others")
        shapes = ", ".join(str(tuple(graph.nodes[i].variable.shape)) for i in graph.others[:4])
        warn(
            f"{len(graph.others)} tensors of shapes {shapes} require grad and move the output, "
            "but are not parameters of the model: they are not counted. Register them as "
            "parameters if they should be"
        )

    def _warn_of_loop(self, plan: Plan) -> None:
        """Warn, once of each, of parameters that are measured by the loop."""
        names = [n for n in plan.names if n in plan.by_sample and n not in self._warned]
        if names:
            self._warned.update(names)
            warn(
                f"{len(names)} parameters ({few(names, 3)}) are measured by an exact loop "
                f"over samples, which is slow: {plan.by_sample[names[0]]}"
            )

    # -- batches like an earlier one, in a CUDA graph
    # ----------------------------------------------------------------------------------------------

    def replayable(self, plan: Plan | None) -> bool:
        """Return True if batches like an earlier one may be run by its plan alone."""
        if plan is None or plan.count == 1 or plan.by_sample or plan.by_node:
            return False
        is_fixed = not (plan.rows_lost_at or self.independence.suspicion)
        return is_fixed and not self.audits.failed and not self.view.has_hooked_parameters

    def run_without_waiting_for_device(
        self, plan: Plan, x: Any, cotangent: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Run a batch by the plan of an earlier one. No check waits for the device.

        Returns:
            (squared norms [parameters, B] in the order of ``parameters``, float64; the output).

        Raises:
            Again: The graph is not the planned one.
        """
        with torch.inference_mode(False), self._on_rung():
            z = run_measured(self.view, self.folding, x)
            require_finite(z)
            graph = walk(z, self.parameters)
            if graph.signature() != plan.key.structure:
                raise Again
            plan.classify(graph)
            (one,) = passes(cotangent, z.detach(), self.view.out_dim)
            with cudnn_as_user_set(self.view.device):
                norms = sq_norms(graph, z, one.v, plan)
            table = self._table(norms, one) * one.unscaling
        refuse_beyond(table, lambda: NonFiniteError("the gradient of a parameter is not finite"))
        return table, z.detach()

    def audit_of(
        self,
        plan: Plan,
        x: Any,
        output: Tensor,
        table: Tensor,
        cotangent: Cotangent,
        sample: int,
        again: Callable[[], Any],
    ) -> SampleAudit:
        """Return the audit of a sample of a batch that `run_without_waiting_for_device` did.

        Args:
            plan: Plan of the batch.
            x: Inputs.
            output: Output for them.
            table: Squared norms [parameters, B].
            cotangent: Cotangent of the batch.
            sample: Number of the sample.
            again: Function that makes the inputs again.
        """
        (one,) = passes(cotangent, output, self.view.out_dim)

        def batch(x: Any) -> Batch:
            return self.view.batch(x, plan.count, plan.carriers)

        measured = batch(x), sample, output, one, table / one.unscaling
        again_now = lambda: batch(again()), lambda: run_measured(self.view, self.folding, again())
        return SampleAudit(self.view, plan, *measured, *again_now)
