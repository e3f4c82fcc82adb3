"""The engine: plan once, prove once, then one forward and one backward pass a chunk."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from fastlr.checks import out_of_memory, refuse_where
from fastlr.errors import FastlrWarning, InputError, ModelError, NonFiniteError
from fastlr.ghost import adapt, program
from fastlr.ghost.audit import Disproved
from fastlr.ghost.auditor import Auditor
from fastlr.ghost.cotangents import Cotangent, passes
from fastlr.ghost.execute import Rerouted, sq_norms
from fastlr.ghost.fallback import Singles
from fastlr.ghost.folded import FoldRefuted
from fastlr.ghost.fuse import uncompiled, unfolded
from fastlr.ghost.graph import Graph, exact_grads, walk
from fastlr.ghost.ledger import Ledger, ParameterProof
from fastlr.ghost.plan import KEPT, Plan, ShapePlan, State
from fastlr.ghost.proof import generic_cotangent
from fastlr.ghost.state import BufferKeeper


@dataclass
class ChunkNorms:
    """Per-sample squared gradient norms of one call.

    ``total`` [B] and each of ``per_parameter`` [B] are float64; ``routes`` says how each parameter was done ("rule": by
    the walk; "node": by the node's own formula, sample by sample; "loop": one pass a sample; "zero": not used).
    """

    total: Tensor
    per_parameter: dict[str, Tensor]
    routes: dict[str, str]
    output: Tensor


class Engine(Auditor):
    """Per-sample squared gradient norms of a model, planned and proven once.

    Args:
        model: any nn.Module; DDP and torch.compile wrappers are looked through. Taken as it is (train or eval).
        output: picks the output tensor (see `fastlr.ghost.adapt.select_output`).
        in_dim: sample axis of the batched input tensors.
        out_dim: sample axis of the output.

    Raises:
        ModelError: no trainable parameters, or ones that cannot be measured.
    """

    def __init__(
        self, model: nn.Module, *, output: adapt.OutputSelector = None, in_dim: int = 0, out_dim: int = 0
    ) -> None:
        super().__init__(adapt.unwrap(model), output, in_dim, out_dim)
        self._warned: set[str] = set()
        self._single: set[tuple] = set()  # shapes of inputs that are one sample
        self._buffers = BufferKeeper()
        self._plan: Plan | None = None
        self._singles = Singles()

    def run(self, x: Any, cotangent: Cotangent) -> ChunkNorms:
        """Per-sample squared norms of the gradient of <cotangent, output> for each sample.

        Args:
            x: a tensor, a tuple (positional) or a dict (keywords).
            cotangent: a tensor shaped like the output, a function of the detached output that gives one, or one that gives
                several: then the squared norms of all passes are summed. Any scale and floating-point dtype.

        Raises:
            InputError, ModelError and its kinds: see fastlr.errors.
        """
        self.parameters = adapt.trainable(self.model)
        x = adapt.as_inputs(x)
        adapt.check_inputs(self.model, x)
        device = next(iter(self.parameters.values())).device
        literal = self.folding.literal
        modules = list(self.model.modules())
        kept = self._buffers.kept(modules, unseen=any(m.training for m in modules))
        with torch.inference_mode(False), adapt.quiet_rng(device), kept:
            try:
                with self.without_caches(x):
                    return self._attempt(x, cotangent)
            except Exception:
                self.folding.literal = literal  # it was not the folding's fault
                raise

    def _attempt(self, x: Any, cotangent: Cotangent) -> ChunkNorms:
        """`_run`, again where it says so, with less folded where that fails."""
        while True:
            try:
                return self._run(x, cotangent)
            except Rerouted:
                continue
            except CheckpointError as error:
                if all(name in self.ledger.loop for name in self.parameters):
                    raise
                reason = f"activation checkpointing: {str(error).splitlines()[0]}"
                self.ledger.parameters |= {name: ParameterProof("loop", alive=True, reason=reason) for name in self.parameters}
                continue
            except Disproved as failure:
                self._distrust(failure)
                continue
            except FoldRefuted as error:
                self.folding.give_up(error.names, error.reason) if error.names else self.folding.disable(error.reason)
                continue
            except (InputError, NonFiniteError):
                raise
            except Exception as error:
                if not (self.folding.active or self.folding.seen) or out_of_memory(error):
                    raise
                reason = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            if self.folding.replaced:
                self.folding.give_up([], reason)
                continue
            with unfolded():  # it is the folding's fault if it does not happen without
                result = self._run(x, cotangent)
            self.folding.give_up([], reason)
            return result

    def distrust(self) -> None:
        """Prove the model anew, as another process has found it changed, and from now on look at every batch."""
        self._forget(self._last)
        self.audits.failed = max(1, self.audits.failed)

    def by_loop_from_now_on(self, names: Iterable[str]) -> None:
        """Measure these parameters by the loop, as another process does."""
        for name in names:
            proof = self.ledger.parameters.get(name)
            if proof is None or proof.route != "loop":
                self.ledger.parameters[name] = ParameterProof("loop", alive=True, reason="so on another rank")

    def _distrust(self, failure: Disproved) -> None:
        """A sample refutes what was proven earlier: prove anew, and from now on look at every batch."""
        self.audits.fail(failure)
        self._forget(self._last)
        warnings.warn(
            f"an audit found what was proven of the model no longer true ({failure}): something that it depends on has changed "
            "unseen. It is proven anew for this batch; results since the last audit that passed may be wrong",
            FastlrWarning,
            stacklevel=5,
        )

    def prove(self, x: Any) -> Ledger:
        """Plan and prove for these inputs, with a random cotangent, and return what was found."""
        self.run(x, generic_cotangent)
        return self.ledger

    # -- one call ---------------------------------------------------------------------------------------------------

    def _run(self, x: Any, cotangent: Cotangent) -> ChunkNorms:
        begun = time.perf_counter()
        self._compared, self._last = False, self._flags()
        program_now = program.fingerprint(self.model, self._free_buffers(x))
        sizes = self._slice_key(x, 1)
        with unfolded() if sizes in self._single else nullcontext():
            z = self._forward(x)
        count = adapt.sample_count(z, self.out_dim)
        if count == 1 and self.folding.active:  # its norms are not compared with anything: they are the model's own
            if len(self._single) > KEPT:
                self._single.clear()
            self._single.add(sizes)
            with unfolded():
                z = self._forward(x)
        self._seen = program_now, program.inputs_token(x, adapt.along(x, count, self.in_dim))
        output = _finite(z)
        if not z.requires_grad:
            raise ModelError(
                "the output depends on no trainable parameter that autograd can see (no_grad, detach or .data?)"
            )
        graph = walk(z, self.parameters)
        self._plan = None
        if graph.others and "others" not in self._warned:
            self._warned.add("others")
            shapes = ", ".join(str(tuple(graph.nodes[i].variable.shape)) for i in graph.others[:4])
            warnings.warn(
                f"{len(graph.others)} tensors of shapes {shapes} require grad and move the output, but are not parameters of "
                "the model: they are not counted. Register them as parameters if they should be",
                FastlrWarning,
                stacklevel=4,
            )
        several = passes(cotangent, output, self.out_dim)
        v, scale, more = next(several)
        key, state = self._state(graph, x, z, count)
        plan, fresh = self._shape_plan(graph, state, key, x, z, count)
        spot = None
        if count > 1 and self.audits.due(fresh=fresh or self._hooked):
            with self.audits.timed():
                spot = self._exact_of_one(x, z, v, count, fresh=fresh)
        sums: dict[str, Tensor] = {}
        while True:
            norms = self._pass(graph, state, plan, x, z, v, count, spot, retain=more, fresh=fresh)
            for name, value in norms.items():
                value = value * scale
                sums[name] = sums[name] + value if name in sums else value
            if not more:
                break
            v, scale, more = next(several)
            spot = None
        self._plan = (state, plan, count)
        result = self._result(sums, output, count)
        self.audits.measured(time.perf_counter() - begun)
        return result

    def _free_buffers(self, x: Any) -> frozenset[int]:
        """Buffers that the forward pass uses as running statistics only, so that their values change nothing of a plan."""
        assert self._last is not None
        if self._last not in self._observed:
            if len(self._observed) > KEPT:
                self._observed.clear()
            given = adapt.copied(x)
            with uncompiled():
                self._observed[self._last] = program.observed(
                    self.model, lambda: adapt.forward(self.model, given, self.output)
                )
        return self._observed[self._last][0]

    def _shape_plan(
        self, graph: Graph, state: State, key: tuple, x: Any, z: Tensor, count: int
    ) -> tuple[ShapePlan, bool]:
        """Where the samples are in this batch, and whether nothing was known of its shape."""
        plan = state.plans.get(key)
        if count == 1:  # there is nothing to find
            return plan or ShapePlan({}), plan is None
        fresh = plan is None
        if plan is None or plan.by_data or self.audits.failed:
            self._batch(x, z, count, compare=not self._compared)  # do samples interact that did not before?
            plan = self._layouts(graph, state, z, fresh=fresh)
        if fresh and len(state.plans) > KEPT:  # shapes that change at every call must not pile up
            state.plans.clear()
        state.plans[key] = plan
        return plan, fresh

    def plan(self, size: int) -> Plan | None:
        """How the last call went, if it had ``size`` samples and went by rules alone, so that `run_planned` can repeat it."""
        if self._plan is None:
            return None
        state, plan, count = self._plan
        proofs = self.ledger.parameters.values()
        proven = all(p.route == "zero" or (p.route == "rule" and p.alive) for p in proofs)
        simple = bool(plan.layouts) and not plan.by_data and not state.loop and not self.audits.failed
        return self._plan if count == size > 1 and simple and proven else None

    def run_planned(self, plan: Plan, x: Any, cotangent: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """The passes of an earlier call, for inputs of the same shapes, without a check that waits for the device.

        Returns:
            (squared norms [parameters, B] in the order of ``names``, float64; the output).

        Raises:
            Rerouted: the graph is not the planned one.
        """
        state, shapes, count = plan
        with torch.inference_mode(False):
            z = self._forward(x)
            output = _finite(z)
            graph = walk(z, self.parameters)
            if graph.signature() != state.signature:
                raise Rerouted
            graph.side, graph.keys = state.side, state.keys
            ((v, scale, _),) = passes(cotangent, output, self.out_dim)
            routes = {key: proof.route for key, proof in self.ledger.uses.items()}
            norms = sq_norms(graph, state.structure, z, v, shapes.layouts, count, routes)
            zero = torch.zeros(count, dtype=torch.float64, device=z.device)
            table = torch.stack([norms.get(name, zero) for name in self.parameters]) * scale
        refuse_where(~table.isfinite(), lambda: NonFiniteError("the gradient of a parameter is not finite"))
        return table, output

    def _pass(
        self,
        graph: Graph,
        state: State,
        plan: ShapePlan,
        x: Any,
        z: Tensor,
        v: Tensor,
        count: int,
        spot: tuple[int, dict[str, Tensor]] | None,
        *,
        retain: bool,
        fresh: bool,
    ) -> dict[str, Tensor]:
        if count == 1:
            if self._singles.alone(self._single_key(self._batch(x, z, count), self.parameters)):
                exact = exact_grads(z, self.parameters, v, retain=retain)
                return {name: value[None] for name, value in zip(self.parameters, exact, strict=True)}
            return self._by_loop(x, z, v, count, dict(self.parameters))
        ledger = self.ledger
        routes = {use_key: proof.route for use_key, proof in ledger.uses.items()}
        before = dict(routes)
        loop = state.loop | ledger.loop
        norms = {}
        if not all(name in loop for name in graph.parameters.values()):
            try:
                norms = sq_norms(
                    graph, state.structure, z, v, plan.layouts, count, routes, retain=retain, skip=frozenset(loop)
                )
            finally:
                for use_key, route in routes.items():
                    if before.get(use_key) != route and use_key in ledger.uses:
                        ledger.uses[use_key].route = route
        present = set(graph.parameters.values())
        slow: dict[str, Tensor] = {name: p for name, p in self.parameters.items() if name in loop and name in present}
        if spot is not None:
            slow |= self._disproved(norms, spot, x, z, v, count, fresh=fresh)
        if slow:
            self._warn_loop(slow)
            norms |= self._by_loop(x, z, v, count, slow)
        proofs = ledger.parameters
        unproven = [n for n in norms if n in proofs and not proofs[n].alive and proofs[n].route != "loop"]
        unsure: dict[str, Tensor] = {n: self.parameters[n] for n in unproven if bool(norms[n].any())}
        if unsure:  # zero in the proof, so nothing was proven of them
            looped = self._by_loop(x, z, v, count, unsure)
            total = torch.stack([*(norms | looped).values()]).sum(0)
            for name in unsure:
                if self._agrees(norms[name], looped[name], total):
                    proofs[name].alive = True  # and the rule's values stand: the next call has the same bits
                else:
                    proofs[name].route, proofs[name].reason = "loop", "zero in the proof, wrong where it is not"
                    norms[name] = looped[name]
        return norms

    def _by_loop(self, x: Any, z: Tensor, v: Tensor, count: int, chosen: dict[str, Tensor]) -> dict[str, Tensor]:
        """Squared norms [B] of some parameters' gradients, one forward and backward pass a sample."""
        batch = self._batch(x, z, count)
        key = self._single_key(batch, chosen)
        rows = [
            self._singles.sq_norms(
                self._forward_of(batch), j, v.narrow(self.out_dim, j, 1), self.out_dim, chosen, key, self._close(v)
            )
            for j in range(count)
        ]
        self.ledger.notes += [note for note in self._singles.notes if note not in self.ledger.notes]
        return dict(zip(chosen, torch.stack([torch.stack(row) for row in rows], 1), strict=True))

    def _single_key(self, batch: adapt.Batch, chosen: Iterable[str]) -> tuple:
        """What decides whether a sample alone has the gradients that it has beside a copy: shapes, strides, the program."""
        leaves = adapt.tree_flatten(batch.pick([0]))[0]
        strides = tuple((t.shape, t.stride()) for t in leaves if isinstance(t, Tensor) and t.layout == torch.strided)
        return strides, self._last, self._seen, tuple(chosen)

    def _result(self, sums: dict[str, Tensor], output: Tensor, count: int) -> ChunkNorms:
        zero = torch.zeros(count, dtype=torch.float64, device=output.device)
        norms = {name: sums.get(name, zero) for name in self.parameters}
        total = torch.stack(list(norms.values())).sum(0)
        if not torch.isfinite(total).all():
            bad = next(name for name, value in norms.items() if not torch.isfinite(value).all())
            sample = int((~torch.isfinite(norms[bad])).nonzero()[0])
            raise NonFiniteError(f"the gradient of parameter {bad} is not finite for sample {sample} of the batch")
        proofs = self.ledger.parameters
        return ChunkNorms(total, norms, {n: proofs[n].route if n in proofs else "zero" for n in norms}, output)

    def _warn_loop(self, slow: dict[str, Tensor]) -> None:
        fresh = [name for name in slow if name not in self._warned]
        if fresh:
            self._warned.update(fresh)
            reason = self.ledger.parameters[fresh[0]].reason
            warnings.warn(
                f"{len(fresh)} parameters ({', '.join(fresh[:3])}{', ...' if len(fresh) > 3 else ''}) are measured by an exact "
                f"loop over samples, which is slow: {reason}",
                FastlrWarning,
                stacklevel=4,
            )

def _finite(z: Tensor) -> Tensor:
    """The output without its graph, refused if it is not finite; minus infinity is a logit that classes may have."""
    output = z.detach()
    if output.numel():
        refuse_where(
            ~(output.amax() < math.inf),  # nor is that so of what is not a number
            lambda: NonFiniteError("the model's output has infinite values or values that are not a number"),
        )
    return output
