"""Operators that run functions of a model, and hide from autograd what these use.

`torch.cond`, `torch.while_loop` and the like are made for compiled code, which hands them all
tensors that their functions use. Fastlr runs models as they were written: there autograd does not
see the parameters that such a function takes from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from fastlr.errors import HiddenParameterError, few
from fastlr.ops.torch_private import HigherOrderOperator, is_transformed, tree_leaves, tree_map


def runs_functions(func: Callable) -> bool:
    """Return True for an operator that runs functions."""
    return isinstance(func, HigherOrderOperator)


def run_watched(func: Callable, args: Any, kwargs: Any, names: Mapping[int, str]) -> Any:
    """Run such an operator.

    Args:
        func: Operator.
        args: Its arguments.
        kwargs: Its keyword arguments.
        names: Names of the model's parameters by their ids.

    Raises:
        HiddenParameterError: Its functions read parameters.
    """
    if any(isinstance(t, Tensor) and is_transformed(t) for t in tree_leaves((args, kwargs))):
        return func(*args, **kwargs)  # vmap runs both branches, which autograd sees
    reads = _Reads(names)
    try:
        result = reads.run(func, args, kwargs)
    except Exception:  # some operators refuse such parameters, each in its own words
        reads.refuse(func)
        raise
    reads.refuse(func)
    return result


class _Reads(TorchFunctionMode):
    """Records which parameters are read by functions that operators run."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.names, self.found = names, set[str]()

    def run(self, func: Callable, args: Any, kwargs: Any) -> Any:
        """Run an operator with its functions watched."""
        args, kwargs = tree_map(self._watched, (args, kwargs))
        return func(*args, **kwargs)

    def refuse(self, func: Callable) -> None:
        """Raise HiddenParameterError if functions of an operator have read parameters."""
        if self.found:
            raise HiddenParameterError(
                f"the model calls torch's operator {getattr(func, '__name__', func)} with a "
                f"function that uses {few(sorted(self.found))}, which autograd does not see where "
                "nothing is compiled, as within fastlr: write it in plain Python, with if for "
                "torch.cond and a loop for the others"
            )

    def _watched(self, given: Any) -> Any:
        if not callable(given) or isinstance(given, (Tensor, type)):
            return given

        def watched(*args: Any, **kwargs: Any) -> Any:
            with self:
                return given(*args, **kwargs)

        return watched

    def __torch_function__(
        self, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # noqa: D105
        kwargs = kwargs or {}
        read = map(self.names.get, map(id, tree_leaves((args, kwargs))))
        self.found.update(f"parameter {name}" for name in read if name is not None)
        return self.run(func, args, kwargs) if runs_functions(func) else func(*args, **kwargs)
