"""Models by name, and their checkpoints."""

from __future__ import annotations

from fastlr.models.loading import load_model, load_state_dict, read_checkpoint

__all__ = ["load_model", "load_state_dict", "read_checkpoint"]
