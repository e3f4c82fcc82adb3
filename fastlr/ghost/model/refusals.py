"""What a model raises when it is called, as an error that says what to do.

It names the inputs that the model was given.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fastlr.errors import FastlrError, InputError, ModelError, first_line
from fastlr.ghost.model.batch import copied
from fastlr.ghost.model.view import FAILURES, ModelView
from fastlr.ops.deferred_checks import out_of_memory
from fastlr.ops.torch_private import tree_leaves

_OF_SHAPES = (
    "shape",
    "size",
    "dimension",
    "channel",
    "length",
    "broadcast",
    "expand",
    "mat1",
    "expected",
    "element",
)

NORMS_OF_ONE_SAMPLE = (
    "train it with track_running_stats=True, or use nn.GroupNorm, which norms each sample alone"
)


@contextmanager
def refusals(view: ModelView, x: Any) -> Iterator[None]:
    """Turn what the model raises for inputs x into fastlr's error.

    Only if it raises also when it runs alone. The model's exception is the cause.

    Raises:
        InputError: the inputs are not those that the model is made for, as far as its exception
            tells.
        ModelError: its forward pass fails for another reason.

    Anything else that is raised within stays what it is: fastlr's own errors, lack of memory,
    failures of other code.
    """
    try:
        yield
    except FAILURES as error:
        if isinstance(error, FastlrError) or out_of_memory(error):
            raise
        try:
            view.forward(copied(x))
        except FAILURES as raised:
            if isinstance(raised, FastlrError) or out_of_memory(raised):
                raise error from None
            raise _refusal(view, x, raised) from raised
        raise


def _refusal(view: ModelView, x: Any, error: Exception) -> FastlrError:
    model, device = view.module, view.device.type
    if torch.is_autocast_enabled(device) and _runs_without_autocast(view, x):
        return InputError(
            f"the model runs, but not in {_name(torch.get_autocast_dtype(device))} on this device "
            f"({first_line(error)}): leave dtype out, or the region of autocast"
        )
    raised = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    text = f"{type(model).__name__} does not run on {_given(x)} ({raised})"
    remedy = _remedy(model, x, error)
    return ModelError(text) if remedy is None else InputError(f"{text}. {remedy}")


def _runs_without_autocast(view: ModelView, x: Any) -> bool:
    """Return True if the model takes the inputs in its own precision."""
    try:
        with torch.autocast(view.device.type, enabled=False):
            view.forward(copied(x))
    except FAILURES:
        return False
    return True


def _given(x: Any) -> str:
    """The inputs by dtype and shape, as the model gets them."""
    if isinstance(x, dict):
        return ", ".join(f"{name}={_one(value)}" for name, value in x.items())
    return f"({', '.join(map(_one, x))})" if isinstance(x, tuple) else f"an input {_one(x)}"


def _one(value: Any) -> str:
    return (
        f"{_name(value.dtype)}{list(value.shape)}"
        if isinstance(value, Tensor)
        else type(value).__name__
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _remedy(model: nn.Module, x: Any, error: Exception) -> str | None:
    """Return what to do about an exception of a forward pass of x; None where it does not tell."""
    if "nference tensor" in str(error):
        return (
            "Build and load the model outside of torch.inference_mode(), whose tensors autograd "
            "refuses"
        )
    if "more than 1 value per channel" in str(error):
        return f"A batch norm has no running statistics: {NORMS_OF_ONE_SAMPLE}"
    if isinstance(x, dict) and "adapter_names" in x:
        return (
            "adapter_names is no tensor, so its samples cannot be picked: measure the samples of "
            "each adapter apart, after model.set_adapter(name)"
        )
    remedy = _of_arguments(model, x, error) or _of_tokens(model, x, error)
    remedy = remedy or _of_dtypes(model, x, error)
    if remedy is None and any(word in str(error).lower() for word in _OF_SHAPES):
        return (
            "Give inputs for which the model runs, of the size that it was built for, with an axis "
            "of samples (x[None] for a single one)"
        )
    return remedy


def _of_arguments(model: nn.Module, x: Any, error: Exception) -> str | None:
    """Return what to do where forward takes other arguments."""
    if not isinstance(error, TypeError):
        return None
    if isinstance(x, dict):
        return (
            f"The inputs go by name ({', '.join(x)}), but forward takes ({_parameters(model)}): "
            "give them under these names, or by position: fastlr.TokenInputs(..., name=None), or "
            "fastlr.TensorInputs of a tensor"
        )
    if isinstance(x, tuple) and len(x) > 1:
        return (
            f"The inputs are {len(x)} positional arguments, but forward takes "
            f"({_parameters(model)}): where a data set's items are (input, label), pass "
            "fastlr.TensorInputs(dataset, item=0); of a tuple pass the input alone; of a loader "
            "take the inputs: (x for x, _ in loader)"
        )
    return None


def _of_tokens(model: nn.Module, x: Any, error: Exception) -> str | None:
    """Return what to do where an embedding gets no tokens, or too large ones."""
    if "indices" in str(error) and any(dtype.is_floating_point for dtype in _dtypes(x)):
        return (
            "An embedding takes integers: give tokens, such as fastlr.TokenInputs or int64 in "
            "fastlr.TensorInputs"
        )
    embeddings = [m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    if isinstance(error, IndexError) and embeddings:
        rows = [embedding.num_embeddings for embedding in embeddings]
        return (
            f"A token is beyond the rows of an embedding (the model's have {rows}): lower "
            "vocab_size"
        )
    return None


def _of_dtypes(model: nn.Module, x: Any, error: Exception) -> str | None:
    """Return what to do where the inputs have another dtype than the model."""
    held = {p.dtype for p in model.parameters() if p.is_floating_point()}
    other = sorted(map(_name, _dtypes(x) - held))
    named = "type" in str(error) or "not implemented for" in str(error)
    if not other or not named:
        return None
    how = "one of them"
    if "uint8" in other:
        how = "the inputs by x.float() / 255 if they are bytes of images"
    return (
        f"The inputs are {', '.join(other)}, the model is {', '.join(sorted(map(_name, held)))}: "
        f"convert {how}"
    )


def _dtypes(x: Any) -> set[torch.dtype]:
    return {t.dtype for t in tree_leaves(x) if isinstance(t, Tensor)}


def _parameters(model: nn.Module) -> str:
    return ", ".join(inspect.signature(model.forward).parameters)
