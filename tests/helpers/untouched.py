"""What a measurement must leave alone."""

from contextlib import contextmanager

import torch
import torch.nn.functional as F

import fastlr

# What is measured of a model with three outputs for each input x.
MEASURES = {
    "norms": lambda net, x: fastlr.per_sample_grad_sq_norms(net, x, torch.ones(len(x), 3)),
    "estimate": lambda net, x: fastlr.estimate(net, fastlr.TensorInputs(x), len(x), batch_size=3),
    "report": lambda net, x: fastlr.support_report(net, x),
    "loss": lambda net, x: fastlr.redundancy_loss(net, x, seed=0),
    "dormant": lambda net, x: fastlr.metrics.dormant_ratio(net, x),
    "gradient": lambda net, x: fastlr.metrics.train_grad_norm(net, x, x[:, :3], F.mse_loss),
    "trainability": lambda net, x: fastlr.metrics.trainability(net, x, steps=1, repeats=1),
}


@contextmanager
def untouched(model):
    """Hold that a model and the random state stay the same to the bit, also where the call fails.

    Under each name is the same tensor, with the same values and gradient; flags and hooks are as
    before.
    """
    tensors, before = _tensors(model), _around(model)
    values = {name: (copy_of(t), copy_of(t.grad)) for name, t in tensors.items()}
    try:
        yield
    finally:
        there = _tensors(model)
        assert list(there) == list(tensors), "a parameter or buffer came or went"
        for name, (value, grad) in values.items():
            t = there[name]
            assert t is tensors[name] and torch.equal(t, value), f"{name} is another"
            assert (
                t.grad is grad if t.grad is None or grad is None else torch.equal(t.grad, grad)
            ), f"{name}.grad"
        assert _around(model) == before, "flags, hooks or the random state changed"


def copy_of(t):
    return None if t is None else t.detach().clone()


def _tensors(model):
    """Parameters and buffers, by each of their names."""
    both = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    return dict(both)


def _around(model):
    """The flags and the number of hooks of each module, and the random state."""
    modules = [
        (m.training, len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
        for m in model.modules()
    ]
    return [modules, [p.requires_grad for p in model.parameters()], torch.get_rng_state().tolist()]
