"""A fingerprint of all that a model's forward pass may branch on.

The values of its trainable tensors are not in it.

In: a model. Out: 32 bytes, equal for equal contents (fastlr.ghost.reader says how values are read).

Read are modules' attributes, buffers, frozen parameters, hooks, and the code and attributes of
their classes. What cannot be seen (what the functions called by a forward pass read, state in C,
`.data` written to large tensors) is the audit's.
"""

from __future__ import annotations

from collections.abc import Collection
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from fastlr.ghost import value_readers  # noqa: F401 - enters what reads values of each class
from fastlr.ghost.class_reader import contents
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
    InstanceNorm,
    StatisticsNorm,
    hooks_of_all_modules,
    module_calls,
    tree_flatten,
)

# Nn.Module's own entries.
INTERNAL = frozenset(vars(nn.Module())) - {"training"} | {"_compiled_call_impl"}
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
        free: ids of buffers and frozen parameters whose values do not matter (see
            `fastlr.ghost.first_pass.observed`).
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
