"""The base of all inputs: checked batches, and a description for records."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import Self

from fastlr.errors import InputError
from fastlr.ops.philox import check_range, check_seed

Batch = Tensor | tuple | dict
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class SupportsBatch(Protocol):
    """Anything that makes inputs, such as `Inputs` or a class of your own."""

    def batch(
        self,
        start: int,
        stop: int,
        /,
        *,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Any:
        """Return samples ``start .. stop-1``, as `Inputs.batch` does."""


class Inputs:
    """Base of the inputs: :meth:`batch` checks its arguments and calls ``_make``.

    Attributes:
        limit: the number of samples there are, or None where there is no end.
    """

    limit: int | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse a seed, which is no argument of fastlr's inputs."""
        if "seed" in kwargs and cls.__module__.startswith("fastlr."):
            raise InputError(
                f"{cls.__name__} has no seed, as the same inputs serve for every seed: pass seed= "
                "to fastlr.estimate, fastlr.Monitor or batch()"
            )
        return super().__new__(cls)

    def batch(
        self,
        start: int,
        stop: int,
        *,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Batch:
        """Return samples ``start .. stop-1``.

        Args:
            start: index of the first sample, from 0.
            stop: one past the last.
            seed: integer in ``[0, 2**64)``.
            device: where the batch is wanted (None: torch's default device).
            dtype: Dtype of floating-point tensors: float16, bfloat16, float32 or float64. None is
                float32. Other tensors are not cast.

        Returns:
            A tensor, a tuple (positional arguments of the model) or a dict (keyword arguments).

        Raises:
            InputError: an argument is out of range, or the range reaches beyond ``limit``.
        """
        start, stop = check_range(start, stop)
        if self.limit is not None and stop > self.limit:
            raise InputError(
                f"{type(self).__name__} has {self.limit} samples, but samples up to {stop - 1} "
                f"were asked for: ask for n <= {self.limit}, or supply more"
            )
        check_dtype(dtype)
        device = torch.get_default_device() if device is None else torch.device(device)
        return self._make(start, stop, check_seed(seed), device, dtype)

    def _make(
        self, start: int, stop: int, seed: int, device: torch.device, dtype: torch.dtype | None
    ) -> Batch:
        raise NotImplementedError(
            f"{type(self).__name__} must implement _make(start, stop, seed, device, dtype)"
        )

    def identity(self, used: int, seed: int) -> str:
        """Return a text that samples 0 .. used - 1 have in common with equal ones alone.

        It is "kind:text", and empty where nothing tells all of them: those of a subclass, unless
        it says more.
        """
        return ""

    def to_dict(self) -> dict[str, Any]:
        """Return what defines these inputs, ready for JSON: their class and its arguments.

        The class is under "inputs".
        """
        return {"inputs": type(self).__name__, **_plain(vars(self))}


def _plain(value: Any) -> Any:
    """Tuples to lists, so that a record equals itself after a round trip through JSON."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def check_dtype(dtype: torch.dtype | None) -> None:
    """Raise InputError unless a batch's dtype is floating point or None.

    None is for the source's own dtype.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise InputError(
            f"dtype must be one of float16, bfloat16, float32 and float64, got {dtype}"
        )
