"""The modules of a model."""

from __future__ import annotations

from torch import nn

from fastlr.errors import ModelError


def all_modules(model: nn.Module) -> list[nn.Module]:
    """The model and the modules in it, each once.

    They are found by identity, several times as fast as by ``model.modules()``.

    Raises:
        ModelError: what stands in a module's place is none. A mock of one passes torch's own
            checks, by its ``__class__``.
    """
    modules, known = [model], {id(model)}
    for module in modules:  # which grows meanwhile
        for name, part in module._modules.items():
            if part is None or id(part) in known:
                continue
            if not issubclass(type(part), nn.Module):
                raise ModelError(
                    f"{name} of {type(module).__name__} is no nn.Module but a "
                    f"{type(part).__name__}: put a real module in its place, such as nn.Identity()"
                )
            known.add(id(part))
            modules.append(part)
    return modules
