"""What a user would pick for per-sample gradient norms, on one model, its inputs and cotangent.

Model in eval mode, float32, one fixed cotangent at the output. Plain is one forward and backward
pass of the batch with all weight gradients, and has no norms: the unit of the ratios. The truth:
one backward pass a sample in float64, for a few samples spread over the batch; every parameter is
held to it, relative to its sample's total and to itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from bench import cases, repairs
from bench.cases import Case, forward, loop_norms
from bench.paired import Work, Wrong
from fastlr import per_sample_grad_sq_norms

# Of the sample's total. Float32 is off by up to 2e-4 where a ReLU's input is zero within rounding.
TOLERANCE = 1e-3
OWN_TOLERANCE = (
    0.05  # of the parameter's own norm, for the parameters with a visible share of the total:
)
# A tool may be off by 15 times in every depthwise layer of a network and hardly move the total.
VISIBLE = 1e-9
CHECKED = 4  # samples held to the truth
BATCH = 16
Norms = dict[str, Tensor]


class Contender(NamedTuple):
    """One way of computing the squared gradient norm of every parameter and sample.

    Attributes:
        run: does the work once; returns name -> [B].
        notes: the repairs that the model needed, and the settings chosen.
    """

    run: Callable[[], Norms]
    notes: Sequence[str] = ()


def fastlr(case: Case, cotangent: Tensor) -> Contender:
    """Run this package on the model as it is.

    The plan is made by the first call and kept.
    """
    return Contender(
        lambda: per_sample_grad_sq_norms(
            case.model, case.x, cotangent, per_parameter=True, **case.kwargs
        )
    )


def loop(case: Case, cotangent: Tensor) -> Contender:
    """One forward and backward pass per sample."""
    return Contender(lambda: loop_norms(case, cotangent))


def vmap(case: Case, cotangent: Tensor, chunk: int = 4) -> Contender:
    """torch.func: vmap over samples of grad of a functional call, ``chunk`` samples at a time."""
    state = {
        name: t.detach()
        for name, t in (*case.model.named_parameters(), *case.model.named_buffers())
    }
    params = {name: state.pop(name) for name in cases.trainable(case.model)}
    batched = {key for key, t in cases.items(case.x) if case.is_batched(key, t)}

    def with_sample_axis(key: Any, t: Any) -> Any:
        return t.unsqueeze(case.in_dim) if key in batched else t

    def value(params: Norms, x: Any, v: Tensor) -> Tensor:
        def stateless(*args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(case.model, {**params, **state}, args, kwargs)

        one = cases.map_inputs(x, with_sample_axis)
        return (
            forward(stateless, one, case.kwargs.get("output")) * v.unsqueeze(case.out_dim)
        ).sum()

    def norms(x: Any, v: Tensor) -> Norms:
        return {name: g.square().sum() for name, g in torch.func.grad(value)(params, x, v).items()}

    axes = cases.map_inputs(case.x, lambda key, _: case.in_dim if key in batched else None)
    mapped = torch.func.vmap(norms, in_dims=(axes, case.out_dim), chunk_size=chunk)
    return Contender(lambda: mapped(case.x, cotangent), [f"chunks of {chunk} samples"])


def left_by_backward(
    model: nn.Module,
    attribute: str,
    sq_norms: Callable[[Tensor], Tensor],
    case: Case,
    cotangent: Tensor,
) -> Callable[[], Norms]:
    """Return what runs backward and reads squared norms of what each parameter is left.

    The backward pass leaves something of every sample in ``attribute``.
    """
    owned = [(p, p.original) for p in model.parameters() if p.requires_grad]

    def run() -> Norms:
        (forward(model, case.x, case.kwargs.get("output")) * cotangent).sum().backward()
        found: Norms = {}
        for p, name in owned:  # parts of an original parameter add up
            part = sq_norms(getattr(p, attribute).detach())
            found[name] = found[name] + part if name in found else part
            p.grad = None
            setattr(p, attribute, None)
        return found

    return run


def opacus(case: Case, cotangent: Tensor, ghost: bool = False) -> Contender:
    """Run Opacus: GradSampleModule forms every sample's gradient, which is then squared.

    ``ghost``: norms without them where it has a rule.
    """
    from opacus.grad_sample import (
        GradSampleModule,
        GradSampleModuleFastGradientClipping,
        register_grad_sampler,
    )

    def frozen_norm(
        layer: repairs.FrozenNorm, activations: list[Tensor], grad: Tensor
    ) -> dict[nn.Parameter, Tensor]:
        others = [d for d in range(1, grad.dim()) if d != grad.dim() + layer.axis]
        of_weight = grad * layer.normalise(activations[0])
        if others:
            return {layer.weight: of_weight.sum(others), layer.bias: grad.sum(others)}
        return {layer.weight: of_weight, layer.bias: grad}

    register_grad_sampler(repairs.FrozenNorm)(frozen_norm)
    model, notes = repairs.repaired(case.model, repairs.frozen_batch_norm)
    for m in model.modules():
        # Its hooks record only these; repaired, they do the same in both modes.
        m.training = any(True for _ in m.parameters(recurse=False))
    notes.append("modules with parameters in train mode")
    if ghost:
        wrapped = GradSampleModuleFastGradientClipping(
            model, loss_reduction="sum", use_ghost_clipping=True
        )
        return Contender(
            left_by_backward(wrapped, "_norm_sample", torch.square, case, cotangent), notes
        )
    wrapped = GradSampleModule(model, loss_reduction="sum")
    return Contender(
        left_by_backward(
            wrapped, "grad_sample", lambda g: g.flatten(1).square().sum(1), case, cotangent
        ),
        notes,
    )


def backpack(case: Case, cotangent: Tensor) -> Contender:
    """Run BackPACK: BatchL2Grad on the model in eval mode.

    Its in-place operations and unsupported layers are rewritten.
    """
    from backpack import backpack, extend
    from backpack.extensions import BatchL2Grad

    model, notes = repairs.repaired(case.model, repairs.layer_norm_as_batch_norm)
    run = left_by_backward(extend(model), "batch_l2", lambda t: t, case, cotangent)

    def within() -> Norms:
        with backpack(BatchL2Grad()):
            return run()

    return Contender(within, notes)


PEERS: dict[str, Callable[[Case, Tensor], Contender]] = {
    "fastlr": fastlr,
    "loop": loop,
    "vmap": vmap,
    "opacus": opacus,
    "opacus-ghost": partial(opacus, ghost=True),
    "backpack": backpack,
}


# --------------------------------------------------------------------------------------------------
# the truth
def checked_samples(batch: int) -> list[int]:
    """The samples that are held to the truth: CHECKED of them, the first and the last included.

    Examples:
        >>> checked_samples(16), checked_samples(3)
        ([0, 5, 10, 15], [0, 1, 2])
    """
    return torch.linspace(0, batch - 1, min(CHECKED, batch)).round().int().tolist()


def hold(norms: Norms, truth: Norms, samples: Sequence[int]) -> dict[str, float]:
    """Return the largest deviations of norms [B] from the truth [samples].

    They are relative to the sample's total and to the norm itself.

    Raises:
        Wrong: one is above its tolerance, or a parameter has no norm.
    """
    missing = sorted(set(truth) - set(norms))
    if missing:
        raise Wrong(f"no norm for {len(missing)} parameters, first {missing[0]}")
    want = torch.stack(list(truth.values()))
    got = torch.stack([norms[name].detach().cpu().double()[list(samples)] for name in truth])
    total = want.sum(0)
    deviation = float(((got - want).abs() / total).nan_to_num(nan=torch.inf).max())
    visible = want >= VISIBLE * total
    relative = torch.where(visible, (got / want - 1).abs(), 0.0).nan_to_num(nan=torch.inf)
    if deviation <= TOLERANCE and float(relative.max()) <= OWN_TOLERANCE:
        return {"deviation": deviation, "own_deviation": float(relative.max())}
    worst, sample = divmod(int(relative.argmax()), relative.shape[1])
    ratio = got.sum(0) / total
    ratio = ratio[(ratio - 1).abs().argmax()]
    parameter = f"{list(truth)[worst]} {float(got[worst, sample] / want[worst, sample]):.3g} times"
    raise Wrong(f"{float(ratio):.3g} times the truth ({parameter})")


def pair(model: str, peer: str, batch: int, truth: Path, device: torch.device) -> Work:
    """Return one peer beside plain on one network.

    ``truth``: the file of its float64 norms, made by the first that looks.
    """
    case = cases.build(model, batch).to(device)
    cotangent, params = cases.cotangent_for(case), list(cases.trainable(case.model).values())
    contender = PEERS[peer](case, cotangent)

    def plain() -> None:
        torch.autograd.grad(
            forward(case.model, case.x, case.kwargs.get("output")), params, cotangent
        )

    def check() -> dict[str, Any]:
        norms, samples = contender.run(), checked_samples(case.batch)
        if not truth.exists():
            exact = cases.build(model, batch)
            torch.save(
                loop_norms(cases.as_double(exact), cases.cotangent_for(exact), samples), truth
            )
        return {
            **hold(norms, torch.load(truth, weights_only=True), samples),
            "notes": contender.notes,
        }

    return Work(plain, contender.run, check, device)


# 10 s a plain pass on two cores.
SHORT = [(network, "fastlr") for network in cases.MODELS if network != "vit_b_16"]
LONG = [
    ("vit_b_16", "fastlr"),
    *((network, peer) for network in cases.PAPER for peer in PEERS if peer != "fastlr"),
]


@pytest.mark.parametrize(
    "network, peer", [*SHORT, *(pytest.param(*each, marks=pytest.mark.peer) for each in LONG)]
)
def test_peer(
    beside_plain: Callable,
    tmp_path_factory: Any,
    network: str,
    peer: str,
    device: torch.device,
    quick: bool,
) -> None:
    """A tool beside plain: right, or refused before it is timed."""
    batch = 2 if quick else BATCH
    # One for all contenders of this run.
    truth = tmp_path_factory.getbasetemp() / f"{network}-{batch}.pt"
    arguments = network, peer, batch, truth, device
    beside_plain(pair, *arguments, group=network, name=peer, rival=peer != "fastlr")
