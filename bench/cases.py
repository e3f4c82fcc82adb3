"""Named cases (model, inputs, where the output is), shared by benchmarks and tests, and the truth they are held to.

The truth of a case is one backward pass per sample in float64: sample j is cut out of every batched input, run alone,
and every parameter's gradient of ``(output * cotangent[j]).sum()`` is squared and summed.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


@dataclasses.dataclass
class Case:
    """A model in eval mode, its inputs, and what is to come out.

    Attributes:
        model: the module, used as it is (its train/eval flags included).
        x: a tensor, a tuple (positional arguments) or a dict (keyword arguments).
        kwargs: ``output`` (a function of what the model returns), ``in_dim`` and ``out_dim``, unless the default.
        expected: ``"ok"``, an error class of fastlr.errors, or several joined by ``"|"`` of which any one is right.
        shared: names (or positions) of the inputs that have no sample axis.
        name: set by the registry.
        long: too slow for the default test run.
        kinked: in float32 some ReLU inputs are zero within rounding; their side moves gradients by over 1e-4.
    """

    model: nn.Module
    x: Any
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    expected: str = "ok"
    shared: tuple = ()
    name: str = ""
    long: bool = False
    kinked: bool = False

    @property
    def in_dim(self) -> int:
        """The sample axis of the inputs."""
        return self.kwargs.get("in_dim", 0)

    @property
    def out_dim(self) -> int:
        """The sample axis of the output."""
        return self.kwargs.get("out_dim", 0)

    @property
    def batch(self) -> int:
        """The number of samples: the size that the batched inputs have on the sample axis."""
        return max(t.shape[self.in_dim] for _, t in items(self.x) if self.is_batched(_, t))

    def is_batched(self, key: Any, tensor: Any) -> bool:
        """Whether an input has the sample axis (size 1 is broadcast to all the samples)."""
        return isinstance(tensor, Tensor) and tensor.dim() > self.in_dim and key not in self.shared


def items(x: Any) -> list[tuple[Any, Any]]:
    """The inputs as (key, value) pairs: position or keyword."""
    if isinstance(x, dict):
        return list(x.items())
    return list(enumerate(x)) if isinstance(x, (tuple, list)) else [(0, x)]


def map_inputs(x: Any, function: Callable[[Any, Any], Any]) -> Any:
    """Apply ``function(key, value)`` to every input, keeping the container."""
    if isinstance(x, dict):
        return {key: function(key, value) for key, value in x.items()}
    if isinstance(x, (tuple, list)):
        return tuple(function(key, value) for key, value in enumerate(x))
    return function(0, x)


def call(model: nn.Module, x: Any) -> Any:
    """Run the model on a tensor, a tuple of positional or a dict of keyword inputs."""
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, (tuple, list)) else model(x)


def forward(model: nn.Module, x: Any, output: Callable[[Any], Tensor] | None = None) -> Tensor:
    """Run the model and pick out its output tensor (the tensor itself, ``.logits``, ``.prediction_outputs``)."""
    result = call(model, x)
    if output is not None:
        return output(result)
    for name in ("logits", "prediction_outputs"):
        if not isinstance(result, Tensor) and getattr(result, name, None) is not None:
            return getattr(result, name)
    return result


def cut(case: Case, x: Any, samples: slice) -> Any:
    """The inputs of some samples; inputs without a sample axis, or of size 1 on it, stay whole."""
    batch = case.batch

    def take(key: Any, value: Any) -> Any:
        if not case.is_batched(key, value) or value.shape[case.in_dim] != batch:
            return value
        return value[(slice(None),) * case.in_dim + (samples,)]

    return map_inputs(x, take)


def to_dtype(x: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point inputs, leave indices and masks."""
    return map_inputs(x, lambda _, t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require grad, each under its first name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def cotangent_for(case: Case, seed: int = 1) -> Tensor:
    """A fixed random cotangent shaped like the output, the same numbers in every dtype (drawn in float32)."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        z = forward(case.model, case.x, case.kwargs.get("output"))
    return torch.randn(z.shape, generator=torch.Generator().manual_seed(seed)).to(z.dtype)


def squares(grads: list[Tensor | None], reference: Tensor) -> Tensor:
    """The squared norm of each gradient, zero where there is none, in float64: [parameters]."""
    zero = torch.zeros((), dtype=torch.float64, device=reference.device)
    return torch.stack([zero if g is None else g.to_dense().double().square().sum() for g in grads])


def loop_norms(case: Case, cotangent: Tensor, samples: list[int] | None = None) -> dict[str, Tensor]:
    """Squared gradient norm of every parameter and sample, by one backward pass per sample on that sample alone.

    Args:
        case: used in the dtype it is in; give a float64 case to get the truth.
        cotangent: shaped like the output of the whole batch.
        samples: which samples; default all.

    Returns:
        name -> [len(samples)] float64.
    """
    params = trainable(case.model)
    rows = []
    for j in range(case.batch) if samples is None else samples:
        z = forward(case.model, cut(case, case.x, slice(j, j + 1)), case.kwargs.get("output"))
        v = cotangent.narrow(case.out_dim, j, 1).to(z.dtype)
        if z.shape != v.shape:
            raise ValueError(f"{case.name!r}: one sample's output is {tuple(z.shape)}, its cotangent {tuple(v.shape)}")
        rows.append(squares(torch.autograd.grad(z, list(params.values()), v, allow_unused=True), z))
    return dict(zip(params, torch.stack(rows, 1)))


def masked_norms(case: Case, cotangent: Tensor) -> dict[str, Tensor]:
    """The same from the whole batch: per sample one backward pass whose cotangent is zero in all other samples.

    It needs no cutting of inputs, and equals :func:`loop_norms` when samples do not interact: the two check each other.
    """
    params = trainable(case.model)
    rows = []
    for j in range(case.batch):
        z = forward(case.model, case.x, case.kwargs.get("output"))
        v = torch.zeros_like(z)
        v.narrow(case.out_dim, j, 1).copy_(cotangent.narrow(case.out_dim, j, 1))
        rows.append(squares(torch.autograd.grad(z, list(params.values()), v, allow_unused=True), z))
    return dict(zip(params, torch.stack(rows, 1)))


def as_double(case: Case) -> Case:
    """The same case in float64, on a copy of the model."""
    return dataclasses.replace(case, model=copy.deepcopy(case.model).double(), x=to_dtype(case.x, torch.float64))


def deviation(got: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """Largest error of a squared norm, relative to its sample's total: max over parameters and samples."""
    if set(got) != set(truth):
        raise ValueError(f"parameters differ: {sorted(set(got) ^ set(truth))[:4]}")
    total = torch.stack(list(truth.values())).sum(0)
    error = torch.stack([(got[name].double() - truth[name]).abs() for name in truth])
    return float((error / total).nan_to_num(nan=float("inf")).max())


# ---------------------------------------------------------------------------------------------- the benchmark's models
def calibrate(model: nn.Module, x: Any) -> nn.Module:
    """Give every batch norm the statistics of this batch, so that activations and gradients have a realistic size."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [m.momentum for m in norms]
    model.eval()
    for m in norms:
        m.momentum, m.training = 1.0, True
    with torch.no_grad():
        call(model, x)
    for m, momentum in zip(norms, momenta):
        m.momentum, m.training = momentum, False
        m.running_var.clamp_(min=0.05)
    return model


def _image(build: Callable[[], nn.Module], batch: int) -> Case:
    model = build()
    x = torch.randn(batch, 3, 224, 224)
    return Case(calibrate(model, x[:4]).eval(), x)


def mobilenet_v3_large(batch: int = 16) -> Case:
    """MobileNetV3-Large with a two-class head at 224x224: the paper's image network."""
    from torchvision.models import mobilenet_v3_large as build

    return _image(lambda: build(num_classes=2), batch)


def resnet18(batch: int = 16) -> Case:
    """ResNet-18 at 224x224, a thousand classes."""
    from torchvision.models import resnet18 as build

    return _image(build, batch)


def vit_b_16(batch: int = 16) -> Case:
    """ViT-B/16 at 224x224; its zero-initialised head is drawn anew, for with it no other gradient would be nonzero."""
    from torchvision.models import vit_b_16 as build

    case = _image(build, batch)
    nn.init.normal_(case.model.heads.head.weight, std=0.02)
    return case


def patchtst(batch: int = 16) -> Case:
    """PatchTST of the paper's size: context 512, horizon 96, 7 channels, patches of 16, stride 8, 4 layers of 256."""
    from transformers import PatchTSTConfig, PatchTSTForPrediction

    config = PatchTSTConfig(
        num_input_channels=7, context_length=512, prediction_length=96, patch_length=16, patch_stride=8,
        num_hidden_layers=4, d_model=256, num_attention_heads=8, ffn_dim=512,
    )  # fmt: skip
    model = PatchTSTForPrediction(config)
    x = {"past_values": torch.randn(batch, 512, 7).cumsum(1) / 10}
    return Case(calibrate(model, x).eval(), x)


MODELS: dict[str, Callable[[int], Case]] = {
    "mobilenet_v3_large": mobilenet_v3_large,
    "resnet18": resnet18,
    "vit_b_16": vit_b_16,
    "patchtst": patchtst,
}


def build(name: str, batch: int = 16, seed: int = 0) -> Case:
    """Build a benchmark case by name, the same numbers every time."""
    if name not in MODELS:
        raise KeyError(f"no case {name!r}; there are {', '.join(MODELS)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        case = MODELS[name](batch)
    return dataclasses.replace(case, name=name)
