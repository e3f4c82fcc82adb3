"""The engine: plan once, prove once, then one forward and one backward pass a chunk."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastlr.checks import refuse_where
from fastlr.errors import FastlrWarning, InputError, ModelError, NonFiniteError
from fastlr.ghost import adapt, program
from fastlr.ghost.cotangents import Cotangent, passes
from fastlr.ghost.execute import Rerouted, sq_norms
from fastlr.ghost.fallback import by_loop
from fastlr.ghost.folded import FoldRefuted
from fastlr.ghost.fuse import unfolded
from fastlr.ghost.graph import Graph, exact_grads, walk
from fastlr.ghost.layout import Layout
from fastlr.ghost.ledger import Ledger
from fastlr.ghost.plan import Plan, Planner, State
from fastlr.ghost.proof import generic_cotangent
from fastlr.ghost.verify import low_precision, same_output, spot_check
from fastlr.runtime import out_of_memory


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


class Engine(Planner):
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
        self._writes_inputs: bool | None = None  # None: not known yet
        self._writes_buffers: bool | None = None
        self._plan: Plan | None = None

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
        with torch.inference_mode(False), adapt.quiet_rng(device), self._buffers_kept():
            try:
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
            except FoldRefuted as error:
                self.folding.give_up(error.names, error.reason)
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

    def prove(self, x: Any) -> Ledger:
        """Plan and prove for these inputs, with a random cotangent, and return what was found."""
        self.run(x, generic_cotangent)
        return self.ledger

    # -- one call ---------------------------------------------------------------------------------------------------

    def _run(self, x: Any, cotangent: Cotangent) -> ChunkNorms:
        self._given = program.attributes(self.model), program.hooks(self.model), adapt.plain_leaves(x)
        sizes = self._slice_key(x, 1)
        with unfolded() if sizes in self._single else nullcontext():
            z = self._forward(x)
        count = adapt.sample_count(z, self.out_dim)
        if count == 1 and self.folding.active:  # its norms are not compared with anything: they are the model's own
            if len(self._single) > 256:
                self._single.clear()
            self._single.add(sizes)
            with unfolded():
                z = self._forward(x)
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
        self._last = self._flags()
        key, state = self._state(graph, x, z, count)
        layouts = state.layouts.get(key)
        first, spot = layouts is None, None
        if first and count > 1:  # do samples interact that did not at other sizes?
            self._batch(x, z, count)
        if count == 1:
            layouts = {}  # there is nothing to find
        elif layouts is None or state.data_dependent:
            layouts = self._layouts(graph, state, z)
        if first and len(state.layouts) > 256:  # shapes that change at every call must not pile up
            state.layouts.clear()
        state.layouts[key] = layouts
        if first and count > 1:
            spot = self._spot(x, z, v, count, len(state.layouts))
        sums: dict[str, Tensor] = {}
        while True:
            norms = self._pass(graph, state, x, z, v, layouts or {}, count, spot, retain=more)
            for name, value in norms.items():
                value = value * scale
                sums[name] = sums[name] + value if name in sums else value
            if not more:
                break
            v, scale, more = next(several)
            spot = None
        self._plan = (state, layouts or {}, count)
        return self._result(sums, output, count)

    def plan(self, size: int) -> Plan | None:
        """How the last call went, if it had ``size`` samples and went by rules alone, so that `run_planned` can repeat it."""
        if self._plan is None:
            return None
        state, layouts, count = self._plan
        proofs = self.ledger.parameters.values()
        proven = all(p.route == "zero" or (p.route == "rule" and p.alive) for p in proofs)
        simple = bool(layouts) and not state.data_dependent and not state.loop
        return self._plan if count == size > 1 and simple and proven else None

    def run_planned(self, plan: Plan, x: Any, cotangent: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """The passes of an earlier call, for inputs of the same shapes, without a check that waits for the device.

        Returns:
            (squared norms [parameters, B] in the order of ``names``, float64; the output).

        Raises:
            Rerouted: the graph is not the planned one.
        """
        state, layouts, count = plan
        with torch.inference_mode(False):
            z = self._forward(x)
            output = _finite(z)
            graph = walk(z, self.parameters)
            if graph.signature() != state.signature:
                raise Rerouted
            graph.side, graph.keys = state.side, state.keys
            ((v, scale, _),) = passes(cotangent, output, self.out_dim)
            routes = {key: proof.route for key, proof in self.ledger.uses.items()}
            norms = sq_norms(graph, state.structure, z, v, layouts, count, routes)
            zero = torch.zeros(count, dtype=torch.float64, device=z.device)
            table = torch.stack([norms.get(name, zero) for name in self.parameters]) * scale
        refuse_where(~table.isfinite(), lambda: NonFiniteError("the gradient of a parameter is not finite"))
        return table, output

    def _forward(self, x: Any) -> Tensor:
        named = dict(self.model.named_parameters())
        given = adapt.copied(x) if self._writes_inputs is not False else x
        before = adapt.versions(given)
        z = self.folding.run(named, lambda: adapt.forward(self.model, given, self.output))
        written = adapt.versions(given) != before
        if written and self._writes_inputs is False:
            self._writes_inputs = True
            raise InputError("the model has written to its inputs, as it had not before: they are changed; pass them again")
        self._writes_inputs = written or bool(self._writes_inputs)
        return z

    def _pass(
        self,
        graph: Graph,
        state: State,
        x: Any,
        z: Tensor,
        v: Tensor,
        layouts: dict[tuple[int, int], Layout],
        count: int,
        spot: tuple[int, dict[str, Tensor]] | None,
        *,
        retain: bool,
    ) -> dict[str, Tensor]:
        if count == 1:  # the gradient of the only sample is the gradient
            exact = exact_grads(z, self.parameters, v, retain=retain)
            return {name: value[None] for name, value in zip(self.parameters, exact, strict=True)}
        ledger = self.ledger
        routes = {use_key: proof.route for use_key, proof in ledger.uses.items()}
        before = dict(routes)
        loop = state.loop | ledger.loop
        norms = {}
        if not all(name in loop for name in graph.parameters.values()):
            try:
                norms = sq_norms(
                    graph, state.structure, z, v, layouts, count, routes, retain=retain, skip=frozenset(loop)
                )
            finally:
                for use_key, route in routes.items():
                    if before.get(use_key) != route and use_key in ledger.uses:
                        ledger.uses[use_key].route = route
        present = set(graph.parameters.values())
        slow: dict[str, Tensor] = {name: p for name, p in self.parameters.items() if name in loop and name in present}
        if spot is not None:
            slow |= self._disproved(norms, spot)
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
        batch = self._batch(x, z, count)
        return by_loop(self.model, batch, v, chosen, output=self.output, out_dim=self.out_dim)

    def _spot(self, x: Any, z: Tensor, v: Tensor, count: int, seed: int) -> tuple[int, dict[str, Tensor]]:
        """Exact squared norms of one random sample; folded, its output must be that of the model as it is."""
        j, exact = spot_check(z, v, self.out_dim, self.parameters, seed)
        if self.folding.active:
            alone = self._batch(x, z, count).pick([j])
            if not same_output(self.model, alone, z.narrow(self.out_dim, j, 1), self.output):
                raise FoldRefuted([], "the folded model gives another output")
        return j, exact

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

    # -- checks on the real batch -----------------------------------------------------------------------------------

    def _disproved(self, norms: dict[str, Tensor], spot: tuple[int, dict[str, Tensor]]) -> dict[str, Tensor]:
        """Parameters whose norm of the spot-checked sample is not its exact norm: from now on done by the loop."""
        j, exact = spot
        total = torch.stack(list(exact.values())).sum()
        wrong: dict[str, Tensor] = {}
        for name, value in norms.items():
            if not self._agrees(value[j], exact[name], total):
                gap = float((value[j] - exact[name]).abs() / total)
                proof = self.ledger.parameters[name]
                proof.route, proof.reason = "loop", f"spot check of a sample: off by {gap:.1e} of its total"
                wrong[name] = self.parameters[name]
        return wrong

    def _agrees(self, value: Tensor, exact: Tensor, total: Tensor) -> bool:
        """Whether squared norms agree within the model's own precision, relative to themselves and to the totals."""
        dtypes = {p.dtype for p in self.parameters.values()}
        low = low_precision(value.device, dtypes)
        close = 0.1 if low else 1e-8 if dtypes == {torch.float64} else 1e-3
        return bool(((value - exact).abs() <= close * exact + 0.1 * close * total).all())

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

    @contextmanager
    def _buffers_kept(self) -> Iterator[None]:
        """Put back what forward passes write into buffers: counters, batch norm's running statistics in train mode."""
        modules = list(self.model.modules())
        training = any(m.training for m in modules)
        if not training and self._writes_buffers is False:
            before = self._buffer_versions()
            yield
            if self._buffer_versions() != before:
                self._writes_buffers = None  # they are put back from the next call on
            return
        with adapt.buffers_kept(modules, unseen=training) as changed:
            yield
        if not training:
            self._writes_buffers = bool(changed)

    def _buffer_versions(self) -> list[tuple[int, int]]:
        return [(id(b), program.version(b)) for b in self.model.buffers()]


def _finite(z: Tensor) -> Tensor:
    """The output without its graph, refused if it is not finite; minus infinity is a logit that classes may have."""
    output = z.detach()
    if output.numel():
        refuse_where(
            ~(output.amax() < math.inf),  # nor is that so of what is not a number
            lambda: NonFiniteError("the model's output has infinite values or values that are not a number"),
        )
    return output
