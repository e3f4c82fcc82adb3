"""All private names of PyTorch that fastlr uses, so that a version that moved one is told of here and repaired here.

Each was seen in the versions of ``SEEN``, unless its line says otherwise. A name that is gone is a `FastlrError` with the
version and the remedy, when it is first needed; what fastlr cannot do without (below "At import") when it is imported.

Not here are names with an underscore that PyTorch documents or writes to files: ``_saved_*`` of autograd's nodes,
``Tensor._version``, ``torch._foreach_*``, and the dictionaries of ``nn.Module`` (``_parameters``, ``_buffers``, ``_modules``,
its hooks).
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from functools import cache
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from fastlr.errors import FastlrError

SEEN = ("2.7.1", "2.11.0", "2.15.0")  # make test TORCH=...
_CALLS = ("__call__", "_call_impl", "_wrapped_call_impl", "__getattr__")
_HOOKS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")


@cache
def _get(name: str) -> Any:
    """``torch.<name>``, of a module or a class."""
    try:
        return resolve_name(f"torch.{name}")
    except (ImportError, AttributeError) as error:
        raise FastlrError(
            f"torch {torch.__version__} has no torch.{name}, which fastlr uses; it was seen in torch {', '.join(SEEN)}: "
            f"install one of these (pip install torch=={SEEN[-1]} with its torchvision), and please report this"
        ) from error


@cache
def _has(name: str) -> bool:
    try:
        _get(name)
    except FastlrError:
        return False
    return True


# -- at import ---------------------------------------------------------------------------------------------------------

tree_flatten = _get("utils._pytree.tree_flatten")
tree_leaves = _get("utils._pytree.tree_leaves")
tree_map = _get("utils._pytree.tree_map")
tree_map_only = _get("utils._pytree.tree_map_only")
tree_unflatten = _get("utils._pytree.tree_unflatten")

BatchNorm = _get("nn.modules.batchnorm._BatchNorm")  # of any number of axes, SyncBatchNorm too
StatisticsNorm = _get("nn.modules.batchnorm._NormBase")  # that may have running statistics
InstanceNorm = _get("nn.modules.instancenorm._InstanceNorm")
Convolution = _get("nn.modules.conv._ConvNd")

for _name in (*(f"nn.modules.module._global_{kind}" for kind in _HOOKS), *(f"nn.Module.{name}" for name in _CALLS)):
    _get(_name)  # read anew at every call, as they may be replaced


# -- calls and tensors -------------------------------------------------------------------------------------------------


def no_torch_function() -> AbstractContextManager:
    """Within it neither modes nor subclasses see calls."""
    return _get("_C.DisableTorchFunction")()


def no_torch_function_of_subclasses() -> AbstractContextManager:
    """Within it subclasses do not see calls."""
    return _get("_C.DisableTorchFunctionSubclass")()


def wrapper_subclass(kind: type, shape: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a tensor of a subclass that has no memory."""
    return _get("Tensor._make_wrapper_subclass")(kind, shape, dtype=dtype, device=device)


def is_view(tensor: Tensor) -> bool:
    """Return True if autograd knows the tensor as a view."""
    return _get("Tensor._is_view")(tensor)


def within_transform() -> bool:
    """Return True within a function that a transform of torch.func (vmap, grad, jvp) runs."""
    return _get("_C._functorch.maybe_current_level")() is not None


def is_transformed(tensor: Tensor) -> bool:
    """Return True for what such a transform has put in the place of a tensor."""
    return _get("_C._functorch.is_functorch_wrapped_tensor")(tensor)


# -- autograd ----------------------------------------------------------------------------------------------------------


def saved_tensors_are_hooked(but: tuple[Any, Any] | None = None) -> bool:
    """Return True if what nodes save goes through default hooks here, as within a checkpointed part; not if they are ``but``.

    The private name was seen from 2.11.0 on; before it, that hooks cannot be disabled shows it, more slowly.
    """
    name = "_C._autograd._top_saved_tensors_default_hooks"
    if _has(name):
        return _get(name)(True) not in (None, but)
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("fastlr looks whether there are any"):
            return False
    except RuntimeError:
        return True


def run_backward(z: Tensor, inputs: Any, v: Tensor, *, retain: bool) -> tuple[Tensor | None, ...]:
    """As torch.autograd.grad, which modes of torch functions see and are then off for all that runs within it."""
    run = _get("autograd.graph._engine_run_backward")
    return run((z,), (v,), retain, False, tuple(inputs), True, accumulate_grad=False)


def output_metadata(node: Any) -> Any:
    """Of each output of a node in the forward pass: an object with its ``shape``, ``dtype`` and ``device``."""
    return node._input_metadata


def own_function(node: Any) -> type | None:
    """Return the `torch.autograd.Function` whose backward formula a node is; None for torch's own nodes."""
    return getattr(type(node), "_forward_cls", None)


# -- modules -----------------------------------------------------------------------------------------------------------


def hooks_of_all_modules() -> list[dict]:
    """The registries of global module hooks."""
    return [getattr(torch_module, f"_global_{kind}") for kind in _HOOKS]


def module_calls() -> list[Any]:
    """The functions of ``nn.Module`` through which every forward pass goes."""
    return [vars(nn.Module)[name] for name in _CALLS]


# -- backends ----------------------------------------------------------------------------------------------------------


def fused_recurrence() -> tuple[bool, bool]:
    """Whether oneDNN and cuDNN are on; unlike ``torch.backends`` also where its flags are frozen."""
    return _get("_C._get_mkldnn_enabled")(), _get("_C._get_cudnn_enabled")()


def set_fused_recurrence(mkldnn: bool, cudnn: bool) -> None:
    """Switch oneDNN and cuDNN on or off."""
    _get("_C._set_mkldnn_enabled")(mkldnn)
    _get("_C._set_cudnn_enabled")(cudnn)


def stop_allocating_from(pool: Any, device: int) -> None:
    """End what a CUDA graph's capture began, where it failed; in 2.7.1 under another name.

    Raises:
        RuntimeError: nothing allocates from the pool.
    """
    name = "_C._cuda_endAllocateToPool"
    _get(name if _has(name) else "_C._cuda_endAllocateCurrentStreamToPool")(device, pool)


def anything_compiled() -> bool:
    """Return False if torch.compile cannot have compiled anything in this process."""
    return "torch._dynamo" in sys.modules


def compile_errors() -> tuple[type[Exception], ...]:
    """The errors of a model that torch.compile cannot compile."""
    return _get("_dynamo.exc.TorchDynamoException"), _get("_inductor.exc.InductorError")


# -- torch.distributed -------------------------------------------------------------------------------------------------


def group_store(group: Any) -> Any:
    """The store over which a process group was made; 2.7.1 has a function for it in place of the method."""
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return _get("distributed.distributed_c10d._get_process_group_store")(group)


# -- torch.distributed.fsdp.fully_shard --------------------------------------------------------------------------------


def fully_sharded(module: nn.Module) -> bool:
    """Return True if a module is one that ``fully_shard`` was applied to; parameters of others in it may be sharded, too."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def holds_fully_sharded(model: nn.Module) -> bool:
    """Return True if ``fully_shard`` was applied to a part of a model; at once where its package was never imported."""
    return "torch.distributed.fsdp" in sys.modules and any(map(fully_sharded, model.modules()))


def fully_shard_state(module: nn.Module) -> Any:
    """What ``fully_shard`` keeps about a module that it was applied to: the same for all modules of one call."""
    return _of(module, "_get_fsdp_state")()


class Unit:
    """What ``fully_shard`` keeps about the modules that it was applied to in one call.

    Attributes:
        state: its state of them, of which the rest is read.
        modules: these.
        hooks: handles of the forward hooks that it gave them.
        policy: its MixedPrecisionPolicy.
        shards: the parameters that are its own: (the sharded parameter, [(module, name) that hold it]).
        mesh: of the processes that hold the shards; None where it has no parameters.
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
        managed = [parameter for group in groups if group is not None for parameter in _of(group, "fsdp_params")]
        self.shards = [(_of(parameter, "sharded_param"), _holders(parameter)) for parameter in managed]
        meshes = [shard.device_mesh for shard, _ in self.shards]
        self.mesh = meshes[0] if meshes else None
        self.foreign: str | None = None
        if any(_of(parameter, "is_dtensor") for parameter in managed):
            self.foreign = "its parameters are DTensors of tensor parallelism as well"
        elif any(_of(parameter, "offload_to_cpu") for parameter in managed):
            self.foreign = "its shards are offloaded to the CPU"
        elif any(hasattr(shard.to_local(), "fsdp_pre_all_gather") for shard, _ in self.shards):
            self.foreign = "its shards are of a tensor subclass that is gathered in its own way"
        elif any(mesh != self.mesh for mesh in meshes):
            self.foreign = "its parameters lie on several meshes"


def cast_floating(values: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in containers of any kind, dataclasses too, as ``fully_shard`` casts them."""
    cast = lambda t: t.to(dtype) if t.is_floating_point() else t  # noqa: E731
    return _get("distributed.utils._apply_to_tensors")(cast, values)


def _of(held: Any, name: str) -> Any:
    """An attribute of what ``fully_shard`` keeps; FastlrError if this version has no such name."""
    try:
        return getattr(held, name)
    except AttributeError:
        raise FastlrError(
            f"torch {torch.__version__} has no {type(held).__name__}.{name}, by which fastlr measures models under "
            "fully_shard; it was seen in torch 2.11.0: install that, and please report this"
        ) from None


def _holders(parameter: Any) -> list[tuple[nn.Module, str]]:
    info = _of(parameter, "_module_info")
    shared = zip(_of(info, "shared_modules"), _of(info, "shared_param_names"), strict=True)
    return [(_of(info, "module"), _of(info, "param_name")), *shared]
