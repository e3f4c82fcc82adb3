"""The engine: plan once, prove once, then one forward and one backward pass a chunk."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from fastlr.errors import FastlrWarning, InputError, NonFiniteError, few, first_line
from fastlr.ghost import program
from fastlr.ghost.auditor import SampleAudit, audited, begin_audit, closeness, forward_of
from fastlr.ghost.backward import Rerouted, sq_norms
from fastlr.ghost.batch import along, copied, times_written
from fastlr.ghost.cotangents import Cotangent, passes
from fastlr.ghost.fusion.conv_bn import FoldRefuted
from fastlr.ghost.fusion.mode import Folding, unfolded
from fastlr.ghost.graph import exact_grads, walk
from fastlr.ghost.known import Key, Known, KnownFlags, Plan
from fastlr.ghost.model_caches import caches_of
from fastlr.ghost.model_io import ModelView, require_graph
from fastlr.ghost.planner import Chunk, batch_of, input_shapes, proven, shape_plan
from fastlr.ghost.process_state import quiet_rng
from fastlr.ghost.refusals import refusals
from fastlr.ghost.state import BufferKeeper, emptied
from fastlr.ghost.surroundings import refuse_surroundings
from fastlr.ghost.verification.agreement import norms_agree
from fastlr.ghost.verification.audit import Audits, Disproved
from fastlr.ghost.verification.prover import generic_cotangent
from fastlr.ghost.verification.record import Ledger, ParameterProof
from fastlr.ops.deferred_checks import out_of_memory, refuse_beyond
from fastlr.ops.model_lock import all_modules
from fastlr.ops.torch_private import tree_flatten


@dataclass(eq=False)
class ChunkNorms:
    """Per-sample squared gradient norms of one call.

    Attributes:
        names: of the parameters.
        table: squared norms [parameters, B], float64.
        routes: how each parameter was done ("rule": by the walk; "node": by the node's own formula,
            sample by sample; "loop": one pass a sample; "zero": not used).
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
    """Per-sample squared gradient norms of a model, planned and proven once.

    Args:
        model: any nn.Module, taken as it is (train or eval), or a view of one that says where its
            samples are.

    Attributes:
        view: the model.
        known: what was proven and found of it.
        audits: how many were right, how many were not, and when the next is due.
        folding: what of the model runs otherwise than it says.
        peaks: by kind of input and precision, the memory that one takes at a chunk's peak, and how
            many fitted; as measured.

    Raises:
        ModelError: no trainable parameters, or ones that cannot be measured.
    """

    def __init__(self, model: nn.Module | ModelView) -> None:
        self.view = model if isinstance(model, ModelView) else ModelView.of(model)
        self.known, self.audits, self.folding = Known(), Audits(), Folding()
        self._current = KnownFlags(())  # what is known with the flags of the last call
        self._plan: Plan | None = None  # of the last call
        self._writes_inputs: bool | None = None  # None: not known yet
        self._warned: set[str] = set()
        self._buffers = BufferKeeper()
        self.peaks: dict[tuple, tuple[int, int]] = {}

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
        """The proofs for the model as the last call found it."""
        return self._current.ledger

    @property
    def proofs(self) -> int:
        """How many proofs were made of the model."""
        return self.known.proofs

    @property
    def comparisons(self) -> int:
        """How many batches' outputs were compared with those of their parts."""
        return self.known.comparisons

    @property
    def _hooked_parameters(self) -> bool:
        """Return True if hooks of parameters may change their gradients.

        Rules do not take such hooks.
        """
        return any(p._backward_hooks for p in self.parameters.values())

    def _flags(self) -> tuple:
        model, kind = self.model, self.view.device.type
        return (
            tuple([m.training for m in all_modules(model)]),
            tuple((n, p.dtype) for n, p in self.parameters.items()),
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
            program.hook_programs(model),
        )

    def without_caches(self, x: Any) -> AbstractContextManager[None]:
        """Run the model within this context without what earlier forward passes have left in it."""
        return emptied(caches_of(self.view, self.known, self._flags(), x))

    def run(self, x: Any, cotangent: Cotangent) -> ChunkNorms:
        """Per-sample squared norms of the gradient of <cotangent, output> for each sample.

        Args:
            x: a tensor, a tuple (positional) or a dict (keywords).
            cotangent: a tensor shaped like the output, a function of the detached output that gives
                one, or one that gives several: then the squared norms of all passes are summed. Any
                scale and floating-point dtype.

        Raises:
            InputError, ModelError and its kinds: see fastlr.errors.
        """
        self.view = self.view.renewed()
        refuse_surroundings(self.parameters.values())
        device = self.view.device
        x = self.view.inputs(x)
        literal = self.folding.literal
        modules = all_modules(self.model)
        kept = self._buffers.kept(modules, unseen=any(m.training for m in modules))
        with torch.inference_mode(False), quiet_rng(device), kept:
            try:
                with refusals(self.view, x), self.without_caches(x):
                    return self._attempt(x, cotangent)
            except Exception:
                self.folding.literal = literal  # it was not the folding's fault
                raise

    def _attempt(self, x: Any, cotangent: Cotangent) -> ChunkNorms:
        """Run a batch, and again where a pass has found out something that changes the next.

        That may be a rule that does not apply, checkpoints that only the loop gets right, a proof
        that no longer holds, or a part of the model that must not be folded. Whatever else the
        model raises may be the folding's fault: then less is folded.
        """
        while True:
            try:
                return self._run(x, cotangent)
            except Rerouted:
                continue
            except CheckpointError as error:
                if all(name in self.ledger.loop for name in self.parameters):
                    raise
                reason = f"activation checkpointing: {first_line(error)}"
                self.ledger.to_loop(self.parameters, reason)
                continue
            except Disproved as failure:
                self._distrust(failure)
                continue
            except FoldRefuted as error:
                if error.names:
                    self.folding.give_up(error.names, error.reason)
                else:
                    self.folding.disable(error.reason)
                continue
            except (InputError, NonFiniteError):
                raise
            except Exception as error:
                if not (self.folding.active or self.folding.seen) or out_of_memory(error):
                    raise
                reason = f"{type(error).__name__}: {first_line(error)[:200]}"
            if self.folding.replaced and not self.folding.literal:
                # They are an earlier call's, where literal.
                self.folding.give_up([], reason)
                continue
            with unfolded():  # it is the folding's fault if it does not happen without
                result = self._run(x, cotangent)
            self.folding.give_up([], reason)
            return result

    def distrust(self) -> None:
        """Prove the model anew, as another process has found it changed.

        From now on every batch is looked at.
        """
        self._forget()
        self.audits.failed = max(1, self.audits.failed)

    def _forget(self) -> None:
        """Drop what is known of the model with the flags of the last call, at all levels."""
        self.known.forget(self._current.flags)
        self._current = KnownFlags(())

    def by_loop_from_now_on(self, names: Iterable[str]) -> None:
        """Measure these parameters by the loop, as another process does."""
        for name in names:
            proof = self.ledger.parameters.get(name)
            if proof is None or proof.route != "loop":
                self.ledger.parameters[name] = ParameterProof(
                    "loop", alive=True, reason="so on another rank"
                )

    def _distrust(self, failure: Disproved) -> None:
        """Prove the model anew, as a sample refutes what was proven earlier.

        From now on every batch is looked at.
        """
        self.audits.fail(failure)
        self._forget()
        warnings.warn(
            f"an audit found what was proven of the model no longer true ({failure}): something "
            "that it depends on has changed unseen. It is proven anew for this batch; results "
            "since the last audit that passed may be wrong",
            FastlrWarning,
            stacklevel=5,
        )

    def prove(self, x: Any) -> Ledger:
        """Plan and prove for these inputs, with a random cotangent, and return what was found."""
        self.run(x, generic_cotangent)
        return self.ledger

    # -- one call
    # ----------------------------------------------------------------------------------------------

    def _run(self, x: Any, cotangent: Cotangent) -> ChunkNorms:
        """Return the norms of a batch: find what is known of it, measure, audit."""
        begun = time.perf_counter()
        if not self.view.in_memory and self.known.of_flags(self._flags()) is None:
            # The proof, without this batch's graph beside it.
            with self.view.structure_only():
                unproven = self._chunk(x)
            proven(unproven)
        chunk = self._chunk(x)
        self._plan = None
        output = chunk.z.detach()
        several = passes(cotangent, output, self.view.out_dim)
        v, scale, more = next(several)
        structure = proven(chunk)
        fresh = chunk.key.plan not in structure.plans
        look = self.audits.failed > 0
        shapes = shape_plan(chunk, structure, look=look)
        plan = Plan(chunk.flags, structure, shapes, chunk.key)
        audit: SampleAudit | None = None
        hooked = chunk.flags.hooked or self._hooked_parameters
        if chunk.count > 1 and self.audits.due(fresh=fresh or hooked):
            with self.audits.timed():
                audit = begin_audit(chunk, self.audits.draw(chunk.count), v, fresh=fresh)
        norms = self._norms(chunk, plan, v, audit, retain=more, fresh=fresh)
        table = self._table(norms, output.device, chunk.count) * scale
        while more:
            v, scale, more = next(several)
            norms = self._norms(chunk, plan, v, None, retain=more, fresh=fresh)
            table = table + self._table(norms, output.device, chunk.count) * scale
        self._plan = plan
        result = self._result(table)
        self.audits.measured(time.perf_counter() - begun)
        return result

    def _chunk(self, x: Any) -> Chunk:
        """Run the model forward and walk the graph."""
        self._current = known = self._known_flags(x)
        program_now = program.fingerprint(self.model, known.statistics)
        sizes = input_shapes(x)
        with unfolded() if known.one_sample.get(sizes) else nullcontext():
            z = self._forward(x)
        count = self.view.sample_count(z)
        if count == 1 and self.folding.active:
            # Its norms are not compared with anything: they are the model's own.
            known.one_sample.put(sizes, True)
            with unfolded():
                z = self._forward(x)
        batched = along(x, count, self.view.in_dim)
        seen = program_now, program.inputs_token(x, batched)
        _finite(z)
        require_graph(z)
        graph = walk(z, self.parameters)
        if graph.others and "others" not in self._warned:
            self._warned.add("others")
            shapes = ", ".join(str(tuple(graph.nodes[i].variable.shape)) for i in graph.others[:4])
            warnings.warn(
                f"{len(graph.others)} tensors of shapes {shapes} require grad and move the output, "
                "but are not parameters of the model: they are not counted. Register them as "
                "parameters if they should be",
                FastlrWarning,
                stacklevel=5,
            )
        key = Key.of(graph, count, seen)
        return Chunk(self.view, self.folding, self.known, known, x, z, count, graph, key)

    def _known_flags(self, x: Any) -> KnownFlags:
        """Return what is known of the model with its flags of now.

        The first time a forward pass is watched for what its graph does not show.
        """
        flags = self._flags()
        known = self.known.of_flags(flags)
        if known is None:
            given = copied(x)
            watched = program.observed(self.model, lambda: self.view.forward(given))
            known = self.known.enter(KnownFlags(flags, *watched))
        return known

    def _forward(self, x: Any) -> Tensor:
        given = copied(x) if self._writes_inputs is not False else x
        before = times_written(given)
        z = self.folding.run(self.view.named, lambda: self.view.forward(given), given)
        written = times_written(given) != before
        if written and self._writes_inputs is False:
            self._writes_inputs = True
            raise InputError(
                "the model has written to its inputs, as it had not before: they are changed; "
                "pass them again"
            )
        self._writes_inputs = written or bool(self._writes_inputs)
        return z

    def plan(self) -> Plan | None:
        """Return the last call's plan, for `run_planned`, or None if that is not `replayable`."""
        plan = self._plan
        return plan if plan is not None and self.replayable(plan) else None

    def replayable(self, plan: Plan) -> bool:
        """Return True if batches like that of an earlier call may be run by its plan alone.

        So they may where all goes by rules that were proven, and nothing has to be looked at.
        """
        proofs = plan.flags.ledger.parameters.values()
        proven = all(p.route == "zero" or (p.route == "rule" and p.alive) for p in proofs)
        by_graph = bool(plan.shapes.layouts) and not plan.shapes.by_data
        if self.audits.failed or self._hooked_parameters or plan.structure.by_loop:
            return False
        return plan.count > 1 and proven and by_graph

    def run_planned(
        self, plan: Plan, x: Any, cotangent: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Run an earlier call's passes for inputs of the same shapes.

        No check waits for the device.

        Returns:
            (squared norms [parameters, B] in the order of ``parameters``, float64; the output).

        Raises:
            Rerouted: the graph is not the planned one.
        """
        count = plan.count
        with torch.inference_mode(False):
            z = self._forward(x)
            output = _finite(z)
            graph = walk(z, self.parameters)
            if graph.signature() != plan.key.structure:
                raise Rerouted
            plan.structure.classify(graph)
            ((v, scale, _),) = passes(cotangent, output, self.view.out_dim)
            routes = plan.flags.ledger.routes()
            norms = sq_norms(graph, plan.structure.uses, z, v, plan.shapes.layouts, count, routes)
            table = self._table(norms, z.device, count) * scale
        refuse_beyond(table, lambda: NonFiniteError("the gradient of a parameter is not finite"))
        return table, output

    def audit(
        self, plan: Plan, x: Any, output: Tensor, table: Tensor, cotangent: Cotangent
    ) -> bool:
        """Return True if a random sample of a batch has its own output and norms.

        The batch is one that `run_planned` did.

        Args:
            plan: of the batch.
            x: inputs.
            output: the output for them.
            table: squared norms [parameters, B].
            cotangent: as then.
        """
        self._current = plan.flags
        with torch.inference_mode(False), self.audits.timed():
            ((v, scale, _),) = passes(cotangent, output, self.view.out_dim)
            batch = self.view.batch(x, self.view.sample_count(output))
            sample = self.audits.draw(batch.count)
            audit = SampleAudit(self.view, self.ledger, batch, sample, v)
            of_sample = table[:, sample] / scale[sample]
            norms = dict(zip(self.parameters, of_sample, strict=True))
            right = audit.has_its_output(output) and not audit.refuted(
                norms, lambda: self._forward(x)
            )
        self.audits.passed += right
        return right

    def _norms(
        self,
        chunk: Chunk,
        plan: Plan,
        v: Tensor,
        audit: SampleAudit | None,
        *,
        retain: bool,
        fresh: bool,
    ) -> dict[str, Tensor]:
        """Return the squared norms [B] of each parameter for one cotangent.

        By rules where they hold, by the loop over samples elsewhere.
        """
        if chunk.count == 1:
            return self._norms_of_one(chunk, v, retain=retain)
        ledger = chunk.ledger
        present = set(chunk.graph.parameters.values())
        loop = plan.structure.by_loop | ledger.loop
        norms = self._by_rules(chunk, plan, v, loop, retain=retain) if present - loop else {}
        if audit is not None:
            wrong = audited(audit, norms, lambda: self._forward(chunk.x), fresh=fresh)
            self.audits.passed += not wrong
            for name, reason in wrong.items():
                ledger.parameters[name].route, ledger.parameters[name].reason = "loop", reason
            loop = loop | frozenset(wrong)
        slow: dict[str, Tensor] = {
            name: p for name, p in self.parameters.items() if name in loop and name in present
        }
        if slow:
            self._warn_loop(slow)
            norms |= self._by_loop(chunk, v, slow)
        return norms | self._of_zero_in_the_proof(chunk, v, norms)

    def _norms_of_one(self, chunk: Chunk, v: Tensor, *, retain: bool) -> dict[str, Tensor]:
        """Return the squared norms [1] of a batch of one sample, by plain autograd."""
        if not chunk.flags.singles.alone(self._single_key(chunk, self.parameters)):
            return self._by_loop(chunk, v, dict(self.parameters))
        exact = exact_grads(chunk.z, self.parameters, v, retain=retain)
        return {name: value[None] for name, value in zip(self.parameters, exact, strict=True)}

    def _by_rules(
        self, chunk: Chunk, plan: Plan, v: Tensor, loop: frozenset[str], *, retain: bool
    ) -> dict[str, Tensor]:
        """Return the squared norms [B] of all parameters but those in ``loop``.

        Where a rule turns out not to apply, the ledger has the node's own formula from now on.
        """
        routes = chunk.ledger.routes()
        try:
            return sq_norms(
                chunk.graph,
                plan.structure.uses,
                chunk.z,
                v,
                plan.shapes.layouts,
                chunk.count,
                routes,
                retain=retain,
                skip=loop,
            )
        finally:
            chunk.ledger.enter_routes(routes)

    def _of_zero_in_the_proof(
        self, chunk: Chunk, v: Tensor, norms: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the norms by the loop of parameters that the rules now get wrong.

        Of a parameter whose gradient was zero in the proof nothing was proven: where it is not zero
        any more, the loop says whether its rule is right. Where it is, the rule's values stand, so
        that the next call has the same bits.
        """
        proofs = chunk.ledger.parameters
        unproven = [
            n for n in norms if n in proofs and not proofs[n].alive and proofs[n].route != "loop"
        ]
        unsure: dict[str, Tensor] = {
            n: self.parameters[n] for n in unproven if bool(norms[n].any())
        }
        if not unsure:
            return {}
        looped = self._by_loop(chunk, v, unsure)
        total = torch.stack([*(norms | looped).values()]).sum(0)
        close = closeness(self.view, chunk.ledger, v.device)
        wrong: dict[str, Tensor] = {}
        for name in unsure:
            proof = proofs[name]
            if norms_agree(norms[name], looped[name], total, close):
                proof.alive = True
                continue
            proof.route, proof.reason = "loop", "zero in the proof, wrong where it is not"
            wrong[name] = looped[name]
        return wrong

    def _by_loop(self, chunk: Chunk, v: Tensor, chosen: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the squared norms [B] of some parameters' gradients by the loop.

        It makes one forward and backward pass a sample.
        """
        batch, out_dim = batch_of(chunk), self.view.out_dim
        close = closeness(self.view, chunk.ledger, v.device)
        key = self._single_key(chunk, chosen)
        forward = forward_of(self.view, batch)
        rows = [
            torch.stack(
                self._current.singles.sq_norms(
                    forward, j, self.view.row(v, j), out_dim, chosen, key, close
                )
            )
            for j in range(chunk.count)
        ]
        self.ledger.notes += [
            note for note in self._current.singles.notes if note not in self.ledger.notes
        ]
        return dict(zip(chosen, torch.stack(rows, 1), strict=True))

    def _single_key(self, chunk: Chunk, chosen: Iterable[str]) -> tuple:
        """Return what decides if a sample alone has its gradients, or only beside a copy.

        These are shapes, strides and the program.
        """
        leaves = tree_flatten(batch_of(chunk).pick([0]))[0]
        strides = tuple(
            (t.shape, t.stride())
            for t in leaves
            if isinstance(t, Tensor) and t.layout == torch.strided
        )
        return strides, chunk.key.program, tuple(chosen)

    def _table(self, norms: dict[str, Tensor], device: torch.device, count: int) -> Tensor:
        """Return the squared norms [parameters, B], in the order of ``parameters``.

        They are zero where there are none.
        """
        zero = torch.zeros(count, dtype=torch.float64, device=device)
        return torch.stack([norms.get(name, zero) for name in self.parameters])

    def _result(self, table: Tensor) -> ChunkNorms:
        names = list(self.parameters)
        if not float(table.amax()) < math.inf:  # nor is that so of what is not a number
            bad, sample = (~torch.isfinite(table)).nonzero()[0].tolist()
            raise NonFiniteError(
                f"the gradient of parameter {names[bad]} is not finite for sample {sample} of the "
                "batch"
            )
        proofs = self.ledger.parameters
        return ChunkNorms(
            names, table, {n: proofs[n].route if n in proofs else "zero" for n in names}
        )

    def _warn_loop(self, slow: dict[str, Tensor]) -> None:
        fresh = [name for name in slow if name not in self._warned]
        if fresh:
            self._warned.update(fresh)
            reason = self.ledger.parameters[fresh[0]].reason
            warnings.warn(
                f"{len(fresh)} parameters ({few(fresh, 3)}) are measured by an exact loop "
                f"over samples, which is slow: {reason}",
                FastlrWarning,
                stacklevel=4,
            )


def _finite(z: Tensor) -> Tensor:
    """Return the output without its graph, refused if it is not finite.

    Minus infinity is allowed: it is a logit that classes may have.
    """
    output = z.detach()
    if output.numel():
        refuse_beyond(
            output.amax(),
            lambda: NonFiniteError(
                "the model's output has infinite values or values that are not a number"
            ),
        )
    return output
