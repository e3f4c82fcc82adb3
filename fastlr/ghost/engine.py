"""The engine: a plan for each structure and shape, then one forward and backward pass a batch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from fastlr.errors import (
    InputError,
    ModelError,
    NonFiniteError,
    RandomForwardError,
    few,
    first_line,
    warn,
)
from fastlr.ghost.auditor import (
    SampleAudit,
    Scale,
    changed_by_hooks,
    require_hooks_to_scale,
    require_same_among_copies,
)
from fastlr.ghost.backward import Rerouted, sq_norms
from fastlr.ghost.batch import (
    Batch,
    along,
    copied,
    input_shapes,
    shared_key,
    times_written,
)
from fastlr.ghost.copy_checks import check_on_copy
from fastlr.ghost.cotangents import Cotangent, Pass, generic_cotangent, passes
from fastlr.ghost.fusion.conv_bn import FoldRefuted, parameters_of, refuse_blocks
from fastlr.ghost.fusion.mode import OURS, Folding, unfolded
from fastlr.ghost.graph import OWN, Graph, autocast_dtype, walk
from fastlr.ghost.known import Key, Known, KnownFlags, Plan
from fastlr.ghost.model_caches import caches_of
from fastlr.ghost.model_io import ModelView, require_graph
from fastlr.ghost.norms import (
    norms_by_loop,
    norms_by_rules,
    norms_of_one,
)
from fastlr.ghost.planner import (
    Chunk,
    batch_of,
    compared,
    interaction,
    plan_of,
)
from fastlr.ghost.refusals import refusals
from fastlr.ghost.sample_axis import Unsupported
from fastlr.ghost.state import emptied
from fastlr.ghost.verification.audit import SAMPLES, Audits, Check, Disproved, Draw
from fastlr.ghost.verification.record import Ledger
from fastlr.ghost.writes import passes_write, unchanged
from fastlr.ops.compiled_parts import uncompiled
from fastlr.ops.cudnn import cudnn_as_user_set, without_cudnn
from fastlr.ops.deferred_checks import out_of_memory, refuse_beyond
from fastlr.ops.modules import all_modules
from fastlr.ops.process_state import quiet_rng
from fastlr.ops.torch_private import anything_compiled

MOST_REFUTED = 3  # times that a batch is measured again after an audit has failed


@dataclass(eq=False)
class ChunkNorms:
    """Per-sample squared gradient norms of one call.

    Attributes:
        names: of the parameters.
        table: squared norms [parameters, B], float64.
        routes: How each parameter was measured ("rule": by the walk; "node": by the node's own
            formula, sample by sample; "loop": one pass a sample; "zero": not used).
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
        model: Any nn.Module, taken as it is (train or eval), or a view of one that says where its
            samples are.
        is_copy: Whether it is a deep copy, made to check another model.

    Attributes:
        view: Model.
        known: Plans, and what was found of the model.
        audits: Counts of audits, and when the next is due.
        folding: Parts of the model that run otherwise than it says.

    Raises:
        ModelError: no trainable parameters, or ones that cannot be measured.
    """

    def __init__(self, model: nn.Module | ModelView, *, is_copy: bool = False) -> None:
        self.is_copy = is_copy
        self.view = model if isinstance(model, ModelView) else ModelView.of(model)
        self.known, self.audits, self.folding = Known(), Audits(), Folding()
        self._current = KnownFlags(())  # what is known with the flags of the last call
        self._plan: Plan | None = None  # of the last call
        self._writes_inputs: bool | None = None  # None: not known yet
        self._warned: set[str] = set()

    @property
    def model(self) -> nn.Module:
        """The unwrapped model; ModelError once it no longer exists."""
        return self.view.module

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters by name, as the last call found them."""
        return self.view.parameters

    @property
    def ledger(self) -> Ledger:
        """Routes of the parameters for the model as the last call found it."""
        return self._current.ledger

    def _flags(self) -> tuple:
        """Return the model's flags of now (see fastlr.ghost.known)."""
        modes = tuple([m.training for m in all_modules(self.model)])
        dtypes = tuple([(name, p.dtype) for name, p in self.parameters.items()])
        return modes, dtypes, autocast_dtype(self.view.device)

    def without_caches(self, x: Any) -> AbstractContextManager[None]:
        """Run the model within this context without what earlier forward passes have left in it."""
        return emptied(caches_of(self.view, self.known, self._flags, x))

    def run(self, x: Any, cotangent: Cotangent, check: Check = None) -> ChunkNorms:
        """Return the squared norms of the gradient of <cotangent, output> for each sample.

        Args:
            x: a tensor, a tuple (positional) or a dict (keywords).
            cotangent: a tensor shaped like the output, a function of the detached output that gives
                one, or one that gives several: then the squared norms of all passes are summed. Any
                scale and floating-point dtype.
            check: Samples to audit: a `Draw`, one at random (True) or none (False). None: one as
                often as costs at most 3 % of the time. A new plan is always audited.

        Raises:
            InputError, ModelError and its kinds: see fastlr.errors.
        """
        nothing_was_compiled = not anything_compiled()
        try:
            return self._run(x, cotangent, check)
        except Exception:
            the_pass_has_compiled = nothing_was_compiled and anything_compiled()
            if not the_pass_has_compiled:
                raise
        # torch's compiler cannot take fastlr's modes in; from now on it is kept out (`uncompiled`).
        return self._run(x, cotangent, check)

    def _run(self, x: Any, cotangent: Cotangent, check: Check) -> ChunkNorms:
        """Make a `run`, in which torch may compile something for the first time."""
        self.view = self.view.renewed()
        x = self.view.inputs(x)
        blocks = self.folding.blocks
        reason_before = blocks.why_no_call_is_replaced
        with (
            torch.inference_mode(False),
            quiet_rng(self.view.device),
            without_cudnn(self.view.device, self.parameters.values()),
            unchanged(self.model),
            uncompiled(),  # checkpoints run compiled parts again in the backward pass
        ):
            try:
                with refusals(self.view, x), self.without_caches(x):
                    return self._run_with_less_folded_where_it_fails(x, cotangent, check)
            except Exception:
                blocks.why_no_call_is_replaced = reason_before  # it was not the folding's fault
                raise

    def inputs_with_samples(self, x: Any) -> tuple[int, list[int]]:
        """Return the number of samples in the last call, and the places of inputs that carry them.

        The places are those among its flattened inputs ``x``; the others are shared by all samples.
        """
        plan = self._plan
        assert plan is not None  # there was a call
        known = plan.flags.inputs_with_samples.get(plan.key.of_inputs(x))
        return plan.count, along(x, plan.count, self.view.in_dim) if known is None else known

    # -- again, where a pass has found something out
    # ----------------------------------------------------------------------------------------------

    def _run_with_less_folded_where_it_fails(
        self, x: Any, cotangent: Cotangent, check: Check
    ) -> ChunkNorms:
        """Run a batch; whatever the model raises may be the folding's fault.

        Then only convolutions and norms are folded; where that fails, too, nothing is. Where
        nothing is and it fails all the same, the folding was not to blame.
        """
        blocks = self.folding.blocks
        try:
            return self._run_until_it_holds(x, cotangent, check)
        except Exception as error:
            if not self._may_be_the_foldings_fault(error):
                raise
            reason = f"{type(error).__name__}: {first_line(error)[:200]}"
        # Outside the handler, so that its traceback frees the memory of what failed.
        if blocks.replaces_calls:
            blocks.replace_no_calls(reason)
            return self._run_with_less_folded_where_it_fails(x, cotangent, check)
        with unfolded():
            result = self._run_until_it_holds(x, cotangent, check)
        blocks.fold_nothing(reason)
        return result

    def _may_be_the_foldings_fault(self, error: Exception) -> bool:
        """Return True if the model might not raise the error if it ran as it says."""
        of_the_call = isinstance(error, (InputError, NonFiniteError, CheckpointError))
        could_be = self.folding.blocks.may_have_changed_the_pass
        return could_be and not of_the_call and not out_of_memory(error)

    def _run_until_it_holds(self, x: Any, cotangent: Cotangent, check: Check) -> ChunkNorms:
        """Run a batch, and again where a pass has found out something that changes the next."""
        refuted = 0
        while True:
            try:
                return self._run_once(x, cotangent, check)
            except Rerouted:
                assert self.ledger.rules_given_up, "the next pass would be rerouted like this one"
            except Disproved as failure:
                refuted += 1
                if refuted > MOST_REFUTED:
                    raise ModelError(
                        f"audits refute what was measured in each of {refuted} attempts, although "
                        f"the plan was made again before each ({failure})"
                    ) from failure
                self._distrust(failure)
            except FoldRefuted as wrong:
                self._fold_less(wrong)
            except (Unsupported, CheckpointError) as error:  # not even nodes' own formulas apply
                if self.ledger.loop.issuperset(self.parameters):
                    raise
                by = "activation checkpointing: " * isinstance(error, CheckpointError)
                self.ledger.to_loop(self.parameters, f"{by}{first_line(error)}")

    def _fold_less(self, refuted: FoldRefuted) -> None:
        """Leave what did not give the exact norms unfolded from now on."""
        if refuted.weights:
            self.folding.blocks.refuse_blocks(refuted.weights, refuted.reason)
        else:
            self.folding.blocks.fold_nothing(refuted.reason)

    def _distrust(self, failure: Disproved) -> None:
        """Have all plans made again, as a sample refutes an earlier one.

        From now on every batch is audited.
        """
        self.audits.fail(failure)
        self.distrust()
        warn(
            f"an audit failed ({failure}): the model has changed since the last audit that passed, "
            "and results since then may be wrong. It is checked again on this batch"
        )

    def distrust(self) -> None:
        """Have all plans made again, as an audit has found the model changed.

        From now on every batch is audited.
        """
        self.audits.failed = max(1, self.audits.failed)
        self.known.by_flags.drop(self._current.flags)
        self._current = KnownFlags(())

    def by_loop_from_now_on(self, names: Iterable[str]) -> None:
        """Measure these parameters by the loop, as another process does."""
        self.ledger.to_loop(set(names) - self.ledger.loop, "so on another rank")

    # -- one pass over a batch
    # ----------------------------------------------------------------------------------------------

    def _run_once(self, x: Any, cotangent: Cotangent, check: Check) -> ChunkNorms:
        """Return the norms of a batch: find its plan, measure, audit."""
        begun = time.perf_counter()
        self._plan = None
        chunk = self._chunk_of(x)
        several = passes(cotangent, chunk.z.detach(), self.view.out_dim)
        first = next(several)
        look = self.audits.failed > 0
        plan = plan_of(chunk, look=look)
        if passes_write() and (look or plan.is_new or plan.shapes.reason_to_look):
            self._forward_again(chunk, plan)  # other passes have run since
        norms = self._norms(chunk, plan, first)
        table = norms * first.unscaling
        for one in several:
            table = table + self._norms(chunk, plan, one) * one.unscaling
        self._refuse_gradients_not_finite(table)
        if self._audit(chunk, plan, first, norms, check):
            return self._run_once(x, cotangent, check)  # what was wrong goes by a slower route now
        has_own_functions = any(kind.startswith(OWN) for kind in chunk.graph.names)
        if self._hooks_gradients() or (plan.is_new and has_own_functions):
            require_same_among_copies(self.view, chunk.ledger, batch_of(chunk), chunk.z)
        plan.keep()
        self._plan = plan
        if check is None:
            self.audits.measured(time.perf_counter() - begun)
        return ChunkNorms(list(self.parameters), table, self._routes(chunk.graph))

    def _chunk_of(self, x: Any) -> Chunk:
        """Run the model forward and walk the graph of its output."""
        self._current = known = self._known_of_flags()
        z = self._output(x, known)
        count = self.view.sample_count(z)
        shared_inputs = shared_key(x, along(x, count, self.view.in_dim))
        _refuse_output_not_finite(z)
        require_graph(z)
        graph = walk(z, self.parameters)
        self._warn_of_others(graph)
        key = Key.of(graph, count, shared_inputs)
        return Chunk(self.view, self.folding, self.known, known, x, z, count, graph, key)

    def _forward_again(self, chunk: Chunk, plan: Plan) -> None:
        """Run a batch again, as its backward pass may read what other passes have written since."""
        chunk.z = self._output(chunk.x, chunk.flags)
        chunk.graph = walk(chunk.z, self.parameters)
        if chunk.graph.signature() != plan.key.structure:
            raise RandomForwardError(
                "two forward passes on the same inputs have other graphs: the model draws at "
                "random, or a pass changes what the next one does"
            )
        plan.structure.classify(chunk.graph)

    def _known_of_flags(self) -> KnownFlags:
        """Return what is known of the model with its flags of now."""
        flags = self._flags()
        known = self.known.by_flags.get(flags)
        return self.known.by_flags.put(flags, KnownFlags(flags)) if known is None else known

    def _output(self, x: Any, known: KnownFlags) -> Tensor:
        """Return the output for a batch; one sample runs unfolded.

        Its norms are not compared with anything: they are the model's own.
        """
        shapes = input_shapes(x)
        if shapes in known.shapes_of_one_sample:
            return self._forward_unfolded(x)
        z = self._forward(x)
        nothing_to_compare_norms_with = self.view.sample_count(z) == 1
        if nothing_to_compare_norms_with and (self.folding.blocks.has_folded or passes_write()):
            known.shapes_of_one_sample.put(shapes, True)
            return self._forward_unfolded(x)
        return z

    def _forward_unfolded(self, x: Any) -> Tensor:
        """Run the model as it says."""
        with unfolded():
            return self._forward(x)

    def _forward(self, x: Any) -> Tensor:
        """Run the model folded, on copies of the inputs unless it is known to write to none."""
        is_known_to_write_none = self._writes_inputs is False
        given = x if is_known_to_write_none else copied(x)
        before, known_to_write = times_written(given), passes_write()
        with cudnn_as_user_set(self.view.device):
            z = self.folding.run(self.view.named, lambda: self.view.forward(given), given)
        if passes_write() and not known_to_write:
            return self._forward(x)  # this graph has no copies of what the pass has written
        written = times_written(given) != before
        if written and is_known_to_write_none:
            self._writes_inputs = True
            raise InputError(
                "the model has written to its inputs, as it had not before: they are changed; "
                "pass them again"
            )
        self._writes_inputs = written or bool(self._writes_inputs)
        return z

    def _norms(self, chunk: Chunk, plan: Plan, one: Pass) -> Tensor:
        """Return the squared norms [parameters, B] of a batch for one cotangent.

        They are by rules where they hold, by the loop over samples elsewhere.
        """
        if not chunk.needs_rules:
            require_hooks_to_scale(self.view, chunk.z, one.v, always=plan.is_new)
            return self._table(norms_of_one(chunk, one.v, retain=one.more), one)
        if self.view.has_hooked_parameters:
            self._send_hooked_to_loop(chunk)
        by_loop = chunk.ledger.loop
        norms = norms_by_rules(chunk, plan, one.v, skip=by_loop, retain=one.more)
        by_loop = by_loop.intersection(chunk.graph.parameters.values())
        if by_loop:
            self._warn_of_loop(by_loop)
            chosen = {name: p for name, p in self.parameters.items() if name in by_loop}
            norms |= norms_by_loop(chunk, one.v, chosen)
        return self._table(norms, one)

    def _send_hooked_to_loop(self, chunk: Chunk) -> None:
        """Have the loop measure the parameters whose hooks change their gradients."""
        measured_by_rules = set(chunk.graph.parameters.values()) - chunk.ledger.loop
        changed = changed_by_hooks({name: self.parameters[name] for name in measured_by_rules})
        chunk.ledger.to_loop(changed, "a hook of it changes its gradients")

    def _table(self, norms: dict[str, Tensor], one: Pass) -> Tensor:
        """Return squared norms [parameters, B] in the order of ``parameters``.

        They are zero where there are none.
        """
        zero = torch.zeros_like(one.unscaling)
        return torch.stack([norms.get(name, zero) for name in self.parameters])

    def _audit(self, chunk: Chunk, plan: Plan, one: Pass, norms: Tensor, check: Check) -> bool:
        """Run some samples alone; return True if a new plan has to be made for them.

        Raises:
            Disproved: A sample refutes an older plan, which is made again.
            FoldRefuted: A sample gives another output or norms because of the folding.
            InteractionError: A sample gives another output.
        """
        if not chunk.needs_rules:  # plain autograd has measured the sample alone
            self.audits.passed += isinstance(check, Draw) and any(check)
            return False
        at_least = SAMPLES if plan.is_new else int(self._hooks_gradients())
        samples = self.audits.samples(chunk.count, check, at_least)
        if not samples:
            return False
        with nullcontext() if plan.is_new or check is not None else self.audits.timed():
            wrong: dict[str, str] = {}
            for sample in samples:
                scales = self._hooks_gradients() or (plan.is_new and sample == samples[0])
                scale = Scale.of(chunk.graph.float_dtypes()) if scales else None
                wrong |= self._audit_of_sample(chunk, plan, sample, one, norms, scale)
        if wrong:
            _refuse_blocks_with(chunk.graph, wrong)
            for name, reason in wrong.items():
                chunk.ledger.step_down(name, reason)
        elif plan.is_new and not self.is_copy:
            check_on_copy(chunk, plan, measured_by_new_engine)
        return bool(wrong)

    def _audit_of_sample(
        self,
        chunk: Chunk,
        plan: Plan,
        sample: int,
        one: Pass,
        norms: Tensor,
        scale: Scale | None,
    ) -> dict[str, str]:
        """Return the parameters whose norms are wrong for a sample, and why."""
        batch, view = batch_of(chunk), self.view
        measured = batch, sample, chunk.z.detach(), one, norms
        again = lambda: batch, partial(self._forward, chunk.x)
        audit = SampleAudit(view, chunk.ledger, *measured, *again)
        may_differ, may_be_wrong = audit.run(scale, view.row(one.v, sample)).tolist()
        if may_differ and not audit.has_its_output():
            self._refuse_output_alone(chunk, plan, sample)
        off = audit.refuted() if may_be_wrong else {}
        self.audits.passed += not off
        if off and not plan.is_new:
            worst = max(off, key=lambda name: off[name])
            raise Disproved(
                sample,
                f"the norm of {worst} for sample {sample} is off by {off[worst]:.1e} of its total",
            )
        if plan.is_new:
            for name, deviation in audit.deviations().items():
                chunk.ledger.enter_audit(name, deviation)
        return {name: f"audit of a sample: off by {off[name]:.1e} of its total" for name in off}

    def _hooks_gradients(self) -> bool:
        """Return True if hooks may change gradients, which no graph shows."""
        return self.folding.hooks_tensors or self.view.has_hooked_parameters

    def _refuse_output_alone(self, chunk: Chunk, plan: Plan, sample: int) -> None:
        """Raise the error for a sample that gives another output alone than in its batch."""
        if not plan.is_new:
            raise Disproved(
                sample,
                f"sample {sample} alone gives another output than within its batch of "
                f"{chunk.count}",
            )
        raise interaction(chunk, compared(chunk))

    def _routes(self, graph: Graph) -> dict[str, str]:
        """Return the route of each parameter: "zero" for one that no output has used.

        The ledger does not have those of a sample that autograd has measured alone.
        """
        entries = self.ledger.parameters.items()
        routes = dict.fromkeys(self.parameters, "zero")
        routes |= dict.fromkeys(graph.parameters.values(), "loop")
        return routes | {name: entry.route for name, entry in entries if entry.route != "zero"}

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

    def _warn_of_loop(self, by_loop: Iterable[str]) -> None:
        """Warn, once of each, of parameters that are measured by the loop."""
        names = [n for n in self.parameters if n in by_loop and n not in self._warned]
        if names:
            self._warned.update(names)
            warn(
                f"{len(names)} parameters ({few(names, 3)}) are measured by an exact loop "
                f"over samples, which is slow: {self.ledger.parameters[names[0]].reason}"
            )

    # -- batches like an earlier one, in a CUDA graph
    # ----------------------------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """Return the last call's plan, for `run_without_waiting_for_device`.

        None if that is not `replayable`.
        """
        plan = self._plan
        return plan if plan is not None and self.replayable(plan) else None

    def replayable(self, plan: Plan) -> bool:
        """Return True if batches like that of an earlier call may be run by its plan alone.

        So they may where all goes by rules, and nothing has to be looked at.
        """
        if self.audits.failed or self.view.has_hooked_parameters:
            return False
        entries = plan.flags.ledger.parameters.values()
        by_rules = all(entry.route in ("zero", "rule") for entry in entries)
        samples_are_known = bool(plan.shapes.layouts) and not plan.shapes.reason_to_look
        return plan.count > 1 and by_rules and samples_are_known

    def run_without_waiting_for_device(
        self, plan: Plan, x: Any, cotangent: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Run an earlier call's passes for inputs of the same shapes.

        No check waits for the device.

        Returns:
            (squared norms [parameters, B] in the order of ``parameters``, float64; the output).

        Raises:
            Rerouted: the graph is not the planned one.
        """
        with torch.inference_mode(False):
            z = self._forward(x)
            _refuse_output_not_finite(z)
            graph = walk(z, self.parameters)
            if graph.signature() != plan.key.structure:
                raise Rerouted
            plan.structure.classify(graph)
            (one,) = passes(cotangent, z.detach(), self.view.out_dim)
            uses, routes = plan.structure.uses, plan.flags.ledger.routes()
            layouts = plan.shapes.layouts
            with cudnn_as_user_set(self.view.device):
                norms = sq_norms(graph, uses, z, one.v, layouts, plan.count, routes)
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
        carriers = plan.flags.inputs_with_samples.get(plan.key.of_inputs(x))

        def whole(x: Any) -> Batch:
            return self.view.batch(x, plan.count, carriers)

        measured = whole(x), sample, output, one, table / one.unscaling
        again_now = lambda: whole(again()), lambda: self._forward(again())
        return SampleAudit(self.view, plan.flags.ledger, *measured, *again_now)


def _refuse_output_not_finite(z: Tensor) -> None:
    """Refuse an output that is not finite.

    Minus infinity is allowed: it is a logit that classes may have.
    """
    if z.numel():
        refuse_beyond(
            z.detach().amax(),
            lambda: NonFiniteError(
                "the model's output has infinite values or values that are not a number"
            ),
        )


def _refuse_blocks_with(graph: Graph, names: Collection[str]) -> None:
    """Raise FoldRefuted of the folded blocks that have some of these parameters."""
    blocks = [parameters_of(graph, i) for i, kind in enumerate(graph.names) if kind in OURS]
    wrong = [block for block in blocks if not set(block).isdisjoint(names)]
    if wrong:
        refuse_blocks(wrong, "its norms differ from the exact ones")


def measured_by_new_engine(copy: ModelView, x: Any) -> Ledger:
    """Measure inputs of a deep copy, and return the routes of its parameters."""
    engine = Engine(copy, is_copy=True)
    engine.run(x, generic_cotangent)
    return engine.ledger
