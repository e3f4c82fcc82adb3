"""The engine: the squared gradient norm of every sample of a batch, compared with plain autograd.

A batch is measured by a plan, which is made once for its structure and shapes, and with one forward
and one backward pass. Random samples run again alone. If plain autograd refutes the norms, the
engine takes one step down its ladder, and measures the batch again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastlr import ops
from fastlr.errors import (
    HiddenParameterError,
    InteractionError,
    NonFiniteError,
    NonlinearBackwardError,
    RandomForwardError,
    few,
    warn,
)
from fastlr.ghost.fusion.conv_bn import folded_blocks_with
from fastlr.ghost.fusion.forward import ForwardPass, run_measured
from fastlr.ghost.fusion.mode import Folding
from fastlr.ghost.graph.plan import Key, Plan
from fastlr.ghost.model.attributes import emptied
from fastlr.ghost.model.batch import Batch, inputs_key
from fastlr.ghost.model.non_finite import tensors_not_finite
from fastlr.ghost.model.refusals import refusals
from fastlr.ghost.model.view import ModelView
from fastlr.ghost.model.writes import unchanged
from fastlr.ghost.norms.cotangents import Cotangent, Pass, generic_cotangent, passes
from fastlr.ghost.norms.sq_norms import MeasureAgain, sq_norms
from fastlr.ghost.trust.agreement import norm_tolerance
from fastlr.ghost.trust.audits import SAMPLES, Audits, Check, Refuted, SampleAudit
from fastlr.ghost.trust.caches import Caches
from fastlr.ghost.trust.copies import (
    add_noise,
    running_copies,
    untested_by_audits,
    zero_parameters,
)
from fastlr.ghost.trust.hooks import (
    Scale,
    changed_by_hooks,
    require_hooks_to_scale,
    require_same_among_copies,
)
from fastlr.ghost.trust.independence import Independence, evenly_spaced
from fastlr.ghost.trust.ladder import Ladder, Rung
from fastlr.ghost.trust.planning import new_plan
from fastlr.ghost.trust.truth import norms_by_loop, norms_of_one
from fastlr.ops.autocast import autocast_dtype
from fastlr.ops.compiled_parts import retry_after_first_compilation, uncompiled
from fastlr.ops.cudnn import cudnn_as_user_set, never_cudnn, without_cudnn
from fastlr.ops.modules import all_modules
from fastlr.ops.process_state import quiet_rng, warnings_ignored
from fastlr.ops.recent import Recent

MEANINGLESS = InteractionError, RandomForwardError, HiddenParameterError, NonlinearBackwardError
NOT_MEASURED = Plan()
MOST_COPIES = 8  # structures that deep copies test, if the data choose the graph of a model


@dataclass(eq=False)
class ChunkNorms:
    """Per-sample squared gradient norms of one call.

    Attributes:
        table: Squared norms [parameters, B], float64.
        routes: How each parameter was measured ("rule": by the rule of its nodes; "node": by their
            own formulas, sample by sample; "loop": by one pass per sample; "zero": not used).
    """

    table: Tensor
    routes: dict[str, str]

    @property
    def total(self) -> Tensor:
        """Squared norms [B] by all parameters together."""
        return self.table.sum(0)

    @property
    def per_parameter(self) -> dict[str, Tensor]:
        """Name of each parameter -> its squared norms [B]."""
        return dict(zip(self.routes, self.table, strict=True))


class Engine:
    """Per-sample squared gradient norms of a model, by plans that are kept.

    Args:
        model: Any nn.Module, measured in the mode it is in, or a view that says where its samples
            are.

    Attributes:
        view: Model.
        folding: Blocks of the model that run as one node.
        ladder: Rung on which the model is measured with its flags of the last call.
        audited_plans: Plans that have passed audits, by their keys.
        plan: Plan of the last batch; an empty one if that was not measured.
        audits: Counts of audits, and when the next is due.
        independence: Comparisons of samples in other company, with these flags.

    Raises:
        ModelError: No trainable parameters, or ones that cannot be measured.
    """

    def __init__(self, model: nn.Module | ModelView) -> None:
        self.view = model if isinstance(model, ModelView) else ModelView.of(model)
        self.folding = Folding()
        self.audited_plans: Recent[Key, Plan] = Recent()
        self.plan = NOT_MEASURED
        self.audits = Audits()
        self.ladder, self.independence = Ladder(self.folding), Independence()
        self._states: Recent[tuple, tuple[Ladder, Independence]] = Recent()
        self._latest_plans: Recent[tuple, Plan] = Recent()
        self._caches = Caches()
        self._copies_made = 0
        self._warned: set[str] = set()

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
        return retry_after_first_compilation(
            lambda: self._measure_until_trusted(x, cotangent, check)
        )

    def _measure_until_trusted(self, x: Any, cotangent: Cotangent, check: Check) -> ChunkNorms:
        """Measure a batch, again where a plan is outdated or a rung does not hold."""
        flags = self._flags()
        self.ladder, self.independence = self._states.get(flags) or self._states.put(
            flags, (Ladder(self.folding), Independence())
        )
        with (
            torch.inference_mode(False),
            quiet_rng(self.view.device),
            without_cudnn(self.view.device, self.parameters.values()),
            unchanged(self.view.module),
            uncompiled(),  # checkpoints run compiled parts again in the backward pass
            refusals(self.view, x),
            self.without_caches(x),
            self.ladder.restored_on_failure(),
        ):
            while True:
                try:
                    with self.ladder.context():
                        return self._measure(x, (*flags, self.ladder.rung), cotangent, check)
                except Exception as error:
                    uses_kernels = ops.backend_for(*self.parameters.values()) == "triton"
                    if not self.ladder.can_try_again_after(error, uses_kernels=uses_kernels):
                        raise
                # Here no traceback holds the memory of the failed pass.

    def run_forward(self, x: Any) -> Tensor:
        """Return the output for inputs, with its graph, as the engine measures it."""
        with self.ladder.context():
            return run_measured(self.view, self.folding, x)

    def without_caches(self, x: Any) -> AbstractContextManager[None]:
        """Run the model within this context without tensors that earlier passes have left in it."""
        return emptied(self._caches.of(self.view, self._flags, x))

    def _flags(self) -> tuple:
        """Return what decides how the model runs, besides its inputs."""
        modes = tuple([m.training for m in all_modules(self.view.module)])
        dtypes = tuple([(name, p.dtype) for name, p in self.parameters.items()])
        return modes, dtypes, autocast_dtype(self.view.device)

    def _measure(self, x: Any, flags: tuple, cotangent: Cotangent, check: Check) -> ChunkNorms:
        """Return the norms of a batch: run it, find its plan, measure, audit."""
        begun = time.perf_counter()
        self.plan = NOT_MEASURED
        forward = ForwardPass.of(self.view, self.folding, x)
        inputs = inputs_key(x, forward.count, self.view.in_dim)
        key = Key.of(flags, forward.graph, forward.count, inputs)
        audited = self.audited_plans.get(key)
        several = passes(cotangent, forward.z.detach(), self.view.out_dim)
        first = next(several)
        plan = self._plan_for(forward, key, audited)
        self._warn_of_unregistered(plan)
        norms = self._norms(forward, plan, first, is_unaudited=audited is None)
        table = norms * first.unscaling
        for one in several:
            table = table + self._norms(forward, plan, one) * one.unscaling
        self._refuse_gradients_not_finite(table)
        measured = time.perf_counter()
        self._audit(forward, plan, audited, first, norms, check)
        self.plan = plan if plan is audited else self.audited_plans.put(key, plan)
        if check is None:
            ended = time.perf_counter()
            self.audits.measured += ended - begun
            self.audits.spent += 0.0 if audited is None else ended - measured
        return ChunkNorms(table, {n: plan.route(n) for n in self.parameters})

    # -- plans
    # ----------------------------------------------------------------------------------------------

    def _plan_for(self, forward: ForwardPass, key: Key, audited: Plan | None) -> Plan:
        """Return the audited plan of a batch, unless one has to be made for every batch."""
        if audited is not None:
            forward.carriers = audited.carriers
            every_batch = self.independence.suspicion or self.audits.failed
            if audited.is_fixed and not every_batch:
                audited.classify(forward.graph)
                return audited
        earlier = audited or self._latest_plans.get(key.without_shapes)
        plan = new_plan(forward, key, earlier, self.independence)
        self._latest_plans.put(key.without_shapes, plan)
        if self.ladder.rung == Rung.BY_SAMPLE:
            plan.measure_by_sample(plan.names, self.ladder.reason)
        plan.classify(forward.graph)
        return plan

    def _forget_plans_after(self, sample: int, problem: str) -> None:
        """Forget all plans after an audit has refuted one; from now on, every batch is audited."""
        warn(
            f"an audit failed ({problem}): the model has changed since the last audit that passed, "
            "and results since then may be wrong. It is checked again on this batch"
        )
        self.audits.fail(sample)
        self.forget_plans()

    def forget_plans(self) -> None:
        """Make all plans again."""
        self.audited_plans.clear()
        self._latest_plans.clear()

    # -- norms
    # ----------------------------------------------------------------------------------------------

    def _norms(
        self, forward: ForwardPass, plan: Plan, one: Pass, *, is_unaudited: bool = False
    ) -> Tensor:
        """Return the squared norms [parameters, B] of a batch for one cotangent."""
        hooked = self.view.has_hooked_parameters
        norms: dict[str, Tensor] = {}
        if plan.count == 1:
            with cudnn_as_user_set(self.view.device):
                if is_unaudited or hooked:
                    require_hooks_to_scale(self.view, forward.z, one.v)
                norms = norms_of_one(forward, one.v, retain=one.more)
        else:
            if hooked:
                changed = changed_by_hooks(self.parameters)
                plan.measure_by_sample(changed, "a hook of it changes its gradients")
            by_sample = {n: self.parameters[n] for n in plan.names if n in plan.by_sample}
            if len(by_sample) < len(plan.names):
                with cudnn_as_user_set(self.view.device):
                    norms = sq_norms(
                        forward.graph,
                        forward.z,
                        one.v,
                        plan,
                        is_unaudited=is_unaudited,
                        retain=one.more,
                    )
            if by_sample:
                self._warn_of_loop(plan)
                norms |= norms_by_loop(forward, one.v, by_sample)
        return as_table(norms, self.parameters, one)

    # -- audits
    # ----------------------------------------------------------------------------------------------

    def _audit(
        self,
        forward: ForwardPass,
        plan: Plan,
        audited: Plan | None,
        one: Pass,
        norms: Tensor,
        check: Check,
    ) -> None:
        """Run some samples alone, and compare their outputs and norms.

        Args:
            forward: Forward pass over the batch.
            plan: Plan of the batch.
            audited: Plan of the same key that has passed audits, or None. It may be ``plan``.
            one: Backward pass over the batch.
            norms: Squared norms [parameters, B] of that pass.
            check: Samples that the caller wants audited.

        Raises:
            MeasureAgain: A sample refutes a plan of an earlier batch.
            Refuted: A sample has other norms.
            InteractionError: A sample has another output.
        """
        if plan.count == 1:  # plain autograd has measured the sample alone
            self.audits.passed += len(self.audits.samples(1, check))
            return
        is_unaudited = audited is None
        has_hooks = self.folding.hooks_tensors or self.view.has_hooked_parameters
        samples = self.audits.samples(
            plan.count, check, SAMPLES if is_unaudited else int(has_hooks)
        )
        if not samples:  # then the plan is audited, and nothing has hooks
            return
        tested_for_hooks = samples if has_hooks else samples[: int(is_unaudited)]
        scale = Scale.of(forward.graph.float_dtypes())
        for sample in samples:
            audit = SampleAudit(
                self.view,
                plan,
                forward.batch,
                sample,
                forward.z,
                one,
                norms,
                lambda: forward.batch,
                forward.run_again,
            )
            flags = audit.run(scale if sample in tested_for_hooks else None)
            problem, wrong = audit.problem(*flags.tolist())
            if not problem:
                self.audits.passed += 1
            elif plan is audited:
                self._forget_plans_after(sample, problem)
                raise MeasureAgain
            elif not wrong:
                raise self.independence.interaction_error(forward)
            else:
                blocks = folded_blocks_with(forward.graph, wrong, plan.uses)
                raise Refuted(problem, wrong, plan, blocks)
            if is_unaudited:
                plan.record(audit.deviations())
        if is_unaudited:
            self._check_on_copy(forward, plan)
        if has_hooks or (is_unaudited and forward.graph.has_custom_functions):
            tolerance = norm_tolerance(self.parameters.values(), plan.dtype, self.view.device)
            require_same_among_copies(self.view, forward.batch, forward.z, tolerance)

    def _check_on_copy(self, forward: ForwardPass, plan: Plan) -> None:
        """Measure a few samples on a deep copy, if the model's own numbers hide errors of rules.

        Raises:
            Refuted: The copy was measured on a lower rung.
            MeasureAgain: Rules or folded blocks do not measure some parameters of the copy.
        """
        untested = untested_by_audits(self.view, plan)  # none of a copy
        if untested <= plan.tested_on_copy or self._copies_made >= MOST_COPIES:
            return
        copy = self.measure_on_copy(forward.batch, plan)
        if copy is None:
            plan.notes.append(
                "no deep copy of it runs like the model: it was checked as it is alone"
            )
        elif forward.has_folded and copy.ladder.rung > max(self.ladder.rung, Rung.PLAIN_TORCH):
            raise Refuted(copy.ladder.reason)
        self._copies_made += 1
        plan.tested_on_copy |= untested
        if copy is not None:
            refused, refuted = self.folding.blocks.refused, copy.ladder.refuted_blocks
            more = {name: reason for name, reason in refuted.items() if name not in refused}
            if plan.adopt(copy.plan) or more:
                raise MeasureAgain(more)

    def measure_on_copy(self, batch: Batch, plan: Plan) -> Engine | None:
        """Return the engine of a deep copy in more digits that has measured a few samples.

        The parameters that are all zero are moved in the copy. None: no copy runs like the model.

        Raises:
            InteractionError, RandomForwardError, HiddenParameterError, NonlinearBackwardError: A
                copy cannot be measured, nor can the model.
        """
        samples = batch.part(evenly_spaced(batch.count))
        every, device_type = range(samples.count), self.view.device.type
        for copied, dtype, _ in running_copies(self.view, samples, every):
            copy = Engine(copied)
            try:
                add_noise(zero_parameters(copied.parameters.values()))
                with warnings_ignored(), never_cudnn(), torch.autocast(device_type, enabled=False):
                    copy.run(samples.pick(every, dtype), generic_cotangent)
            except MEANINGLESS:
                raise
            except Exception:  # whatever a copy raises
                continue
            if set(copy.plan.names) >= set(plan.names):
                return copy
        return None

    # -- refusals and warnings
    # ----------------------------------------------------------------------------------------------

    def _refuse_gradients_not_finite(self, table: Tensor) -> None:
        if not float(table.amax()) < math.inf:  # nor is that so of what is not a number
            bad, sample = (~torch.isfinite(table)).nonzero()[0].tolist()
            held = tensors_not_finite(self.view.module)
            why = f": {held[0]} is not finite" if held else ""
            raise NonFiniteError(
                f"the gradient of parameter {list(self.parameters)[bad]} is not finite for sample "
                f"{sample} of the batch{why}"
            )

    def _warn_of_unregistered(self, plan: Plan) -> None:
        """Warn, once, of tensors that move the output and are not counted."""
        if plan.unregistered and "others" not in self._warned:
            self._warned.add("others")
            warn(
                f"{len(plan.unregistered)} tensors ({few(plan.unregistered)}) require grad and "
                "move the output, but are not parameters of the model: they are not counted. "
                "Register them as parameters if they should be"
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


def as_table(norms: Mapping[str, Tensor], names: Iterable[str], one: Pass) -> Tensor:
    """Return squared norms as a table [parameters, B]; those of unused parameters are zero."""
    like = one.unscaling
    return torch.stack([norms[n] if n in norms else torch.zeros_like(like) for n in names])
