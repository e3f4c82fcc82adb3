"""The networks that are timed, and the truth that everything is held to; tests share both.

The truth of a case is one backward pass per sample in float64: sample j is cut out of every batched
input, run alone, and every parameter's gradient of ``(output * cotangent[j]).sum()`` is squared and
summed.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import resnet

from fastlr.models import load_model


@dataclasses.dataclass
class Case:
    """A model in eval mode, its inputs, and what is to come out.

    Attributes:
        model: the module, used as it is (its train/eval flags included).
        x: a tensor, a tuple (positional arguments) or a dict (keyword arguments).
        kwargs: ``output`` (a function of what the model returns), ``in_dim`` and ``out_dim``,
            unless the default.
        shared: names (or positions) of the inputs that have no sample axis.
        name: of the network.
    """

    model: nn.Module
    x: Any
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    shared: tuple = ()
    name: str = ""

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
        return max(t.shape[self.in_dim] for key, t in items(self.x) if self.is_batched(key, t))

    def to(self, device: torch.device) -> Case:
        """The same case on a device."""

        def move(_: Any, value: Any) -> Any:
            return value.to(device) if isinstance(value, Tensor) else value

        x = map_inputs(self.x, move)
        return dataclasses.replace(self, model=self.model.to(device), x=x)

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
    """Run the model and pick out its output: the tensor, ``.logits`` or ``.prediction_outputs``."""
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

    def cast(_: Any, t: Any) -> Any:
        return t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t

    return map_inputs(x, cast)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require grad, each under its first name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def cotangent_for(case: Case, seed: int = 1) -> Tensor:
    """Draw a fixed cotangent shaped like the output: in float32, so the same in every dtype."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        z = forward(case.model, case.x, case.kwargs.get("output"))
    return torch.randn(z.shape, generator=torch.Generator().manual_seed(seed)).to(z)


def loop_norms(
    case: Case,
    cotangent: Tensor,
    samples: list[int] | None = None,
    under: Callable[[], AbstractContextManager] = nullcontext,
) -> dict[str, Tensor]:
    """Return the squared gradient norm of every parameter and sample, by a backward pass a sample.

    Each pass is on its sample alone.

    Args:
        case: used in the dtype it is in; give a float64 case to get the truth.
        cotangent: shaped like the output of the whole batch.
        samples: which samples; default all.
        under: makes the context of each forward pass (autocast).

    Returns:
        name -> [len(samples)] float64.
    """
    params = trainable(case.model)
    rows = []
    for j in range(case.batch) if samples is None else samples:
        with under():
            z = forward(case.model, cut(case, case.x, slice(j, j + 1)), case.kwargs.get("output"))
        v = cotangent.narrow(case.out_dim, j, 1).to(z.dtype)
        if z.shape != v.shape:
            raise ValueError(
                f"{case.name!r}: one sample's output is {tuple(z.shape)}, its cotangent "
                f"{tuple(v.shape)}"
            )
        grads = torch.autograd.grad(z, list(params.values()), v, materialize_grads=True)
        rows.append(torch.stack([g.to_dense().double().square().sum() for g in grads]))
    return dict(zip(params, torch.stack(rows, 1)))


def as_double(case: Case) -> Case:
    """The same case in float64, on a copy of the model."""
    return dataclasses.replace(
        case, model=copy.deepcopy(case.model).double(), x=to_dtype(case.x, torch.float64)
    )


# --------------------------------------------------------------------------------------------------
# the networks
MAIN = "mobilenet_v3_large"
CLASSES = {MAIN: 2}  # the paper's image network has two; the others keep their thousand
RESIDUAL_GAMMA = 0.2


def calibrate(model: nn.Module, x: Any) -> nn.Module:
    """Give every batch norm the statistics of this batch, and leave the model in eval mode.

    At initialisation they are 0 and 1, so that in eval mode features shrink to nothing: gradients
    had no realistic size.
    """
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


def image_network(name: str, size: int = 224) -> nn.Module:
    """Build a network of torchvision with its head drawn anew.

    It has two classes for the paper's and a thousand for others.

    At initialisation the head's outputs are nearly 0, so that rounding is most of them, and the
    head of vit_b_16 is 0, and with it all gradients before it: biases are drawn from a normal
    distribution, weights that are zero from a narrow one.

    The last batch norm of a residual block has a gamma of `RESIDUAL_GAMMA`. With a gamma of 1,
    random blocks amplify rounding so much that ResNet-50's gradients in bfloat16 are noise.
    """
    kwargs = {"image_size": size} if name.startswith("vit") else {}
    model = load_model(name, num_classes=CLASSES.get(name), kwargs=kwargs)
    head = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    nn.init.normal_(head.bias)
    if not head.weight.any():
        nn.init.normal_(head.weight, std=0.02)
    for block in model.modules():
        if isinstance(block, resnet.Bottleneck):
            nn.init.constant_(block.bn3.weight, RESIDUAL_GAMMA)
        elif isinstance(block, resnet.BasicBlock):
            nn.init.constant_(block.bn2.weight, RESIDUAL_GAMMA)
    return model


def images(name: str, batch: int) -> Case:
    """An image network at 224x224."""
    model, x = image_network(name), torch.randn(batch, 3, 224, 224)
    return Case(calibrate(model, x[:4]), x)


def patchtst(batch: int = 16) -> Case:
    """Build PatchTST of the paper's size.

    Context 512, horizon 96, 7 channels, patches of 16, stride 8, 4 layers of 256.
    """
    from transformers import PatchTSTConfig, PatchTSTForPrediction

    config = PatchTSTConfig(
        num_input_channels=7,
        context_length=512,
        prediction_length=96,
        patch_length=16,
        patch_stride=8,
        num_hidden_layers=4,
        d_model=256,
        num_attention_heads=8,
        ffn_dim=512,
    )
    model = PatchTSTForPrediction(config)
    x = {"past_values": torch.randn(batch, 512, 7).cumsum(1) / 10}
    return Case(calibrate(model, x), x)


def gpt2(batch: int = 4) -> Case:
    """Build GPT-2 (124 M parameters, random weights) on 64 tokens a sample.

    The batch is a quarter of the usual; the output is the logits of all positions.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(use_cache=False)).eval()
    return Case(model, torch.randint(50257, (max(1, batch // 4), 64)))


def lstm(batch: int = 16) -> Case:
    """Build a two-layer LSTM of 128 units over 30 steps, whose last output is measured.

    The batch is eight times the usual.
    """
    model = nn.LSTM(64, 128, 2, batch_first=True).eval()
    return Case(model, torch.randn(8 * batch, 30, 64), {"output": lambda result: result[0][:, -1]})


MODELS: dict[str, Callable[[int], Case]] = {
    **{name: partial(images, name) for name in (MAIN, "resnet18", "vit_b_16")},
    "patchtst": patchtst,
    "gpt2": gpt2,
    "lstm": lstm,
}
PAPER = (MAIN, "resnet18", "vit_b_16", "patchtst")  # those that all peers are timed on


def build(name: str, batch: int = 16) -> Case:
    """Build one of MODELS, the same numbers every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return dataclasses.replace(MODELS[name](batch), name=name)
