"""All private names of PyTorch that fastlr uses.

They are in one place, so that a version that moved one is reported here and repaired here.

Each was seen in the versions of ``SEEN``, unless its line says otherwise. A name that is gone is a
`FastlrError` with the version and the remedy, when it is first needed; what fastlr cannot do
without (below "At import") when it is imported.

Not here are names with an underscore that PyTorch documents or writes to files: ``_saved_*`` of
autograd's nodes, ``Tensor._version``, ``torch._foreach_*``, and the dictionaries of ``nn.Module``
(``_parameters``, ``_buffers``, ``_modules``, its hooks).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn

from fastlr.errors import FastlrError
from fastlr.ops.modules import all_modules

SEEN = ("2.7.1", "2.11.0", "2.15.0")  # make test TORCH=...


@cache
def _get(name: str) -> Any:
    """``torch.<name>``, of a module or a class."""
    try:
        return resolve_name(f"torch.{name}")
    except (ImportError, AttributeError) as error:
        raise FastlrError(
            f"torch {torch.__version__} has no torch.{name}, which fastlr uses; it was seen in "
            f"torch {', '.join(SEEN)}: install one of these (pip install torch=={SEEN[-1]} with "
            "its torchvision), and please report this"
        ) from error


@cache
def _has(name: str) -> bool:
    try:
        _get(name)
    except FastlrError:
        return False
    return True


# -- at import
# --------------------------------------------------------------------------------------------------

_tree_flatten = _get("utils._pytree.tree_flatten")
_tree_map = _get("utils._pytree.tree_map")
tree_map_only = _get("utils._pytree.tree_map_only")
tree_unflatten = _get("utils._pytree.tree_unflatten")

BatchNorm = _get("nn.modules.batchnorm._BatchNorm")  # of any number of axes, SyncBatchNorm too
StatisticsNorm = _get("nn.modules.batchnorm._NormBase")  # that may have running statistics
Convolution = _get("nn.modules.conv._ConvNd")
HigherOrderOperator = _get("_ops.HigherOrderOperator")  # runs functions that it is given
weight_norm = _get("_weight_norm")  # that which modules call, fused on some devices

_LEAF = _tree_flatten(None)[1]  # structure of a tree that is a leaf


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of nested containers, or a tensor as its own leaf, and their structure.

    Most inputs are one tensor, for which torch's function takes longer than a small operation.
    """
    return ([tree], _LEAF) if type(tree) is Tensor else _tree_flatten(tree)


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves alone (see `tree_flatten`)."""
    return tree_flatten(tree)[0]


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to all leaves (see `tree_flatten`), and return the same containers."""
    return function(tree) if type(tree) is Tensor else _tree_map(function, tree)


# -- calls and tensors
# -------------------------------------------------------------------------------------------------


def no_torch_function() -> AbstractContextManager:
    """Within it neither modes nor subclasses see calls."""
    return _get("_C.DisableTorchFunction")()


def wrapper_subclass(kind: type, shape: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a tensor of a subclass that has no memory."""
    return _get("Tensor._make_wrapper_subclass")(kind, shape, dtype=dtype, device=device)


def is_view(tensor: Tensor) -> bool:
    """Return True if autograd knows the tensor as a view."""
    return _get("Tensor._is_view")(tensor)


def unsafe_view(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the same memory in another shape, which autograd does not know as a view."""
    return _get("ops.aten._unsafe_view")(tensor, shape)


def is_transformed(tensor: Tensor) -> bool:
    """Return True for what such a transform has put in the place of a tensor."""
    return _get("_C._functorch.is_functorch_wrapped_tensor")(tensor)


# -- autograd
# --------------------------------------------------------------------------------------------------


def saved_tensors_are_hooked(*, besides: Any = None) -> bool:
    """Return True if default hooks see what autograd's nodes save here.

    They do within a checkpointed part. Hooks that unpack by ``besides`` do not count.

    The private name was seen from 2.11.0 on; before it, that hooks cannot be disabled shows it,
    more slowly.
    """
    name = "_C._autograd._top_saved_tensors_default_hooks"
    if _has(name):
        top = _get(name)(True)
        return top is not None and top[1] is not besides
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("fastlr looks whether there are any"):
            return False
    except RuntimeError:
        return True


def distance_gradients(
    g: Tensor, points: Tensor, rows: Tensor, p: float, distances: Tensor
) -> Tensor:
    """The gradients [*, M, D] of points at their p-norm distances to rows.

    ``points`` are [*, M, D], ``g`` [*, M, T] and ``rows`` [*, T, D].
    """
    backward = _get("ops.aten._cdist_backward")
    return backward(
        g.contiguous(), points.contiguous(), rows.contiguous(), p, distances.contiguous()
    )


def output_metadata(node: Any) -> Any:
    """Return what a node's outputs were like in the forward pass.

    One object for each output, with its ``dtype`` and ``device``, whether it ``is_nested_tensor``,
    and its ``shape``, which cannot be read of all nested ones.
    """
    return node._input_metadata


def own_function(node: Any) -> type | None:
    """Return the `torch.autograd.Function` whose backward formula a node is.

    None for torch's own nodes.
    """
    return getattr(type(node), "_forward_cls", None)


# -- backends
# --------------------------------------------------------------------------------------------------


def mkldnn_enabled() -> bool:
    """Return whether oneDNN is on, also where the flags of ``torch.backends`` are frozen."""
    return _get("_C._get_mkldnn_enabled")()


def enable_mkldnn(enabled: bool) -> None:
    """Switch oneDNN on or off."""
    _get("_C._set_mkldnn_enabled")(enabled)


def cudnn_enabled() -> bool:
    """Return whether cuDNN is on, also where the flags of ``torch.backends`` are frozen."""
    return _get("_C._get_cudnn_enabled")()


def enable_cudnn(enabled: bool) -> None:
    """Switch cuDNN on or off, and change none of its other settings."""
    _get("_C._set_cudnn_enabled")(enabled)


def stop_allocating_from(pool: Any, device: int) -> None:
    """End what a CUDA graph's capture began, where it failed; in 2.7.1 under another name.

    Raises:
        RuntimeError: nothing allocates from the pool.
    """
    name = "_C._cuda_endAllocateToPool"
    _get(name if _has(name) else "_C._cuda_endAllocateCurrentStreamToPool")(device, pool)


def forget_cublas_workspaces() -> None:
    """Have the next product of each stream take a workspace anew, from where memory comes then."""
    name = "_C._cuda_clearCublasWorkspaces"
    if _has(name):
        _get(name)()


def anything_compiled() -> bool:
    """Return False if torch.compile cannot have compiled anything in this process."""
    return "torch._dynamo" in sys.modules


def compile_errors() -> tuple[type[Exception], ...]:
    """The errors of a model that torch.compile cannot compile."""
    return _get("_dynamo.exc.TorchDynamoException"), _get("_inductor.exc.InductorError")


# -- digits of products
# ------------------------------------------------------------------------------------------------

# Settings of the process, in two ways: flags, and from 2.9 on precisions by backend and operation.
# A precision that is not set reads as that of all operations of its backend, or else of all
# backends. Where flag and precision of one thing differ, reading the flag raises. The properties of
# torch.backends may be frozen; the functions below them are not.
_OPERATIONS = ("matmul", "conv", "rnn")
_BACKENDS = {"cuda": "cuda", "cpu": "mkldnn"}  # of a device's type
_NARROW = ("tf32", "bf16")


def narrow_products(device: str) -> bool:
    """Return True if the user lets float32 products have fewer digits on this type of device."""
    backend = _BACKENDS.get(device)
    if backend is None or (backend == "mkldnn" and not _cpu_multiplies_bf16()):
        return False
    if _has("_C._get_fp32_precision_getter"):
        precision = _get("_C._get_fp32_precision_getter")
        return any(precision(backend, operation) in _NARROW for operation in _OPERATIONS)
    if backend == "mkldnn":
        return _get("_C._get_float32_matmul_precision")() == "medium"
    return _get("_C._get_cudnn_allow_tf32")() or _get("_C._get_cublas_allow_tf32")()


@cache
def _cpu_multiplies_bf16() -> bool:
    """Return True if this CPU can take float32 numbers as bf16 ones, if told to."""
    return _has("ops.mkldnn") and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


# -- torch.distributed
# -------------------------------------------------------------------------------------------------


def group_store(group: Any) -> Any:
    """Return the store over which a process group was made.

    PyTorch 2.7.1 has a function for it in place of the method.
    """
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return _get("distributed.distributed_c10d._get_process_group_store")(group)


# -- torch.distributed.fsdp.fully_shard
# --------------------------------------------------------------------------------


def fully_sharded(module: nn.Module) -> bool:
    """Return True if ``fully_shard`` was applied to a module itself.

    The parameters of other modules in it may be sharded, too.
    """
    kind = _fully_sharded_class()
    return kind is not None and issubclass(type(module), kind)


def holds_fully_sharded(model: nn.Module) -> bool:
    """Return True if ``fully_shard`` was applied to a part of a model."""
    kind = _fully_sharded_class()
    return kind is not None and any([issubclass(type(m), kind) for m in all_modules(model)])


def _fully_sharded_class() -> type | None:
    """The class that ``fully_shard`` gives modules; None where its package was never imported."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)


def fully_shard_state(module: nn.Module) -> Any:
    """Return what ``fully_shard`` keeps about a module that it was applied to.

    It is the same object for all modules of one call.
    """
    return _of(module, "_get_fsdp_state")()


class Unit:
    """What ``fully_shard`` keeps about the modules that it was applied to in one call.

    Attributes:
        state: its state of them, of which the rest is read.
        modules: these.
        hooks: handles of the forward hooks that it gave them.
        policy: its MixedPrecisionPolicy.
        shards: the parameters that are its own: (the sharded parameter, [(module, name) that hold
            it]).
        mesh: Mesh of the processes that hold the shards; None where it has no parameters.
        foreign: why it cannot be gathered as plain tensors; None if it can.
    """

    def __init__(self, module: nn.Module) -> None:
        self.state = state = fully_shard_state(module)
        self.modules = [module]
        self.policy = _of(state, "_mp_policy")
        handles = [_of(state, "_pre_forward_hook_handle"), _of(state, "_post_forward_hook_handle")]
        self.hooks = [one for handle in handles for one in getattr(handle, "handles", (handle,))]
        several = getattr(state, "_fsdp_param_groups", None)  # after 2.11.0
        groups = [_of(state, "_fsdp_param_group")] if several is None else several
        managed = [
            parameter
            for group in groups
            if group is not None
            for parameter in _of(group, "fsdp_params")
        ]
        self.shards = [
            (_of(parameter, "sharded_param"), _holders(parameter)) for parameter in managed
        ]
        self.mesh = self.shards[0][0].device_mesh if self.shards else None
        self.foreign = self._foreign(managed)

    def _foreign(self, managed: list[Any]) -> str | None:
        """Return why these parameters cannot be gathered as plain tensors; None if they can."""
        shards = [shard for shard, _ in self.shards]
        if any(_of(parameter, "is_dtensor") for parameter in managed):
            return "its parameters are DTensors of tensor parallelism as well"
        if any(_of(parameter, "offload_to_cpu") for parameter in managed):
            return "its shards are offloaded to the CPU"
        if any(hasattr(shard.to_local(), "fsdp_pre_all_gather") for shard in shards):
            return "its shards are of a tensor subclass that is gathered in its own way"
        if any(shard.device_mesh != self.mesh for shard in shards):
            return "its parameters lie on several meshes"
        return None


def cast_floating(values: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in containers as ``fully_shard`` casts them.

    The containers may be of any kind, dataclasses too.
    """

    def cast(t: Tensor) -> Tensor:
        return t.to(dtype) if t.is_floating_point() else t

    return _get("distributed.utils._apply_to_tensors")(cast, values)


def _of(held: Any, name: str) -> Any:
    """An attribute of what ``fully_shard`` keeps; FastlrError if this version has no such name."""
    try:
        return getattr(held, name)
    except AttributeError:
        raise FastlrError(
            f"torch {torch.__version__} has no {type(held).__name__}.{name}, by which fastlr "
            "measures models under fully_shard; it was seen in torch 2.11.0: install that, and "
            "please report this"
        ) from None


def _holders(parameter: Any) -> list[tuple[nn.Module, str]]:
    info = _of(parameter, "_module_info")
    shared = zip(_of(info, "shared_modules"), _of(info, "shared_param_names"), strict=True)
    return [(_of(info, "module"), _of(info, "param_name")), *shared]
