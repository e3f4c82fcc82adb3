"""Exact rewrites of a model that other tools need; each keeps the function and its gradients.

A rewrite may split a parameter (the stacked projection of an attention) or move it to another
module, so every new parameter remembers the name of the one it came from; squared norms of the
parts add up to that of the whole.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def repaired(
    model: nn.Module, *further: Callable[[nn.Module], list[str]]
) -> tuple[nn.Module, list[str]]:
    """A copy whose parameters know their names (``original``), rewritten; and what was rewritten.

    ``further``: rewrites that this tool needs beside those that all of them do.
    """
    model = copy.deepcopy(model)
    for name, p in model.named_parameters():
        p.original = name
    rewrites = (out_of_place, split_attention, tables_as_embeddings, *further, unfold_channels)
    return model, [note for rewrite in rewrites for note in rewrite(model)]


def part(original: nn.Parameter, rows: slice | int = slice(None)) -> nn.Parameter:
    """A new parameter that stands for some rows of an original one."""
    new = nn.Parameter(original[rows].detach().clone(), requires_grad=original.requires_grad)
    new.original = original.original
    return new


def replace(
    model: nn.Module, kind: type, make: Callable[[Any], nn.Module], what: str = ""
) -> list[str]:
    """Put ``make(module)`` in the place of every module of a kind; how many became what."""
    found = [name for name, m in model.named_modules() if name and isinstance(m, kind)]
    for name in found:
        model.set_submodule(name, make(model.get_submodule(name)))
    return [f"{len(found)} {what}"] if found else []


# --------------------------------------------------------------------------------------------------
# in-place operations
def out_of_place(model: nn.Module) -> list[str]:
    """Do in-place activations and residual sums out of place.

    In place they write to what backward hooks have wrapped.
    """
    from torchvision.models.mobilenetv3 import InvertedResidual
    from torchvision.models.resnet import BasicBlock

    changed = False
    for m in model.modules():
        if getattr(m, "inplace", False):
            m.inplace = False
            changed = True
        if isinstance(m, BasicBlock):
            m.forward = types.MethodType(_basic_block, m)
        if isinstance(m, InvertedResidual):
            m.forward = types.MethodType(_inverted_residual, m)
    return ["activations and residual sums out of place"] if changed else []


def _basic_block(self: nn.Module, x: Tensor) -> Tensor:
    out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
    return self.relu(out + (x if self.downsample is None else self.downsample(x)))


def _inverted_residual(self: nn.Module, x: Tensor) -> Tensor:
    return self.block(x) + x if self.use_res_connect else self.block(x)


# --------------------------------------------------------------------------------------------------
# normalisation
class FrozenNorm(nn.Module):
    """An eval-mode batch norm as it is: gamma (x - mean) / sqrt(var + eps) + beta.

    Its statistics are constants.

    They are attributes, not buffers, since Opacus refuses every module with a buffer. ``axis``
    counts from the end.
    """

    def __init__(self, norm: _BatchNorm):
        super().__init__()
        self.axis = {nn.BatchNorm2d: -3, nn.BatchNorm1d: -2, nn.BatchNorm3d: -4}[type(norm)]
        self.weight, self.bias = part(norm.weight), part(norm.bias)
        self.mean = norm.running_mean.detach().clone()
        self.scale = (norm.running_var.detach() + norm.eps).rsqrt()

    def column(self, t: Tensor) -> Tensor:
        """A [C] tensor shaped to broadcast along the channel axis."""
        return t.view(-1, *[1] * (-self.axis - 1))

    def normalise(self, x: Tensor) -> Tensor:
        """The part without parameters."""
        return (x - self.column(self.mean)) * self.column(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        return self.normalise(x) * self.column(self.weight) + self.column(self.bias)


frozen_batch_norm = partial(
    replace, kind=_BatchNorm, make=FrozenNorm, what="BatchNorm as frozen affine maps"
)


class SplitLayerNorm(nn.Module):
    """A layer norm without parameters, whose affine part is an eval-mode batch norm.

    The batch norm has mean 0 and variance 1.
    """

    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.eps = norm.eps
        self.affine = nn.BatchNorm1d(norm.normalized_shape[0], eps=2.0**-10).eval()
        self.affine.running_var.sub_(self.affine.eps)
        self.affine.weight, self.affine.bias = part(norm.weight), part(norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it; the batch norm wants its channels on axis 1."""
        x = F.layer_norm(x, x.shape[-1:], eps=self.eps)
        return self.affine(x.transpose(1, 2)).transpose(1, 2) if x.dim() == 3 else self.affine(x)


layer_norm_as_batch_norm = partial(
    replace, kind=nn.LayerNorm, make=SplitLayerNorm, what="LayerNorm by BatchNorm"
)


# ---------------------------------------------------------------------------------------------
# attention and raw tables
class SplitAttention(nn.Module):
    """nn.MultiheadAttention (batch first, self-attention) with four separate linear layers."""

    def __init__(self, attention: nn.MultiheadAttention):
        super().__init__()
        if not attention.batch_first or attention.in_proj_weight is None:
            raise ValueError(
                "only batch-first self-attention with one stacked projection is rewritten"
            )
        width, self.heads = attention.embed_dim, attention.num_heads
        for k, name in enumerate(("query", "key", "value")):
            layer, rows = nn.Linear(width, width), slice(k * width, (k + 1) * width)
            layer.weight, layer.bias = (
                part(attention.in_proj_weight, rows),
                part(attention.in_proj_bias, rows),
            )
            setattr(self, name, layer)
        self.out = nn.Linear(width, width)
        self.out.weight, self.out.bias = (
            part(attention.out_proj.weight),
            part(attention.out_proj.bias),
        )

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, **options: object
    ) -> tuple[Tensor, None]:
        """Attend; the weights are not returned."""
        q, k, v = (
            layer(t).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, t in ((self.query, query), (self.key, key), (self.value, value))
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)), None


split_attention = partial(
    replace, kind=nn.MultiheadAttention, make=SplitAttention, what="attention as linear layers"
)


class Rows(nn.Module):
    """A raw parameter [1, T, D] as an embedding, looked up with ids 0 .. T-1 for every sample."""

    def __init__(self, table: nn.Parameter):
        super().__init__()
        self.table = nn.Embedding(*table.shape[1:])
        self.table.weight = part(table, 0)

    def forward(self, batch: int) -> Tensor:
        """The table for each sample: [batch, T, D]."""
        rows = self.table.num_embeddings
        return self.table(torch.arange(rows, device=self.table.weight.device).repeat(batch, 1))


def tables_as_embeddings(model: nn.Module) -> list[str]:
    """The class token and the position table of torchvision's VisionTransformer as embeddings."""
    from torchvision.models import VisionTransformer

    if not isinstance(model, VisionTransformer):
        return []
    encoder = model.encoder
    model.token, encoder.positions = Rows(model.class_token), Rows(encoder.pos_embedding)
    del model.class_token, encoder.pos_embedding

    def encode(self: nn.Module, x: Tensor) -> Tensor:
        return self.ln(self.layers(self.dropout(x + self.positions(len(x)))))

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        x = self._process_input(x)
        return self.heads(self.encoder(torch.cat([self.token(len(x)), x], 1))[:, 0])

    encoder.forward, model.forward = (
        types.MethodType(encode, encoder),
        types.MethodType(forward, model),
    )
    return ["class token and position table as embeddings"]


# ------------------------------------------------------------------------------------------------
# channels in the batch
class Unfolded(nn.Module):
    """A layer that gets [B * channels, ...], and is given back the sample axis.

    A linear layer gets [B, channels, ...] as well.
    """

    def __init__(self, layer: nn.Module, channels: int):
        super().__init__()
        self.layer, self.channels = layer, channels

    def forward(self, x: Tensor) -> Tensor:
        """Unfold, apply, fold."""
        if isinstance(self.layer, nn.Linear):
            # As rows [B, channels * T, D]: ghost clipping has no rule for more axes.
            return self.layer(x.reshape(-1, self.channels * x.shape[-2], x.shape[-1])).reshape(
                *x.shape[:-1], -1
            )
        if isinstance(self.layer, nn.BatchNorm2d):  # channels of the norm on axis 1
            return (
                self.layer(x.unflatten(0, (-1, self.channels)).transpose(1, 2))
                .transpose(1, 2)
                .flatten(0, 1)
            )
        return self.layer(x.unflatten(0, (-1, self.channels))).flatten(0, 1)


def _second(norm: nn.BatchNorm1d) -> nn.BatchNorm2d:
    new = nn.BatchNorm2d(norm.num_features, eps=norm.eps).eval()
    new.load_state_dict(norm.state_dict())
    new.weight, new.bias = part(norm.weight), part(norm.bias)
    return new


def unfold_channels(model: nn.Module) -> list[str]:
    """Give layers of PatchTST's encoder, which run on batch times channels rows, the sample axis.

    Without this the tools give one norm per (sample, channel), and those do not add up to the norm
    of a sample.
    """
    layers = getattr(getattr(getattr(model, "model", None), "encoder", None), "layers", None)
    channels = getattr(getattr(model, "config", None), "num_input_channels", None)
    if layers is None or channels is None:
        return []
    for module in (layers, model.model.encoder.embedder):
        replace(module, nn.Linear, lambda layer: Unfolded(layer, channels))
    replace(layers, FrozenNorm, lambda layer: Unfolded(layer, channels))
    replace(layers, nn.BatchNorm1d, lambda layer: Unfolded(_second(layer), channels))
    return ["layers of the encoder on [B, channels, ...] in place of [B * channels, ...]"]
