"""The engine: plan once, prove once, then one forward and one backward pass a chunk."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fastlr.checks import refuse_where
from fastlr.errors import FastlrWarning, InputError, InteractionError, ModelError, NonFiniteError
from fastlr.ghost import adapt
from fastlr.ghost.execute import Rerouted, Structure, sq_norms
from fastlr.ghost.fallback import by_loop
from fastlr.ghost.folded import FoldRefuted
from fastlr.ghost.fuse import Folding, unfolded
from fastlr.ghost.graph import Graph, exact_grads, walk
from fastlr.ghost.layout import Layout
from fastlr.ghost.ledger import Ledger, ParameterProof
from fastlr.ghost.proof import SAMPLES, Prover, far, generic_cotangent
from fastlr.ghost.verify import sample_axes, spot_check
from fastlr.runtime import out_of_memory

Cotangent = Tensor | Callable[[Tensor], "Tensor | Iterable[Tensor]"]
MAX_PROOFS = 8  # triples of samples tried where a data-dependent graph hides uses from the first


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


@dataclass
class _State:
    """What is known for one structure of the graph."""

    side: list[int]
    keys: list
    structure: Structure
    loop: frozenset[str]
    data_dependent: bool
    signature: tuple
    layouts: dict[tuple, dict[tuple[int, int], Layout]] = field(default_factory=dict)  # by shapes


Plan = tuple[_State, dict[tuple[int, int], Layout], int]  # with the layouts of its shapes and the number of samples


class Engine:
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
        module = adapt.unwrap(model)
        self._model = weakref.ref(module)
        self.output, self.in_dim, self.out_dim = output, in_dim, out_dim
        self.parameters = adapt.trainable(module)
        self._ledgers: dict[tuple, Ledger] = {}
        self._states: dict[tuple, _State] = {}
        self._slices: dict[tuple, list[int]] = {}
        self._last: tuple | None = None
        self._warned: set[str] = set()
        self.folding = Folding()
        self._plan: Plan | None = None

    @property
    def model(self) -> nn.Module:
        """The unwrapped model."""
        model = self._model()
        if model is None:
            raise ModelError("the model of this engine no longer exists")
        return model

    @property
    def names(self) -> list[str]:
        """Names of the trainable parameters."""
        return list(self.parameters)

    @property
    def ledger(self) -> Ledger:
        """What was proven for the model as the last call found it."""
        return self._ledgers[self._last] if self._last in self._ledgers else Ledger()

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
        with torch.inference_mode(False), adapt.quiet_rng(device), self._buffers_kept():
            while True:
                try:
                    return self._run(x, cotangent)
                except Rerouted:
                    continue
                except FoldRefuted as error:
                    self.folding.give_up(error.names, error.reason)
                except (InputError, NonFiniteError):
                    raise
                except Exception as error:  # not the folding's fault if it happens without it
                    if not self.folding.folded or out_of_memory(error):
                        raise
                    with unfolded():
                        result = self._run(x, cotangent)
                    self.folding.give_up([], f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
                    return result

    def prove(self, x: Any) -> Ledger:
        """Plan and prove for these inputs, with a random cotangent, and return what was found."""
        self.run(x, generic_cotangent)
        return self.ledger

    # -- one call ---------------------------------------------------------------------------------------------------

    def _run(self, x: Any, cotangent: Cotangent) -> ChunkNorms:
        z = self._forward(x)
        count = adapt.sample_count(z, self.out_dim)
        output = z.detach()
        refuse_where(
            output.isnan() | output.isposinf(),
            lambda: NonFiniteError("the model's output has infinite values or values that are not a number"),
        )
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
        passes = _passes(cotangent, output, self.out_dim)
        v, scale, more = next(passes)
        self._last = self._flags()
        key, state = self._state(graph, x, z, count)
        layouts = state.layouts.get(key)
        spot = None
        if count > 1 and (layouts is None or state.data_dependent):
            first = layouts is None
            layouts = self._layouts(graph, state, z)
            if len(state.layouts) > 256:  # shapes that change at every call must not pile up
                state.layouts.clear()
                self._slices.clear()
            state.layouts[key] = layouts
            spot = self._spot(x, z, v, count, len(state.layouts)) if first else None
        sums: dict[str, Tensor] = {}
        while True:
            norms = self._pass(graph, state, x, z, v, layouts or {}, count, spot, retain=more)
            for name, value in norms.items():
                value = value * scale
                sums[name] = sums[name] + value if name in sums else value
            if not more:
                break
            v, scale, more = next(passes)
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
            output = z.detach()
            refuse_where(output.isnan() | output.isposinf(), lambda: NonFiniteError("the model's output is not finite"))
            graph = walk(z, self.parameters)
            if graph.signature() != state.signature:
                raise Rerouted
            graph.side, graph.keys = state.side, state.keys
            ((v, scale, _),) = _passes(cotangent, output, self.out_dim)
            routes = {key: proof.route for key, proof in self.ledger.uses.items()}
            norms = sq_norms(graph, state.structure, z, v, layouts, count, routes)
            zero = torch.zeros(count, dtype=torch.float64, device=z.device)
            table = torch.stack([norms.get(name, zero) for name in self.parameters]) * scale
        refuse_where(~table.isfinite(), lambda: NonFiniteError("the gradient of a parameter is not finite"))
        return table, output

    def _forward(self, x: Any) -> Tensor:
        named = dict(self.model.named_parameters())
        return self.folding.run(named, lambda: adapt.forward(self.model, x, self.output))

    def _pass(
        self,
        graph: Graph,
        state: _State,
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
                    proofs[name].alive = True
                else:
                    proofs[name].route, proofs[name].reason = "loop", "zero in the proof, wrong where it is not"
            norms |= looped
        return norms

    def _by_loop(self, x: Any, z: Tensor, v: Tensor, count: int, chosen: dict[str, Tensor]) -> dict[str, Tensor]:
        batch = self._batch(x, z, count)
        return by_loop(self.model, batch, v, chosen, output=self.output, out_dim=self.out_dim)

    def _spot(self, x: Any, z: Tensor, v: Tensor, count: int, seed: int) -> tuple[int, dict[str, Tensor]]:
        """Exact squared norms of one random sample; folded, its output must be that of the model as it is."""
        j, exact = spot_check(z, v, self.out_dim, self.parameters, seed)
        if self.folding.folded:
            with torch.no_grad():
                alone = adapt.forward(self.model, self._batch(x, z, count).pick([j]), self.output)
            low = torch.finfo(z.dtype).bits < 32 or torch.is_autocast_enabled(z.device.type)
            if far(alone, z.narrow(self.out_dim, j, 1), 0.1 if low else 1e-8 if z.dtype == torch.float64 else 1e-3):
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

    # -- planning ---------------------------------------------------------------------------------------------------

    def _flags(self) -> tuple:
        model = self.model
        return (
            tuple(m.training for m in model.modules()),
            tuple((n, p.dtype) for n, p in self.parameters.items()),
            torch.is_autocast_enabled(next(iter(self.parameters.values())).device.type),
        )

    def _state(self, graph: Graph, x: Any, z: Tensor, count: int) -> tuple[tuple, _State]:
        """Find or make the plan for this structure; prove what is not proven yet."""
        signature = (self._last, graph.signature())
        state = self._states.get(signature)
        sizes = (count, tuple(graph.sizes(i) for i in range(len(graph.nodes))))
        if state is not None and (sizes in state.layouts or self._known(graph, state)):
            graph.side, graph.keys = state.side, state.keys
            return sizes, state
        assert self._last is not None
        ledger = self._ledgers.setdefault(self._last, Ledger())
        unproven = self._unproven(graph, ledger)
        absent = frozenset(self.parameters) - frozenset(graph.parameters.values())
        fresh = not graph.data_dependent or not ledger.parameters  # a new structure is proven anew

        def open_questions() -> bool:
            return bool(unproven) or not any(absent <= tested for tested in [frozenset[str](), *ledger.absent])

        if fresh or open_questions():
            batch = self._batch(x, z, count)
            generator = torch.Generator().manual_seed(5)
            prover = Prover(self.model, self.parameters, self.output, self.out_dim, self.folding)
            for start in range(0, min(count, MAX_PROOFS * SAMPLES), SAMPLES):
                if start and not open_questions():
                    break
                samples = [(start + k) % count for k in range(min(count, SAMPLES))]
                chosen = adapt.Batch(batch.pick(samples), len(samples), self.in_dim, batch.batched)
                prover.prove(chosen.distinct(SAMPLES, generator), ledger, seed=start)
                unproven = self._unproven(graph, ledger)
            for name in unproven:
                ledger.parameters[name] = ParameterProof("loop", alive=True, reason="its use was in no proof")
        structure = Structure.of(graph)
        state = _State(graph.side, graph.keys, structure, frozenset(unproven), graph.data_dependent, graph.signature())
        if len(self._states) > 64:
            self._states.clear()
        self._states[signature] = state
        return sizes, state

    def _known(self, graph: Graph, state: _State) -> bool:
        """Whether nodes of a known structure fall on the known sides with new shapes."""
        graph.classify(self.ledger.decide(graph))
        return graph.side == state.side and not graph.undecided

    def _unproven(self, graph: Graph, ledger: Ledger) -> list[str]:
        """Parameters of which some use, or the absence, is not in the ledger; classifies the graph on the way."""
        graph.classify(ledger.decide(graph))
        missing: dict[str, None] = {}
        for i in graph.undecided:
            for child, _ in graph.children[i]:
                if child >= 0:
                    missing |= dict.fromkeys(graph.parameters[p] for p in graph.parameters_below(child))
        for use in graph.uses():
            if use.key not in ledger.uses:
                missing |= dict.fromkeys(graph.parameters[p] for p in graph.parameters_below(use.child))
        present = set(graph.parameters.values())
        for name in self.parameters:
            proof = ledger.parameters.get(name)
            if proof is None or (name in present and proof.route == "zero"):
                missing[name] = None
        return [
            name for name in missing if ledger.parameters.get(name) is None or ledger.parameters[name].route != "loop"
        ]

    def _slice_key(self, x: Any, count: int) -> tuple:
        return (count, tuple(tuple(t.shape) if isinstance(t, Tensor) else None for t in adapt.tree_flatten(x)[0]))

    def _batch(self, x: Any, z: Tensor, count: int) -> adapt.Batch:
        """Find the batched inputs: three samples alone must give what they gave in the batch."""
        known = self._slices.get(self._slice_key(x, count))
        batch = adapt.Batch(x, count, self.in_dim, known)
        if count > SAMPLES and known is None:
            picked = [0, count // 2, count - 1]
            want = z.detach().index_select(self.out_dim, torch.tensor(picked, device=z.device))
            close = 1e-6 if z.dtype == torch.float64 else 1e-2 if z.dtype == torch.float32 else 0.2
            options = [batch.batched] + [[i for i in batch.batched if i != drop] for drop in batch.batched]
            failures = []
            for option in options:
                if not option:
                    continue
                trial = adapt.Batch(x, count, self.in_dim, option)
                try:
                    with torch.no_grad():
                        got = adapt.select_output(adapt.call(self.model, trial.pick(picked)), self.output)
                except (RuntimeError, ValueError, IndexError) as error:
                    failures.append(str(error).splitlines()[0])
                    continue
                if not far(want, got, close):
                    batch = trial
                    break
            else:
                if len(failures) == len([o for o in options if o]):
                    raise InputError(
                        f"the model fails on three of the {count} samples ({failures[0]}); check in_dim={self.in_dim}, or pass "
                        "inputs whose every batched tensor has the samples along it"
                    )
                # three samples alone give something else: find out exactly, on the copy, who is to blame
                chosen = adapt.Batch(batch.pick(picked), SAMPLES, self.in_dim, batch.batched)
                prover = Prover(self.model, self.parameters, self.output, self.out_dim)
                prover.prove(chosen.distinct(SAMPLES, torch.Generator().manual_seed(5)), Ledger())
                if z.dtype in (torch.float32, torch.float64):
                    raise InteractionError(
                        f"three samples alone give another output than within the batch of {count}: samples interact, or "
                        f"an input is shared that in_dim={self.in_dim} makes look batched. Make the forward pass work on "
                        "each sample alone"
                    )
        self._slices[self._slice_key(x, count)] = batch.batched
        return batch

    # -- checks on the real batch -----------------------------------------------------------------------------------

    def _layouts(self, graph: Graph, state: _State, z: Tensor) -> dict[tuple[int, int], Layout]:
        """Verified layouts of all uses; parameters at a use where none holds go to the loop."""
        ledger, structure, v = self.ledger, state.structure, generic_cotangent(z)
        layouts, lost = sample_axes(graph, structure, ledger, z, v, self.out_dim, data_dependent=state.data_dependent)
        for use in (u for node in lost for u in structure.by_node[node]):
            for name in (graph.parameters[p] for p in graph.parameters_below(use.child)):
                old = ledger.parameters.get(name)
                kinds = old.kinds if old else ()
                reason = f"its sample axis was not found in a batch of {z.shape[self.out_dim]}"
                ledger.parameters[name] = ParameterProof("loop", alive=True, kinds=kinds, reason=reason)
        return layouts

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
        low = torch.is_autocast_enabled(value.device.type) or any(torch.finfo(d).bits < 32 for d in dtypes)
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
        """Put back what a forward pass in train mode writes into buffers (batch norm's running statistics)."""
        model = self.model
        saved = [(b, b.detach().clone()) for b in model.buffers()] if any(m.training for m in model.modules()) else []
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, old in saved:
                    buffer.copy_(old)


def _passes(cotangent: Cotangent, output: Tensor, out_dim: int) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Scaled cotangents, the factor [B] that undoes the scaling of squared norms, and whether more follow."""
    made = cotangent if isinstance(cotangent, Tensor) else cotangent(output)
    several = iter([made] if isinstance(made, Tensor) else made)
    try:
        current = next(several)
    except StopIteration:
        raise InputError("the cotangent function gave no cotangents") from None
    while True:
        following = next(several, None)
        yield *_scaled(current, output, out_dim), following is not None
        if following is None:
            return
        current = following


def _scaled(v: Tensor, output: Tensor, out_dim: int) -> tuple[Tensor, Tensor]:
    """Scale each sample's cotangent by a power of two to unit size, in the output's dtype.

    Confident networks make cotangents so small that their squares vanish in the model's dtype.
    """
    if v.shape != output.shape:
        raise InputError(f"the cotangent has shape {tuple(v.shape)}, the output {tuple(output.shape)}")
    v = v.detach().to(output.device, torch.float64)
    refuse_where(~v.isfinite(), lambda: NonFiniteError("the cotangent has values that are not finite"))
    rows = v.movedim(out_dim, 0).flatten(1) if v.ndim > 1 else v[:, None]
    exponent = torch.frexp(rows.abs().amax(1)).exponent
    shape = [1] * v.ndim
    shape[out_dim] = len(rows)
    return torch.ldexp(v, -exponent.view(shape)).to(output.dtype), torch.ldexp(
        torch.ones_like(rows[:, 0]), 2 * exponent
    )
