"""How commands show their arguments in their help."""

from __future__ import annotations

from typing import Any

from typer.core import TyperArgument, TyperCommand, TyperGroup


def shown(parameters: list[Any]) -> list[Any]:
    """Return parameters of a command, as its help shows them.

    Names of arguments are in capitals, as in the texts. Flags have no type.
    """
    for parameter in parameters:
        if parameter.metavar is None:
            if isinstance(parameter, TyperArgument):
                parameter.metavar = parameter.name.upper()
            elif parameter.is_flag:
                parameter.metavar = ""
    return parameters


class Command(TyperCommand):
    """A command."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters."""
        return shown(super().get_params(ctx))


class CommandGroup(TyperGroup):
    """A group of commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters."""
        return shown(super().get_params(ctx))
