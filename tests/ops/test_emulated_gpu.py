"""The tests that need a GPU, on an emulated one."""

import os
import subprocess
import sys

import torch
from expected import needs_triton
from pytest import mark

from bench.gpu_run.steps import OPS_TESTS, OTHER_TESTS, ROOT, gpu_tests

LEFT_OUT = (
    "tests/distributed",  # processes with GPUs of their own
    "tests/estimator/test_chunks.py",  # memory that is full
    "tests/ghost/test_zoo.py::test_zoo_on_a_gpu[embedding_sparse]",  # sparse tensors
)
emulated = torch.version.cuda is not None and not torch.cuda.is_available()
emulated = emulated and torch.__version__.startswith("2.11.")


@mark.long
@needs_triton
@mark.skipif(not emulated, reason="the GPU is emulated in torch 2.11 with CUDA, without a GPU")
@mark.parametrize("files", [OPS_TESTS, OTHER_TESTS], ids=["ops", "others"])
def test_on_an_emulated_gpu(files, tmp_path):
    """A mistake in these tests, or in what they test, would first show on a real GPU."""
    options = " ".join(["-p tests.emulated_gpu", *[f"--deselect={test}" for test in LEFT_OUT]])
    given = {
        "PYTHON": sys.executable,
        "PYTEST_ADDOPTS": options,
        "TORCH_EXTENSIONS_DIR": str(tmp_path),
        "GPU_RUN_TESTS": str(tmp_path / "tests.jsonl"),
        "FASTLR_TEST_SECONDS": "",
    }
    step = gpu_tests("emulated", 0, files, processes=1)
    done = subprocess.run(
        step.command,
        shell=True,
        cwd=ROOT,
        env=os.environ | given,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-10_000:]
