"""Load models by name, and checkpoints, strictly as plain tensors.

The models are torchvision's, timm's, Hugging Face's or those of your own function.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import re
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from fastlr.errors import InputError, few, first_line, install
from fastlr.files import read_tensors

WRAPPERS = ("state_dict", "model_state_dict", "model")
RUN = {"version", "steps", "line", "state"}  # of a checkpoint by which a run of fastlr goes on
SAVE = "save one with torch.save(model.state_dict(), path)"
# What a folder that transformers has saved holds its weights in, and the two names of peft's.
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
AVERAGED = "n_averaged"  # counter of torch.optim.swa_utils.AveragedModel


def load_model(
    name: str,
    *,
    weights: str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    num_classes: int | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Build the model called ``name`` and, if asked, load its parameters.

    ``name`` is one of

    - a torchvision name, ``torchvision:mobilenet_v3_large``, or a timm name, ``timm:resnetv2_50``
      or ``timm/resnetv2_50``; without the prefix, torchvision's if it has one of that name;
    - ``hf:distilbert-base-uncased``: a folder that transformers has saved, such as a checkpoint of
      its Trainer, or a model in Hugging Face's cache, with its own weights and the head that its
      config names;
    - ``package.module:function``: the function is called with ``num_classes`` (if given) and
      ``kwargs`` and returns the model; the current folder is importable.

    The initial parameters are random: call :func:`torch.manual_seed` first to repeat them.

    Args:
        name: What to build, as above.
        weights: Published weights, downloaded by torchvision (``"DEFAULT"`` or the name of an
            entry) or timm (``"DEFAULT"``).
        checkpoint: File or folder, as for `read_checkpoint`.
        num_classes: Size of the output; None keeps the model's own.
        kwargs: Further arguments of the model.

    Returns:
        The model, in the mode in which its maker leaves it (train), on the CPU.

    Raises:
        InputError: Unknown name (with the closest ones), arguments that the model does not take, a
            checkpoint that is missing, unreadable or does not fit.
    """
    arguments = dict(kwargs or {})
    if num_classes is not None:
        if num_classes < 1:
            raise InputError(f"num_classes is {num_classes}; give at least 1")
        arguments["num_classes"] = num_classes
    maker, _, plain = re.sub("^timm/", "timm:", name).partition(":")
    if plain and maker in _MAKERS:
        model = _MAKERS[maker](plain, weights, arguments)
    elif ":" in name:
        if weights is not None:
            raise InputError(
                f"{name} is your own function, which has no published weights; give a checkpoint"
            )
        model = _from_function(name, arguments)
    elif name not in _torchvision_names() and _timm_has(name):
        model = _from_timm(name, weights, arguments)
    else:
        model = _from_torchvision(name, weights, arguments)
    if checkpoint is not None:
        load_state_dict(model, read_checkpoint(checkpoint), source=str(checkpoint))
    return model


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a state dict from ``path`` onto the CPU, without running code that the file may contain.

    The file is one of torch.save or safetensors. A folder that transformers has saved stands for
    the weights in it. An index (``model.safetensors.index.json``) stands for the files it names.

    A dictionary under ``state_dict`` (as in Lightning's ``.ckpt``), ``model_state_dict`` or
    ``model`` is unwrapped, and so is the model of a checkpoint that a run of fastlr writes
    (``checkpoints/last.pt``). Objects of other classes beside it (arguments, numpy's scalars,
    paths) are neither made nor read.

    Raises:
        InputError: No such file, an unreadable one, or one that holds something else than named
            tensors, such as an adapter alone.
    """
    path = weights_file(path)
    if not path.is_file():
        raise InputError(f"checkpoint {path}: no such file, nor a folder with weights")
    if path.name in ADAPTERS:
        raise InputError(
            f"checkpoint {path} holds an adapter alone, not the weights of a model: merge it by "
            "peft's merge_and_unload(), and save the merged model"
        )
    if path.name.endswith(".index.json"):
        return _read_shards(path)
    try:
        state, objects = _content(path)
    except InputError as error:
        raise InputError(f"checkpoint {error}") from error
    except Exception as error:  # zip, pickle and safetensors each raise their own
        raise InputError(_unreadable(path, error)) from error
    state = _unwrapped(state, path)
    tensors: list[bool] = []
    what = type(state).__name__
    if isinstance(state, Mapping):
        tensors = [isinstance(value, torch.Tensor) for value in state.values()]
        what = f"a dictionary of {few(map(str, state))}"
    # beside objects that were not read, what is no tensor may be or hold one of them
    if not any(tensors) or (objects and not all(tensors)):
        beside = f" (objects of {few(objects)})" if objects else ""
        raise InputError(f"checkpoint {path}: holds {what}{beside}, not named tensors; {SAVE}")
    return with_versions({str(k): v for k, v in state.items()}, versions_of(state))


def weights_file(path: str | os.PathLike[str]) -> Path:
    """Return the file of weights in a folder that transformers or peft has saved, or the path."""
    path = Path(path)
    return next((path / name for name in (*WEIGHTS, *ADAPTERS) if (path / name).is_file()), path)


def _read_shards(index: Path) -> dict[str, Any]:
    """Return the tensors that an index names, each from its file beside the index.

    Raises:
        InputError: It is no index, or a file is missing, unreadable or lacks a tensor.
    """
    try:
        files = json.loads(index.read_text())["weight_map"]
        names = {*files.values()} or {""}
        are_names = all(file and Path(file).name == file != index.name for file in names)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise InputError(f"checkpoint {index} is no index of weights ({error!r})") from error
    if not are_names:
        raise InputError(f"checkpoint {index} is no index of files beside it")
    absent = [file for file in names if not (index.parent / file).is_file()]
    if absent:
        raise InputError(f"checkpoint {index}: no {few(absent)} beside it: copy all of its files")
    state: dict[str, Any] = {}
    for file in sorted(names):
        held = read_checkpoint(index.parent / file)
        wanted = [name for name in files if files[name] == file]
        if lacking := [name for name in wanted if name not in held]:
            raise InputError(
                f"checkpoint {index.parent / file} lacks {few(lacking)} of its index: copy it again"
            )
        state |= {name: held[name] for name in wanted}
    return state


def _unwrapped(state: Any, path: Path) -> Any:
    """Return what is in a wrapper, or in a checkpoint by which a run of fastlr goes on."""
    if isinstance(state, Mapping) and set(state) == RUN and isinstance(state["state"], Mapping):
        state = state["state"]
        if not isinstance(state.get("model"), Mapping):
            raise InputError(
                f"checkpoint {path}: this checkpoint of a run holds no model: give one of the "
                "others beside it"
            )
    for key in WRAPPERS:
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    return state


class _Unread:
    """Stands for what a checkpoint makes by a class or function that torch does not allow.

    Nothing of it is run or kept, so that the tensors beside it can be read.
    """

    def __new__(cls, *_: Any) -> Any:
        return {} if cls.__name__ == "collections.defaultdict" else super().__new__(cls)

    def __setstate__(self, _: Any) -> None:
        """Leave the object's content out."""


def _content(path: Path) -> tuple[Any, list[str]]:
    """Return what a file holds, and the classes and functions whose objects were not read in it."""
    try:
        return read_tensors(path), []
    except pickle.UnpicklingError as refusal:
        objects = re.findall(r"GLOBAL (\S+)", str(refusal))
        if not objects:
            raise
        try:
            objects = sorted(get_unsafe_globals_in_checkpoint(path))
            with safe_globals([(type(name, (_Unread,), {}), name) for name in objects]):
                return read_tensors(path), objects
        except (ValueError, pickle.UnpicklingError):  # torch's old format, or one that it blocks
            raise InputError(f"{path} holds objects of {few(objects)}: {SAVE}") from refusal


def _unreadable(path: Path, error: Exception) -> str:
    """Say what a file is not, that torch or safetensors did not read."""
    if isinstance(error, (PermissionError, MemoryError)):
        return f"checkpoint {path}: not readable ({first_line(error)})"
    with path.open("rb") as file:
        start = file.read(64)
    if not start:
        return f"checkpoint {path} is empty (0 bytes): copy or save it again"
    if path.suffix == ".safetensors":
        return (
            f"checkpoint {path} is no whole safetensors file ({first_line(error)}): download or "
            "save it again"
        )
    if start.startswith(b"PK") and not zipfile.is_zipfile(path):
        return (
            f"checkpoint {path} is a damaged or incomplete zip file of torch.save's: copy or save "
            "it again"
        )
    text = "it is a text file; " if start.isascii() and 0 not in start else ""
    return (
        f"checkpoint {path} is no checkpoint that torch.load can read as plain tensors: "
        f"{text}{SAVE}"
    )


def load_state_dict(
    model: nn.Module, state: Mapping[str, Any], *, source: str = "state dict"
) -> None:
    """Load ``state`` into ``model``: every name and shape must agree, otherwise nothing is changed.

    A prefix that all names have in common is dropped if more of them are then the model's:
    ``module.`` of DistributedDataParallel, ``_orig_mod.`` of torch.compile, ``net.`` of a
    LightningModule. So is the counter of an AveragedModel. BatchNorm's step counters may be
    missing, and so may names that share their tensor with one that is there (tied weights, which
    safetensors stores once).

    Args:
        model: Changed in place.
        state: Name to tensor.
        source: What to call it in errors, such as the file's name.

    Raises:
        InputError: Missing or unexpected names, other shapes or kinds of tensors, or other values
            for names that share a tensor of the model, all listed.
    """
    wanted = model.state_dict()
    state = _without_prefix(state, wanted)
    held = [k for k in state if k in wanted]
    present = {_storage(wanted[k]) for k in held} - {None}
    absent = [k for k, v in wanted.items() if k not in state and _storage(v) not in present]
    shapes = [f"{k} {reason}" for k in held if (reason := _misfit(state[k], wanted[k])) is not None]
    missing = [k for k in absent if k.rpartition(".")[2] != "num_batches_tracked"]
    unexpected = [k for k in state if k not in wanted]
    wrong = {
        "missing": missing,
        "unexpected": unexpected,
        "of another shape or kind": shapes,
        "one tensor in the model, but not here": [] if shapes else _untied(state, wanted),
    }
    if any(wrong.values()):
        reasons = "; ".join(
            f"{len(names)} {what}: {few(names)}" for what, names in wrong.items() if names
        )
        remedy = "check the model's name and classes"
        if re.search(r"-\d+-of-\d+\.", Path(source).name):
            remedy = "it is one part of several: give their folder, or its .index.json"
        elif any(".lora_" in name for name in unexpected):
            remedy = "merge the adapter (peft's merge_and_unload()), and save the merged model"
        raise InputError(f"{source} does not fit {type(model).__name__}: {reasons}; {remedy}")
    try:
        model.load_state_dict(state, strict=False)
    except (RuntimeError, ValueError) as error:  # such as that of an older version of a module
        raise InputError(f"{source} does not load: {first_line(error)}") from error


def _without_prefix(state: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict without the prefix that makes most of its names the wanted ones."""
    counters = [k for k in state if k.rpartition(".")[2] == AVERAGED and k not in wanted]
    names = [k for k in state if k not in counters] if len(counters) == 1 else list(state)
    common = os.path.commonprefix(names)
    prefixes = ["", *(common[: i + 1] for i, letter in enumerate(common) if letter == ".")]

    def fitting(prefix: str) -> int:
        return sum(name.removeprefix(prefix) in wanted for name in names)

    prefix = max(prefixes, key=fitting)
    versions = versions_of(state) or versions_of(wanted)
    modules = {f"{name}.".removeprefix(prefix).rstrip("."): v for name, v in versions.items()}
    return with_versions({name.removeprefix(prefix): state[name] for name in names}, modules)


def versions_of(state: Any) -> dict[str, Any]:
    """Return the versions of the modules that made a state dict, by the modules' names."""
    return getattr(state, "_metadata", None) or {}


def with_versions(state: Mapping[str, Any], versions: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with versions of the modules that made it."""
    made = OrderedDict(state)
    vars(made)["_metadata"] = OrderedDict(versions)
    return made


def _from_torchvision(name: str, weights: str | None, arguments: dict[str, Any]) -> nn.Module:
    from torchvision.models import get_model

    if name not in _torchvision_names():
        raise InputError(_unknown(name))
    with _errors_of(f"torchvision's {name}", weights):
        return get_model(name, weights=weights, **arguments)


def _from_timm(name: str, weights: str | None, arguments: dict[str, Any]) -> nn.Module:
    timm = _package("timm", f"timm/{name}")
    if not _timm_has(name):
        raise InputError(_unknown(f"timm/{name}"))
    if weights not in (None, "DEFAULT"):
        raise InputError(
            f"weights {weights} of timm/{name}: give DEFAULT; a tag goes into the name, as in "
            "resnet50.a1_in1k"
        )
    with _errors_of(f"timm's {name}", weights):
        return timm.create_model(name, pretrained=weights is not None, **arguments)


def _from_transformers(name: str, weights: str | None, arguments: dict[str, Any]) -> nn.Module:
    """Make a model of Hugging Face's, in float32, by the class that its config names.

    Its own weights are loaded. Nothing is downloaded, and no code that comes with it is run.
    """
    what, options = f"hf:{name}", {"local_files_only": True}
    if weights is not None or "num_classes" in arguments:
        raise InputError(f"{what} has its own weights and head: leave weights and classes out")
    transformers = _package("transformers", what)
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False, **options)
        kind = getattr(transformers, (config.architectures or ["AutoModel"])[0])
        model, loaded = kind.from_pretrained(name, output_loading_info=True, **options, **arguments)
    except (AttributeError, OSError, RuntimeError, TypeError, ValueError) as error:
        why = first_line(error)
        if isinstance(error, OSError) and not os.path.isdir(name):
            why = f"no such folder, nor all of it in the cache: hf download {name} brings it there"
        raise InputError(f"{what}: {why}") from error
    missing = sorted(loaded["missing_keys"])
    if missing:
        raise InputError(
            f"{what} has no weights for {few(missing)}, which would be random: save the whole "
            "model there, or name in its config the class that was saved"
        )
    return model.float()


@contextmanager
def _errors_of(model: str, weights: str | None) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        raise InputError(f"{model} refuses its arguments: {first_line(error)}") from error
    except OSError as error:
        raise InputError(f"weights {weights} of {model}: {first_line(error)}") from error


def _from_function(name: str, arguments: dict[str, Any]) -> nn.Module:
    model = call_factory(name, arguments)
    if not isinstance(model, nn.Module):
        raise InputError(f"{name} returned {type(model).__name__}, not a torch.nn.Module")
    return model


def call_factory(name: str, arguments: Mapping[str, Any] | None = None) -> Any:
    """Import ``package.module:function`` and return what the function returns.

    Modules in the current folder are found, too.

    Raises:
        InputError: The module or the function does not exist, or the call fails; the original error
            is its cause.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise InputError(f"{name}: write package.module:function")
    here = os.getcwd()
    is_added = here not in sys.path
    if is_added:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        kind = type(error).__name__
        raise InputError(
            f"{name}: importing {module_name} failed: {kind}: {first_line(error)}"
        ) from error
    finally:
        if is_added:
            sys.path.remove(here)
    function = getattr(module, function_name, None)
    if not callable(function):
        close = get_close_matches(
            function_name, [n for n in dir(module) if callable(getattr(module, n))], n=4
        )
        hint = f": did you mean {few(close)}?" if close else ""
        raise InputError(f"{name}: no such function in the module{hint}")
    try:
        return function(**(arguments or {}))
    except Exception as error:
        text = f"{name}: the call failed: {type(error).__name__}: {first_line(error)}"
        if isinstance(error, TypeError) and "'num_classes'" in text:
            text += ": leave --classes (num_classes) out, or let the function take num_classes"
        raise InputError(text) from error


def usable_device(name: str, option: str) -> torch.device:
    """Return the device of this name.

    Raises:
        InputError: There is none, or it cannot be used; ``option`` stands before its name.
    """
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"{option}{name}: {first_line(error)}") from error
    return device


def _torchvision_names() -> list[str]:
    from torchvision.models import list_models

    return list_models()


def _package(name: str, what: str) -> Any:
    """Import a package that is needed for a model.

    Raises:
        InputError: It is not installed.
    """
    if not find_spec(name):
        raise InputError(f"{what} needs {name}, which is not installed: {install('models')}")
    return importlib.import_module(name)


def _timm() -> Any:
    """Return the module timm, or None where it is not installed."""
    return importlib.import_module("timm") if find_spec("timm") else None


def _timm_has(name: str) -> bool:
    timm = _timm()
    return timm is not None and (
        name.startswith(("hf-hub:", "hf_hub:", "local-dir:")) or timm.is_model(name)
    )


def _unknown(name: str) -> str:
    """Say that there is no model of this name, with the closest known names."""
    timm = _timm()
    known = {} if timm is None else {bare: f"timm/{bare}" for bare in timm.list_models()}
    known |= {bare: bare for bare in _torchvision_names()}
    close = [known[bare] for bare in get_close_matches(name.removeprefix("timm/"), known, n=4)]
    hint = "give a torchvision or timm name, hf:NAME, or package.module:function for your own"
    return f"no model is called {name}: {f'did you mean {few(close)}?' if close else hint}"


_MAKERS = {"hf": _from_transformers, "timm": _from_timm, "torchvision": _from_torchvision}


def _misfit(value: Any, wanted: Any) -> str | None:
    """Return why an entry does not fit one of the model's, or None."""
    if not isinstance(wanted, torch.Tensor):
        return None
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} for {tuple(wanted.shape)}"
    if value.is_nested or value.layout != torch.strided or value.is_meta or value.is_quantized:
        return "is sparse, nested, quantised or without values"
    if value.shape != wanted.shape:
        return f"{tuple(value.shape)} for {tuple(wanted.shape)}"
    kinds = [(t.is_floating_point(), t.is_complex()) for t in (value, wanted)]
    return None if kinds[0] == kinds[1] else f"{value.dtype} for {wanted.dtype}"


def _untied(state: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return the pairs of names that share a tensor in a model, but not their values in a state."""
    found, first = [], dict[Any, str]()
    for name in state:
        storage = _storage(wanted.get(name))
        known = first.setdefault(storage, name)
        if storage and known != name and not _equal(state[name], state[known]):
            found.append(f"{known} and {name}")
    return found


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True for the same values, of which any may be NaN."""
    return a.dtype == b.dtype and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def _storage(value: Any) -> tuple | None:
    """Identify the memory of an entry of a state dict; None for empty tensors and other objects."""
    if not isinstance(value, torch.Tensor) or value.numel() == 0 or value.data_ptr() == 0:
        return None
    return value.data_ptr(), tuple(value.shape), value.stride(), value.dtype
