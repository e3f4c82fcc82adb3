"""PatchTST: the transformer over patches of a time series that the paper forecasts with.

Source: paper, section 4.2 and appendix A.2.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastlr.errors import InputError, install

# Names here and in Hugging Face's configuration.
_SIZES = {
    "channels": "num_input_channels",
    "context": "context_length",
    "horizon": "prediction_length",
    "patch": "patch_length",
    "stride": "patch_stride",
    "layers": "num_hidden_layers",
    "width": "d_model",
    "heads": "num_attention_heads",
    "ffn": "ffn_dim",
}
_RATES = ("positional_dropout", "path_dropout", "ff_dropout")
_SMALLEST_VARIANCE = 1e-5  # added to a window's variance, as Hugging Face does


class PatchTST(nn.Module):
    """PatchTST as Hugging Face's ``PatchTSTForPrediction`` computes it by default.

    Source: Nie et al. 2023, arXiv:2211.14730.

    Each channel of each window is a sequence of its own: it is brought to mean 0 and variance 1
    over the context, cut into patches, and each patch becomes a token by one linear layer and a
    sine-cosine table of positions. Then pre-norm encoder layers (batch norm over all tokens,
    attention, GELU), the mean over the tokens, one linear layer, and the window's mean and
    deviation put back. Channels share all weights and lie folded into the batch.

    Parameters with the defaults, which are the paper's:

    ========================  ===========================================================  =========
    embedding                 16 x 256 + 256                                                   4,352
    4 layers                  attention 4 (256 x 256 + 256) = 263,168; feed-forward
                              256 x 512 + 512 + 512 x 256 + 256 = 262,912; two batch
                              norms 4 x 256 = 1,024: 527,104 each                          2,108,416
    head                      256 x 96 + 96, from the mean over the patches                   24,672
    in all, trainable                                                                      2,137,440
    table of positions        63 x 256, fixed unless ``learned_positions``                    16,128
    ========================  ===========================================================  =========

    Hugging Face's model holds 2,153,568: the same with its fixed table of positions, which is a
    parameter there without a gradient. The paper says "approximately 2.26M"; no setting of Hugging
    Face's model that agrees with the sizes it names has as many, so what the 0.12 M are is not
    known: a table is in the guide "Reproduce the paper".

    Args:
        channels: Features of the series.
        context: Time steps that are seen; the first ``(context - patch) % stride`` of them only
            serve the scaling.
        horizon: Time steps that are forecast.
        patch: Time steps a patch.
        stride: From patch to patch.
        layers: Number of layers of the encoder.
        width: Size of a token.
        heads: Number of heads of the attention.
        ffn: Units of the feed-forward part.
        dropout: After the positions, each sublayer and the GELU; none on attention weights, as in
            Nie et al.
        learned_positions: Make the table of positions a parameter.

    Weights are drawn as Hugging Face does: normal with standard deviation 0.02, biases zero.

    Shapes: windows ``[B, context, channels]`` -> forecasts ``[B, horizon, channels]``, in the unit
    of the windows.

    Raises:
        InputError: Sizes that do not fit; windows of another shape.

    Example:
        >>> model = PatchTST()
        >>> sum(p.numel() for p in model.parameters())
        2137440
        >>> model.eval()(torch.zeros(2, 512, 7)).shape
        torch.Size([2, 96, 7])
    """

    position: Tensor

    def __init__(
        self,
        channels: int = 7,
        context: int = 512,
        horizon: int = 96,
        patch: int = 16,
        stride: int = 8,
        layers: int = 4,
        width: int = 256,
        heads: int = 8,
        ffn: int = 512,
        dropout: float = 0.1,
        learned_positions: bool = False,
    ) -> None:
        super().__init__()
        counts = {"channels": channels, "horizon": horizon, "patch": patch, "stride": stride}
        counts |= {"layers": layers, "heads": heads, "ffn": ffn}
        for name, size in counts.items():
            if size < 1:
                raise InputError(f"{name}={size}: give at least 1")
        if context <= patch:
            raise InputError(f"context={context} is no longer than a patch of {patch}: give more")
        if width < 2 or width % 2 or width % heads:
            raise InputError(f"width={width}: give an even multiple of heads={heads}")
        if not 0 <= dropout < 1:
            raise InputError(f"dropout={dropout}: give a number in [0, 1)")
        self.channels, self.context, self.horizon, self.patch, self.stride = (
            channels,
            context,
            horizon,
            patch,
            stride,
        )
        self.patches = (context - patch) // stride + 1
        self.embedding = nn.Linear(patch, width)
        table = _sine_cosine(self.patches, width)
        if learned_positions:
            self.position = nn.Parameter(table)
        else:
            self.register_buffer("position", table)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(EncoderLayer(width, heads, ffn, dropout) for _ in range(layers))
        self.head = nn.Linear(width, horizon)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:  # [B, context, channels] -> [B, horizon, channels]
        """Return the forecasts."""
        if x.ndim != 3 or tuple(x.shape[1:]) != (self.context, self.channels):
            raise InputError(
                f"windows of shape {tuple(x.shape)}, but the network is made for [B, "
                f"{self.context}, {self.channels}]: make it with the context and the channels of "
                "the data"
            )
        mean = x.mean(1, keepdim=True)
        scale = ((x - mean).square().mean(1, keepdim=True) + _SMALLEST_VARIANCE).sqrt()
        used = self.patch + self.stride * (self.patches - 1)
        z = ((x - mean) / scale)[:, self.context - used :].transpose(1, 2)
        # [B, channels, patches, width].
        tokens = self.embedding(z.unfold(2, self.patch, self.stride))
        h = self.dropout(tokens + self.position.to(tokens.dtype)).flatten(0, 2)
        for layer in self.layers:
            h = layer(h, self.patches)
        forecast = self.head(h.view(len(x), self.channels, self.patches, -1).mean(2))
        return forecast.transpose(1, 2) * scale + mean


class EncoderLayer(nn.Module):
    """One pre-norm layer of the encoder on tokens ``[sequences x patches, width]``.

    The batch norms take their statistics over all tokens of a batch, of all windows and channels.
    """

    def __init__(self, width: int, heads: int, ffn: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.BatchNorm1d(width), nn.BatchNorm1d(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, ffn), nn.Linear(ffn, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, h: Tensor, patches: int) -> Tensor:  # [sequences x patches, width]
        """Return the tokens after self-attention and the feed-forward part.

        Attention is within each sequence of ``patches`` tokens.
        """
        width = h.shape[1]
        qkv = self.qkv(self.norm1(h)).view(-1, patches, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, width)
        h = h + self.dropout(self.mix(attended))
        units = self.dropout(F.gelu(self.expand(self.norm2(h))))
        return h + self.dropout(self.contract(units))


def hugging_face(dropout: float = 0.1, **sizes: int) -> nn.Module:
    """Return Hugging Face's ``PatchTSTForPrediction`` with the settings of `PatchTST`.

    What `PatchTST` does not set has Hugging Face's default.

    Args:
        dropout: As in `PatchTST`.
        sizes: Any of its ``channels, context, horizon, patch, stride, layers, width, heads, ffn``;
            its defaults.

    Raises:
        InputError: transformers is not installed, or there is no such size.
    """
    try:
        from transformers import PatchTSTConfig, PatchTSTForPrediction
    except ImportError as error:
        raise InputError(
            f"Hugging Face's PatchTST needs transformers: {install('models')}"
        ) from error
    if unknown := sorted(set(sizes) - set(_SIZES)):
        raise InputError(f"PatchTST has no {', '.join(unknown)}: choose from {', '.join(_SIZES)}")
    defaults = inspect.signature(PatchTST).parameters
    settings: dict[str, Any] = {
        theirs: sizes.get(ours, defaults[ours].default) for ours, theirs in _SIZES.items()
    }
    settings |= {name: dropout for name in _RATES}
    return PatchTSTForPrediction(PatchTSTConfig(**settings))


def size_beside_the_papers(parameters: int) -> list[str]:
    """Return the number of parameters beside the paper's, in a list that is empty if they agree.

    The paper's is that of its transfer experiment (appendix A.2).

    Example:
        >>> size_beside_the_papers(2137440), size_beside_the_papers(2261234)
        (['2,137,440 parameters for about 2.26 million'], [])
    """
    same = round(parameters / 1e6, 2) == 2.26
    return [] if same else [f"{parameters:,} parameters for about 2.26 million"]


def _sine_cosine(patches: int, width: int) -> Tensor:  # [patches, width]
    """Return Hugging Face's table of positions, ``[patches, width]``.

    It has sines and cosines, centred, at a standard deviation of 0.1.
    """
    position = torch.arange(patches)[:, None]
    rate = torch.exp(torch.arange(0, width, 2) * -(math.log(10000.0) / width))
    table = torch.stack([torch.sin(position * rate), torch.cos(position * rate)], 2).flatten(1)
    table = table - table.mean()
    return table / (table.std() * 10)
