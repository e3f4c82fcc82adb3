"""Padding in the inputs of language models: which positions have no label."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastlr.errors import InputError
from fastlr.ops.deferred_checks import refuse_where


def padding_mask(x: Any, output: Tensor, out_dim: int) -> Tensor | None:
    """Return which output positions of a language model are not padding, boolean [B, T].

    It goes by the model's inputs; None if no position is padding.

    That is what ``attention_mask`` [B, T] says of the input's tokens, ``decoder_attention_mask`` of
    a decoder's, for an output [B, T, C]; outputs with no positions have no padding.

    Raises:
        InputError: there is padding, and the output's positions are not those of the mask.
    """
    if not isinstance(x, dict) or output.ndim != 3 or out_dim != 0:
        return None
    decoder = "decoder_input_ids" in x or "decoder_attention_mask" in x
    name = "decoder_attention_mask" if decoder else "attention_mask"
    mask = x.get(name)
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return None
    counted = mask != 0
    if mask.shape == output.shape[:2]:
        return counted
    refuse_where(
        ~counted,
        lambda: InputError(
            f"{name} {tuple(mask.shape)} has padding, but the output {tuple(output.shape)} has "
            "other positions: pass Categorical(mask=...) for those that count, and inputs without "
            "the mask or without padding"
        ),
    )
    return None


def refuse_padding(x: Any) -> None:
    """Raise InputError if inputs have padding, for measures that count every position."""
    mask = x.get("attention_mask") if isinstance(x, dict) else None
    if isinstance(mask, Tensor) and not bool((mask != 0).all()):
        raise InputError(
            "x has padding (attention_mask), and these measures count every position: give "
            "sequences of one length without padding"
        )
