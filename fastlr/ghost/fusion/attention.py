"""Self-attention of nn.MultiheadAttention without the copies that torch makes around it.

Torch moves the packed projection so that queries, keys and values are each contiguous, and its
backward pass writes a tensor of all three, mostly zeros, for each of them. Here they are views of
the projection, and their gradients are written once. The parameters are used by the same two linear
layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fastlr.ghost.fusion.arguments import by_name

ATTENTION = F.multi_head_attention_forward
_ABSENT = (
    "bias_k",
    "bias_v",
    "key_padding_mask",
    "attn_mask",
    "static_k",
    "static_v",
)  # left to torch where given
# Likewise where true.
_FALSE = ("add_zero_attn", "use_separate_proj_weight", "is_causal", "need_weights")


def self_attention_without_copies(
    func: Callable, args: tuple, kwargs: dict[str, Any]
) -> tuple[Tensor, None] | None:
    """Return the result of a call of multi_head_attention_forward (``func``).

    None if it is not a plain self-attention.

    Plain: one tensor [S, B, E] that lies in memory as [B, S, E] (batch_first), no mask, no dropout,
    no weights wanted.
    """
    given = by_name(func, args, kwargs)
    x, heads, weight = given["query"], given["num_heads"], given["in_proj_weight"]
    if x is not given["key"] or x is not given["value"]:
        return None
    if type(x) is not Tensor:  # a subclass may have its own
        return None
    if any(given[name] is not None for name in _ABSENT) or any(map(given.get, _FALSE)):
        return None
    if (given["training"] and given["dropout_p"]) or x.ndim != 3 or weight is None:
        return None
    x, width = x.transpose(0, 1), x.shape[-1]
    fits = (
        given["embed_dim_to_check"] == width
        and width % heads == 0
        and weight.shape == (3 * width, width)
    )
    lies_batch_first = x.is_contiguous()
    if not fits or not lies_batch_first:
        return None
    packed = F.linear(x, weight, given["in_proj_bias"]).unflatten(-1, (3, heads, width // heads))
    attended = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in packed.unbind(2)))
    out = F.linear(
        attended.transpose(1, 2).flatten(2), given["out_proj_weight"], given["out_proj_bias"]
    )
    return out.transpose(0, 1), None
