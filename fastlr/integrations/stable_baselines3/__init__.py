"""A Stable-Baselines3 callback that measures actor and critic; needs the extra ``rl``."""

from fastlr.errors import MissingExtraError, install

try:
    import gymnasium  # noqa: F401
    import stable_baselines3  # noqa: F401
except ImportError as missing:
    raise MissingExtraError(
        f"stable-baselines3 is not installed ({missing}): {install('rl')}"
    ) from missing

from fastlr.integrations.stable_baselines3.callback import LocalRedundancyCallback

__all__ = ["LocalRedundancyCallback"]
