"""fastlr in training code that others wrote: local redundancy every so many steps or epochs.

- `Monitor`: for hand-written loops.
- `fastlr.integrations.lightning.LocalRedundancyMonitor`: a Lightning ``Callback``.
- `fastlr.integrations.huggingface.LocalRedundancyCallback`: a Hugging Face ``TrainerCallback``.
- `fastlr.integrations.avalanche.LocalRedundancyMetric`: an Avalanche plugin metric.
- `fastlr.integrations.stable_baselines3.LocalRedundancyCallback`: a Stable-Baselines3 callback.

The frameworks are optional (extras ``lightning``, ``huggingface``, ``avalanche``, ``rl``) and
imported by these modules alone. All measure the same way; the training is bit for bit the same
without them.
"""

from fastlr.integrations.measurement import Reading
from fastlr.integrations.monitor import Monitor

__all__ = ["Monitor", "Reading"]
