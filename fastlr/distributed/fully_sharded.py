"""Give models under torch.distributed.fsdp.fully_shard whole parameters for a while.

Afterwards they are as they were.

In: a model that is sharded, on every rank. Out: the same module, plain, with the parameters
gathered in each rank's memory. Its forward passes exchange nothing: ranks may run any number of
them, and none hangs. Neither the shards nor what fully_shard keeps about them is touched: a
training goes on with the bits that it would have had.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fastlr.distributed.connection import machine
from fastlr.distributed.sharding import ALONE, ESTIMATE_TIMEOUT, Team, bit_sums, sharded, team
from fastlr.errors import DistributedError, InputError, ModelError, one_line
from fastlr.ops.deferred_checks import out_of_memory
from fastlr.ops.memory import free_bytes
from fastlr.ops.model_lock import locked, unlocked
from fastlr.ops.torch_private import (
    Unit,
    cast_floating,
    fully_shard_state,
    fully_sharded,
    holds_fully_sharded,
)

_REMEDY = (
    "fastlr does not gather that: measure an unsharded model with its full state dict loaded "
    "(get_model_state_dict of torch.distributed.checkpoint.state_dict, with full_state_dict=True)"
)

# Frozen shard -> the parameter that stood for it, and the sums of its bits.
_frozen = WeakIdKeyDictionary()


@contextmanager
def full_params(model: nn.Module, *, timeout: float = ESTIMATE_TIMEOUT) -> Iterator[Team]:
    """Give a model under ``torch.distributed.fsdp.fully_shard`` whole parameters on every rank.

    ``fastlr.estimate``, `fastlr.LocalRedundancy`, ``fastlr.per_sample_grad_sq_norms``,
    ``fastlr.support_report`` and `fastlr.Monitor` enter it by themselves; enter it to
    take several measures with one exchange. Every rank enters. Inside, the model is an ordinary
    module under the names that the user knows: each rank measures what it likes by itself, and
    ``fastlr.estimate`` is shared by the ranks, as by `sharded`. The parameters are in the policy's
    ``param_dtype``, which modules compute in as they do when sharded, without gradients or
    optimizer state. Each rank holds them all in memory; it receives the bytes of all but its own
    once, however much is measured.

    Afterwards the model is as before: shards, gradients, hooks, classes. What is written into the
    whole parameters is lost; do not train inside. A model that is not sharded is left alone.

    Threads that do this at the same time need a model each, on meshes whose process groups and
    ``mesh_dim_names`` differ: PyTorch takes meshes of the same ranks and names for one.

    Args:
        model: the whole model, sharded in any nesting.
        timeout: seconds for which a rank waits for the others.

    Raises:
        ModelError: a sharding that cannot be gathered, named; or the parameters do not fit in a
            rank's memory.
        InputError: within `sharded` of other ranks than the model's.
        DistributedError: a rank failed, ended, left, or did not come in time.

    Example::

        with fastlr.distributed.full_params(model):
            lr = fastlr.estimate(model, images)
            effective = fastlr.metrics.measures(model, ["effective_rank"], x=x)
    """
    if not isinstance(model, nn.Module) or not holds_fully_sharded(model):
        yield team()
        return
    units = _units(model)
    group = _group(model, units)
    with ExitStack() as stack:
        members = team()
        if members is ALONE:
            members = stack.enter_context(sharded(group, timeout=timeout))
        elif members.group is None or _ranks(members.group) != _ranks(group):
            raise InputError(
                "the ranks that share this estimate are not those of the sharded model: enter "
                "sharded(its group)"
            )
        plain = stack.enter_context(ExitStack())
        with locked(model):
            parameters = _gathered(units, members)
            plain.callback(_release, parameters)
            plain.enter_context(_plain(units, parameters))
        stack.callback(_shard_again, model, plain)
        yield members


def _shard_again(model: nn.Module, plain: ExitStack) -> None:
    """Put the shards back, once no other thread measures the whole parameters."""
    with locked(model):
        plain.close()


def _units(model: nn.Module) -> list[Unit]:
    """The units of a model, each once; ModelError for those that cannot be gathered."""
    units: dict[int, Unit] = {}
    for name, module in model.named_modules():
        if not fully_sharded(module):
            continue
        unit = units.get(id(fully_shard_state(module)))
        if unit is None:
            unit = Unit(module)
            units[id(unit.state)] = unit
        else:
            unit.modules.append(module)
        if unit.foreign is None and type(module).__bases__[0].__name__ != "FSDPModule":
            unit.foreign = f"its class is {type(module).__name__}, changed after fully_shard"
        if unit.foreign is not None:
            raise ModelError(
                f"module {name or '(the model)'} is under fully_shard, but {unit.foreign}; "
                f"{_REMEDY}"
            )
    held = {
        id(module._parameters.get(at))
        for unit in units.values()
        for _, places in unit.shards
        for module, at in places
    }
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "placements") and id(parameter) not in held:
            raise ModelError(
                f"parameter {name} is a DTensor, but none of a module of this model under "
                "fully_shard (tensor parallelism, or a part of a larger sharded model: give the "
                f"whole); {_REMEDY}"
            )
    return list(units.values())


def _group(model: nn.Module, units: list[Unit]) -> dist.ProcessGroup:
    """The ranks of a model; ModelError where fastlr cannot tell."""
    meshes = [unit.mesh for unit in units if unit.mesh is not None]
    if not meshes:
        raise ModelError(
            f"{type(model).__name__} is under fully_shard, but has no sharded parameter: measure "
            "it unsharded"
        )
    if all(mesh == meshes[0] for mesh in meshes):
        if meshes[0].ndim == 1:
            return meshes[0].get_group()
        if meshes[0].size() == dist.get_world_size():
            return dist.group.WORLD  # type: ignore[return-value]
    raise ModelError(
        "the model is sharded on several meshes, or on one of several axes that is not all "
        f"processes; {_REMEDY}"
    )


def _ranks(group: Any) -> list[int]:
    return dist.get_process_group_ranks(group)


# -- gathering
# --------------------------------------------------------------------------------------------------


def _gathered(units: list[Unit], members: Team) -> list[nn.Parameter]:
    """Return the whole parameters of all units in their order.

    Every rank makes sure of memory for them before anything is exchanged. An error in the midst of
    an exchange would leave the others waiting.
    """
    shards = [(shard, _dtype(shard, unit)) for unit in units for shard, _ in unit.shards]
    described: dict[str, Any] = {
        str(i): [list(shard.shape), str(dtype), shard.requires_grad]
        for i, (shard, dtype) in enumerate(shards)
    }
    members.agree("the sharded parameters", described, "shard the same model alike on every rank")
    whole, failure = _room(shards)
    _require_room(shards, failure, members)
    with torch.inference_mode(False), torch.no_grad():
        for tensor, (shard, dtype) in zip(whole, shards, strict=True):
            tensor.copy_(_values(shard, dtype))
        return [_parameter(tensor, shard) for tensor, (shard, _) in zip(whole, shards, strict=True)]


def _values(shard: Any, dtype: torch.dtype) -> Tensor:
    """The whole parameter of which every rank gives its shard."""
    try:
        with unlocked():
            return shard.detach().to(dtype).full_tensor()
    except RuntimeError as error:
        if out_of_memory(error):
            raise
        raise DistributedError(
            f"the parameters could not be gathered ({one_line(error)})"
        ) from error


def _parameter(tensor: Tensor, shard: Any) -> nn.Parameter:
    """Return the parameter with these values.

    A frozen one is the object of last time, if the values are those of last time.

    A forward pass may branch on what is frozen: the model would have to be checked again for
    another object.
    """
    if shard.requires_grad:
        return nn.Parameter(tensor)
    sums = bit_sums(tensor).tolist()
    known = _frozen.get(shard)
    if known is None or known[1] != sums or known[0].dtype != tensor.dtype:
        known = _frozen[shard] = nn.Parameter(tensor, requires_grad=False), sums
    known[0].data = tensor
    return known[0]


def _dtype(shard: Any, unit: Unit) -> torch.dtype:
    """The dtype in which modules compute with a parameter."""
    return (unit.policy.param_dtype or shard.dtype) if shard.is_floating_point() else shard.dtype


def _room(shards: list[tuple[Any, torch.dtype]]) -> tuple[list[Tensor], str | None]:
    """Return memory for the parameters, or why there is none.

    Enough must be free besides to gather the largest.
    """
    try:
        with torch.inference_mode(False):
            whole = [
                torch.empty(shard.shape, dtype=dtype, device=shard.device)
                for shard, dtype in shards
            ]
        torch.empty(2 * max(t.nbytes for t in whole), dtype=torch.uint8, device=whole[0].device)
    except Exception as error:
        if not out_of_memory(error):
            raise
        return [], one_line(error)
    return whole, None


def _require_room(
    shards: list[tuple[Any, torch.dtype]], failure: str | None, members: Team
) -> None:
    """Raise ModelError on all ranks where one has too little memory for the parameters.

    A CPU's system allocates more memory than is free, and ends a process that uses it. So the
    parameters of all ranks of a machine are compared with its free memory.

    Args:
        shards: the shards, with the dtypes of their parameters.
        failure: why this rank could not reserve the memory.
        members: the ranks.
    """
    device = shards[0][0].device
    own_free = free_bytes(device) if device.type == "cpu" else None
    of_ranks = members.share([machine(), own_free, failure])
    machines = [place for place, _, _ in of_ranks]
    each = sum(shard.numel() * dtype.itemsize for shard, dtype in shards)
    for rank, (place, free, reason) in enumerate(of_ranks):
        need = each * machines.count(place)
        if reason is None and free is not None and need > free:
            reason = f"{need / 1e9:.2f} GB for all ranks of its machine, {free / 1e9:.2f} GB free"
        if reason is not None:
            text = (
                "out of memory: the whole parameters of the sharded model do not fit on rank "
                f"{rank} ({reason}); free memory, or load the full state dict into an unsharded "
                "model on a CPU or a larger GPU and measure that"
            )
            raise members.everybodys(ModelError(text))


def _release(whole: list[nn.Parameter]) -> None:
    """Free the memory, whoever still holds the parameters."""
    for parameter in whole:
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)


# -- the model as a plain one
# ------------------------------------------------------------------------------------------


class _Casts:
    """The casts of a unit's mixed-precision policy around the forward passes of its modules.

    Of several modules in one unit, the first to run has its inputs cast, the last its output. Where
    the parameters are float64, as on a deep copy, all is.
    """

    def __init__(self, unit: Unit, places: list[tuple[nn.Module, str]]) -> None:
        policy, self.modules = unit.policy, unit.modules
        self.input_dtype = policy.param_dtype if policy.cast_forward_inputs else None
        self.output_dtype = policy.output_dtype
        self.wanted = self.input_dtype is not None or self.output_dtype is not None
        inside = {part for module in unit.modules for part in module.modules()}
        # Of a parameter.
        self.module, self.name = next((place for place in places if place[0] in inside), places[0])
        self.to_run: set[nn.Module] = set()  # of several modules, in the pass that has begun
        self.groups: list[_Casts] = []  # units of several modules within the one of this

    def _cast(self, values: Any, dtype: torch.dtype | None) -> Any:
        parameter: Any = self.module._parameters[self.name]
        wide = parameter.dtype == torch.float64
        if dtype is None:
            return values
        return cast_floating(values, torch.float64 if wide else dtype)

    def inputs(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The pre-hook, with keywords."""
        for group in self.groups:
            group.to_run.clear()  # a pass that ended in an error has left some
        if self.to_run:
            return args, kwargs
        if len(self.modules) > 1:
            self.to_run.update(self.modules)
        return self._cast(args, self.input_dtype), self._cast(kwargs, self.input_dtype)

    def outputs(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The hook."""
        self.to_run.discard(module)
        return output if self.to_run else self._cast(output, self.output_dtype)


@contextmanager
def _plain(units: list[Unit], whole: list[nn.Parameter]) -> Iterator[None]:
    """Let the modules be of their own classes and hold the whole parameters.

    What fully_shard has given them is taken off, and put back afterwards.
    """
    with ExitStack() as back:
        for unit in units:
            for handle in unit.hooks:
                for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
                    registry = reference()
                    back.callback(_refill, registry, dict(registry))
            for module in unit.modules:
                for name, value in list(vars(module).items()):
                    if isinstance(value, dict) and any(
                        entry is unit.state for entry in value.values()
                    ):
                        vars(module)[name] = {
                            key: entry for key, entry in value.items() if entry is not unit.state
                        }
                        back.callback(vars(module).__setitem__, name, value)
                back.callback(setattr, module, "__class__", type(module))
                module.__class__ = type(module).__bases__[1]
        _replace_hooks(units)
        holders = (places for unit in units for _, places in unit.shards)
        for parameter, places in zip(whole, holders, strict=True):
            for module, name in places:
                back.callback(_put, module, name, module._parameters[name])
                _put(module, name, parameter)
        yield


def _replace_hooks(units: list[Unit]) -> None:
    """Take the hooks of the units off their modules.

    In their places come hooks that cast where the units' policies have them cast.
    """
    places = [place for unit in units for _, shared in unit.shards for place in shared]
    casts = [_Casts(unit, places) for unit in units]
    groups = [each for each in casts if each.wanted and len(each.modules) > 1]
    for unit, each in zip(units, casts, strict=True):
        inside = set(unit.modules[0].modules())
        each.groups = [group for group in groups if inside.issuperset(group.modules)]
        for handle in unit.hooks:
            registry = handle.hooks_dict_ref()
            if not each.wanted and not each.groups:
                handle.remove()
            else:
                is_before = any(registry is module._forward_pre_hooks for module in unit.modules)
                registry[handle.id] = each.inputs if is_before else each.outputs


def _refill(registry: Any, before: dict) -> None:
    registry.clear()
    registry.update(before)


def _put(module: nn.Module, name: str, parameter: Any) -> None:
    """Register a parameter as torch does when it shards a module.

    Recurrent layers keep a list of their parameters besides.
    """
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[name] = parameter
    else:
        setattr(module, name, parameter)
