"""fastlr: measure the plasticity of a neural network by its local redundancy.

See README.md for six lines of use; the definitions are in the docstring of `estimate`. The public
names are in ``__init__.pyi``; each is imported when it is first used, so that ``fastlr --help``
need not wait for torch.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

try:
    __version__ = version("fastlr")
except PackageNotFoundError:  # used from a source tree that is not installed
    __version__ = "0+unknown"
