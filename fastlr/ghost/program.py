"""A fingerprint of all that a model's forward pass may branch on.

The values of its trainable tensors are not in it.

In: a model. Out: 32 bytes, equal for equal contents (fastlr.ghost.reader says how values are read).

Read are modules' attributes, buffers, frozen parameters, hooks, and the code and attributes of
their classes. What cannot be seen (what the functions called by a forward pass read, state in C,
`.data` written to large tensors) is the audit's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fastlr.errors import HiddenParameterError, few
from fastlr.ghost import value_readers  # noqa: F401 - enters what reads values of each class
from fastlr.ghost.class_reader import contents
from fastlr.ghost.fusion.batch_norm import norm_arguments
from fastlr.ghost.fusion.pending import METADATA
from fastlr.ghost.introspection import attribute, bases
from fastlr.ghost.reader import Reader
from fastlr.ghost.tokens import (
    TENSORS,
    code,
    dtype_name,
    number,
    of_tensor,
    of_values,
    token_hash,
)
from fastlr.ops.model_lock import all_modules
from fastlr.ops.torch_private import (
    BatchNorm,
    HigherOrderOperator,
    InstanceNorm,
    StatisticsNorm,
    hooks_of_all_modules,
    is_fake,
    is_transformed,
    module_calls,
    tree_flatten,
    tree_leaves,
    tree_map,
    untransformed,
)

# Nn.Module's own entries.
INTERNAL = frozenset(vars(nn.Module())) - {"training"} | {"_compiled_call_impl"}
_PLAIN = (bool, int, float, str, type(None))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_STATISTICS = frozenset(("running_mean", "running_var", "num_batches_tracked"))
_NORM_FORWARDS = frozenset((BatchNorm.forward, nn.SyncBatchNorm.forward, InstanceNorm.forward))


def fingerprint(model: nn.Module, free: Collection[int] = (), *, versions: bool = True) -> bytes:
    """A hash of what a forward pass may branch on, as far as it is cheap to see.

    It is equal for equal contents.

    Of trainable parameters it knows the names and dtypes only. Not read are the running statistics
    of torch's own norm layers, which no forward pass in eval mode branches on.

    Args:
        model: any module.
        free: ids of buffers and frozen parameters whose values do not matter (see `observed`).
        versions: how often large tensors were written to counts; otherwise where they are in
            memory, as for a captured graph, which reads them there.

    Returns:
        32 bytes, to be compared within this process only.
    """
    return token_hash(_Program(free, versions).read(model))


def tensors_held(model: nn.Module) -> list[Tensor]:
    """The memory of tensors that are read beside parameters and buffers.

    It goes as far as a fingerprint sees them.
    """
    program = _Program()
    program.read(model)
    return [t.detach() for t in program.reader.tensors if type(t) in TENSORS]


def function_key(function: Any) -> bytes:
    """A hash of what a function does: its code, closure and defaults.

    Modules in them count as the objects they are.
    """
    return token_hash(Reader().top(function))


def inputs_token(x: Any, batched: Collection[int] = ()) -> bytes:
    """A hash of the inputs that a forward pass may branch on.

    These are all but large tensors and those on a GPU.

    Args:
        x: inputs, nested.
        batched: places among the flattened inputs of those that carry samples: of these the dtypes
            count.
    """
    leaves, spec = tree_flatten(x)
    reader = Reader()

    def token(i: int, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return reader.top(leaf)
        if i in batched:
            return dtype_name(leaf.dtype), leaf.ndim
        return of_values(leaf.detach()) if leaf.ndim else of_tensor(leaf.detach().cpu())

    return token_hash((repr(spec), *(token(i, leaf) for i, leaf in enumerate(leaves))))


class _Program:
    """Reads one model, once."""

    def __init__(self, free: Collection[int] = (), versions: bool = True) -> None:
        self.reader = Reader(self.module, versions)
        # And the trainable parameters, whatever holds them.
        self.free = self.reader.free = set(free)
        self.known: dict[int, int] = {}  # id of a module -> its place

    def read(self, model: nn.Module) -> tuple:
        """The token of the model.

        It holds its modules' classes and the hooks that all modules have, too.
        """
        whole = self.whole(model)
        classes, settled = list[tuple](), list[bytes]()
        # What a class holds may be of classes that were not met before.
        while kinds := list(self.reader.classes.values())[len(classes) :]:
            token, others = contents(kinds)
            read = map(self.reader.named, others)
            classes += zip(map(number, kinds), read, strict=True)
            settled.append(token)
        calls = [code(f.__code__).number for f in module_calls() if type(f) is FunctionType]
        hooks = [self.reader.top(tuple(registry.values())) for registry in hooks_of_all_modules()]
        self.reader.let_go()
        return whole, *classes, *settled, *calls, *hooks

    def module(self, module: nn.Module) -> Any:
        """The token of a module that is held in an attribute.

        It is the module's place, or where it has none all that it holds.
        """
        place = self.known.get(id(module))
        return place if place is not None else (number(module), self.whole(module))

    def whole(self, model: nn.Module) -> tuple:
        """The tokens of a model's modules, except those that were read before."""
        modules = [module for module in all_modules(model) if id(module) not in self.known]
        for module in modules:
            self.known[id(module)] = len(self.known)
            self.free.update(
                [id(p) for p in module._parameters.values() if p is not None and p.requires_grad]
            )
        return tuple([self.one(module) for module in modules])

    def one(self, module: nn.Module) -> tuple:
        """The token of one module: what it holds itself, and which modules."""
        kind, held, top = type(module), vars(module), self.reader.top
        if id(kind) not in self.reader.classes:
            self.reader.meet([k for k in bases(kind) if k is not nn.Module and k is not object])
        tokens: list[Any] = [number(kind)]
        tokens += self.reader.named(held.items(), but=INTERNAL)
        for name, child in module._modules.items():
            tokens += name, None if child is None else self.known[id(child)]
        for name, p in module._parameters.items():
            tokens += name, None if p is None else self.parameter(p)
        if module._buffers:
            torch_norm = (
                isinstance(module, StatisticsNorm)
                and kind.forward in _NORM_FORWARDS
                and "forward" not in held
            )
            for name, b in module._buffers.items():
                tokens += (
                    name,
                    None if b is None else self.buffer(b, torch_norm and name in _STATISTICS),
                )
        for name in _HOOKS:
            if held.get(name):
                tokens += name, top(tuple(held[name].values()))
        return tuple(tokens)

    def buffer(self, b: Tensor, statistic: bool) -> Any:
        """The token of a buffer.

        Of one that is free, or a statistic of torch's own norm layers, it is the dtype.
        """
        return (
            dtype_name(b.dtype)
            if statistic or id(b) in self.free
            else of_tensor(b, self.reader.versions)
        )

    def parameter(self, p: Tensor) -> tuple:
        """The token of a parameter and its hooks."""
        hooks = self.reader.top(tuple(p._backward_hooks.values())) if p._backward_hooks else ()
        if id(p) in self.free:
            return dtype_name(p.dtype), p.requires_grad, hooks
        return of_tensor(p, self.reader.versions), hooks


# -- batch norm's statistics
# -------------------------------------------------------------------------------------------


class _Uses(TorchFunctionMode):
    """Records what buffers enter: batch norm as running statistics, or anything else.

    Hooks of gradients are recorded, too. Operators that run a function of the model, and lose the
    gradients of what it uses, are refused.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.buffers = frozenset(map(id, model.buffers()))
        self.statistics, self.others = set[int](), set[int]()
        self.hooked = False
        self.names = {id(p): f"parameter {name}" for name, p in model.named_parameters()}
        self.within: _UsesWithin | None = None  # of the operator whose functions run now

    def __torch_function__(
        self, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # noqa: D105
        kwargs = kwargs or {}
        self.hooked |= func is Tensor.register_hook
        if func not in METADATA:
            buffers = self.buffers.intersection(map(id, tree_leaves((args, kwargs))))
            statistics = set[int]()
            if func is F.batch_norm:
                given = norm_arguments(args, kwargs)
                if not given["training"]:
                    statistics = {id(given["running_mean"]), id(given["running_var"])}
            self.statistics |= buffers & statistics
            self.others |= buffers - statistics
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


def observed(model: nn.Module, run: Callable[[], Any]) -> tuple[frozenset[int], bool]:
    """The facts of a forward pass that its graph does not show.

    These are free buffers, and hooks of gradients.

    Args:
        model: any module.
        run: makes a forward pass of it.

    Raises:
        HiddenParameterError: it runs functions by an operator that hides what they use.

    Returns:
        Ids of the buffers that enter `torch.nn.functional.batch_norm` as running statistics in eval
        mode and nothing else, with them those that count batches for norm layers, where nothing
        reads them: these move at every training step and change nothing of the program. And whether
        tensors are given hooks, which may do anything to gradients.
    """
    uses = _Uses(model)
    with uses:
        run()
    counters = {
        id(b)
        for m in all_modules(model)
        for name, b in m._buffers.items()
        if name == "num_batches_tracked" and isinstance(m, StatisticsNorm)
    }
    return frozenset((uses.statistics | counters) - uses.others), uses.hooked


# -- hooks
# --------------------------------------------------------------------------------------------------


def hook_programs(model: nn.Module) -> tuple:
    """The code of the hooks that modules and parameters have.

    For each: whose it is, of which kind, and its code without what it was given.
    """
    found: list[tuple[int, str, dict]] = []
    for module in all_modules(model):
        held = vars(module)
        found += [(id(module), kind, held[kind]) for kind in _HOOKS if held.get(kind)]
        for name, p in module._parameters.items():
            if p is not None and p._backward_hooks:
                found.append((id(module), name, p._backward_hooks))
    return tuple(
        [(whose, kind, tuple(map(_program, hooks.values()))) for whose, kind, hooks in found]
    )


def _program(hook: Any) -> int:
    """The number of a hook's code, or of its class where it is no function written in Python."""
    function = hook.__func__ if type(hook) is MethodType else hook
    held = attribute(function, "__code__")
    return code(held).number if type(held) is CodeType else number(type(function))


# -- numbers that modules hold
# -----------------------------------------------------------------------------------------


def own_attributes(module: nn.Module) -> bytes:
    """Of one module: a hash of the attributes that are plain values."""
    plain = [(name, value) for name, value in vars(module).items() if is_plain(value)]
    return token_hash(tuple(Reader().named(plain)))


def is_plain(value: Any) -> bool:
    """Return True if a value is a number, a string, None, or a tuple of such, or of a subclass."""
    kind = type(value)
    if issubclass(kind, tuple):
        return all(map(is_plain, tuple.__iter__(value)))
    return issubclass(kind, _PLAIN)
