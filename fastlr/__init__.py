"""fastlr: measure the plasticity of a neural network by its local redundancy.

See README.md for six lines of use; the definitions are in the docstring of `estimate`.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from fastlr.errors import (
    FastlrError,
    FastlrWarning,
    HiddenParameterError,
    InputError,
    InteractionError,
    ModelError,
    NonFiniteError,
    RandomForwardError,
)
from fastlr.ghost import per_sample_grad_sq_norms, support_report

try:
    __version__ = version("fastlr")
except PackageNotFoundError:  # used from a source tree that is not installed
    __version__ = "0+unknown"

__all__ = [
    "FastlrError",
    "FastlrWarning",
    "HiddenParameterError",
    "InputError",
    "InteractionError",
    "ModelError",
    "NonFiniteError",
    "RandomForwardError",
    "per_sample_grad_sq_norms",
    "support_report",
]
