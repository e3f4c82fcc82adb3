"""Opacus: gradient samples, and ghost clipping's norms. It needs repairs on every model of the benchmark."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from bench import peer_repairs as repairs
from bench.cases import Case, forward
from bench.peer_autograd import Contender


def _frozen_norm_sampler(layer: repairs.FrozenNorm, activations: list[Tensor], backprops: Tensor) -> dict:
    """Per-sample gradients of a frozen batch norm, in the form in which Opacus wants a layer's rule."""
    axis = backprops.dim() + layer.axis
    others = [d for d in range(1, backprops.dim()) if d != axis]
    total = lambda t: t.sum(others) if others else t  # noqa: E731
    found = {}
    if layer.weight.requires_grad:
        found[layer.weight] = total(backprops * layer.normalise(activations[0]))
    if layer.bias.requires_grad:
        found[layer.bias] = total(backprops)
    return found


def _repaired(case: Case) -> tuple[nn.Module, list[str]]:
    from opacus.grad_sample import register_grad_sampler

    register_grad_sampler(repairs.FrozenNorm)(_frozen_norm_sampler)
    model = repairs.prepare(case.model)
    notes = []
    for repair in (
        repairs.out_of_place,
        repairs.frozen_batch_norm,
        repairs.split_attention,
        repairs.tables_as_embeddings,
        repairs.unfold_channels,
    ):
        notes += repair(model)
    # Its hooks record only modules in train mode. Those with parameters do the same in both modes once repaired.
    for m in model.modules():
        m.training = any(True for _ in m.parameters(recurse=False))
    return model, [*notes, "modules with parameters in train mode"]


def grad_samples(case: Case, cotangent: Tensor) -> Contender:
    """GradSampleModule: every sample's gradient is formed, then squared."""
    from opacus.grad_sample import GradSampleModule

    model, notes = _repaired(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = GradSampleModule(model, loss_reduction="sum")
    params = repairs.owned(model)

    def run() -> dict[str, Tensor]:
        (forward(wrapped, case.x, case.kwargs.get("output")) * cotangent).sum().backward()
        with torch.no_grad():
            found = repairs.collect((name, p.grad_sample.flatten(1).square().sum(1)) for p, name in params)
        for p, _ in params:
            p.grad = p.grad_sample = None
        return found

    return Contender(run, notes)


def ghost(case: Case, cotangent: Tensor) -> Contender:
    """GradSampleModuleFastGradientClipping with ghost clipping: norms, without gradients where it has a rule."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    model, notes = _repaired(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum", use_ghost_clipping=True)
    params = repairs.owned(model)

    def run() -> dict[str, Tensor]:
        (forward(wrapped, case.x, case.kwargs.get("output")) * cotangent).sum().backward()
        found = repairs.collect((name, p._norm_sample.detach().square()) for p, name in params)
        for p, _ in params:
            p.grad = p._norm_sample = None
        return found

    return Contender(run, notes)
