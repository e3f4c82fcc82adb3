"""Shared by all tests: few threads, so that parallel workers do not fight over cores, and the optional data folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(int(os.environ.get("FASTLR_TEST_THREADS", "1")))


@pytest.fixture(scope="session")
def fastlr_data() -> Path:
    """Return the folder that FASTLR_DATA names; skip the test where it is not set."""
    folder = os.environ.get("FASTLR_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("FASTLR_DATA is not set to a folder")
    return Path(folder)


@pytest.fixture
def double():
    """Tensors are float64, and drawn alike in every test."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
