"""Properties of a model that the first forward pass shows and the graph of its output does not.

In: a model, and a function that runs it forward. Out: whether the pass registers hooks on tensors
(`registers_hooks`). Operators that run functions of the model, and hide from autograd what these
use, are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fastlr.errors import HiddenParameterError, few
from fastlr.ghost.fusion.pending import METADATA
from fastlr.ops.torch_private import (
    HigherOrderOperator,
    is_fake,
    is_transformed,
    tree_leaves,
    tree_map,
    untransformed,
)


def registers_hooks(model: nn.Module, run: Callable[[], Any]) -> bool:
    """Return True if a forward pass registers hooks on tensors, which may change any gradient.

    Args:
        model: Any module.
        run: Function that makes a forward pass of the model.

    Raises:
        HiddenParameterError: The model runs functions by an operator that hides what they use.
    """
    uses = _Uses(model)
    with uses:
        run()
    return uses.hooked


class _Uses(TorchFunctionMode):
    """Records whether hooks are registered on tensors.

    Operators that run a function of the model, and lose the gradients of what it uses, are refused.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.hooked = False
        self.names = {id(p): f"parameter {name}" for name, p in model.named_parameters()}
        self.within: _UsesWithin | None = None  # of the operator whose functions run now

    def __torch_function__(
        self, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # noqa: D105
        kwargs = kwargs or {}
        self.hooked |= func is Tensor.register_hook
        if isinstance(func, HigherOrderOperator):
            return self._given_all_that_it_uses(func, args, kwargs)
        return func(*args, **kwargs)

    def _given_all_that_it_uses(self, func: Callable, args: Any, kwargs: dict) -> Any:
        """Run an operator that runs functions, such as `torch.cond`.

        Raises:
            HiddenParameterError: they use tensors that it was not given, so that autograd does not
                see them. Compiled, it would be given them; fastlr runs it as it was written.
        """
        around, within = self.within, _UsesWithin(self)
        result, failure = None, None
        watched_args, watched_kwargs = tree_map(within.watched, (args, kwargs))
        try:
            self.within = within
            result = func(*watched_args, **watched_kwargs)
        except HiddenParameterError:  # of an operator that one of the functions calls
            raise
        except Exception as error:  # some refuse such tensors, each in its own words
            failure = error
        finally:
            self.within = around
        if around is not None:
            around.note(within.used.values())
        seen = _nodes_between(_last_nodes(result), _last_nodes((args, kwargs)))
        hidden = [t for t in within.used.values() if failure or not _is_among(t, seen)]
        if hidden:
            names = [self.names.get(id(t), f"a tensor of shape {tuple(t.shape)}") for t in hidden]
            raise HiddenParameterError(
                f"the model calls torch's operator {getattr(func, '__name__', func)} with a "
                f"function that uses tensors which the operator is not given ({few(names)}), so "
                "that autograd does not see them where nothing is compiled, as within fastlr: "
                "write it in plain Python, with if for torch.cond and a loop for the others"
            ) from failure
        if failure is not None:
            raise failure
        return result


class _UsesWithin(TorchFunctionMode):
    """Records which tensors that require grad an operator's functions use from outside.

    From outside are those that they are not handed and do not make themselves.

    Attributes:
        used: those tensors, by id.
    """

    def __init__(self, uses: _Uses) -> None:
        super().__init__()
        # Tensors that are handed or made are kept: another one could get the id of one that is not.
        self.uses, self.own, self.used = uses, dict[int, Tensor](), dict[int, Tensor]()

    def watched(self, given: Any) -> Any:
        """Return what an operator is given; a function so that it is watched while it runs.

        Whatever else is recorded of a forward pass is recorded there, too.
        """
        if not callable(given) or isinstance(given, (Tensor, type)):
            return given

        def run(*args: Any, **kwargs: Any) -> Any:
            self._keep((args, kwargs))
            with self.uses, self:
                return given(*args, **kwargs)

        return run

    def note(self, tensors: Iterable[Any]) -> None:
        """Record those of some tensors that are from outside."""
        for t in tensors:
            if id(t) not in self.own and _requires_grad_here(t):
                self.used[id(t)] = t

    def _keep(self, tensors: Any) -> None:
        self.own |= {id(t): t for t in tree_leaves(tensors) if _requires_grad_here(t)}

    def __torch_function__(
        self, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # noqa: D105
        kwargs = kwargs or {}
        if func in METADATA:
            return func(*args, **kwargs)
        self.note(tree_leaves((args, kwargs)))
        result = func(*args, **kwargs)
        self._keep(result)
        return result


def _requires_grad_here(t: Any) -> bool:
    """Return True for a tensor that requires grad and that no transform or tracer has made."""
    return isinstance(t, Tensor) and not is_fake(t) and not is_transformed(t) and t.requires_grad


def _last_nodes(tensors: Any) -> set:
    """Return the nodes that made some nested tensors, within a transform what it computes with."""
    return {untransformed(t).grad_fn for t in tree_leaves(tensors) if isinstance(t, Tensor)}


def _nodes_between(last: Collection[Any], first: Collection[Any]) -> set:
    """Return the last nodes of a graph and those below them down to the first, these with them."""
    stack, seen = list(last), set[Any]()
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if node not in first:
                stack += [child for child, _ in node.next_functions]
    return seen


def _is_among(t: Tensor, nodes: Collection[Any]) -> bool:
    """Return True if a tensor has a place among the nodes of a graph."""
    if t.grad_fn is not None:
        return t.grad_fn in nodes
    return any(getattr(node, "variable", None) is t for node in nodes)
