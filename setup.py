"""Build fastlr: the Python packages always, the C++/CUDA extension (csrc/) where a compiler is found.

Everything else is in pyproject.toml. The extension is optional: without torch at build time (build isolation) or a
compiler, or when it does not compile, fastlr installs without it and ``fastlr doctor`` says so; without nvcc it has
no GPU part. Build it with ``pip install --no-build-isolation .``, or in place with ``python setup.py build_ext
--inplace``. TORCH_CUDA_ARCH_LIST chooses the GPUs (default "8.0 9.0 10.0+PTX"); FASTLR_NO_EXT=1 skips it all.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from setuptools import find_packages, setup

HERE = Path(__file__).parent.resolve()


def cuda_root() -> str | None:
    """Return the toolkit's folder as nvcc itself sees it: the nvcc on PATH may be a wrapper outside the toolkit."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return os.environ.get("CUDA_HOME")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "x.cu").write_text("")
        try:
            run = subprocess.run([nvcc, "--dryrun", "x.cu"], capture_output=True, text=True, cwd=folder, timeout=60)
        except (OSError, subprocess.SubprocessError):
            return None
    top = re.search(r"^#\$ _?TOP=(.+)$", run.stderr + run.stdout, re.MULTILINE)
    return os.path.realpath(top.group(1).strip()) if top else None


def architectures() -> str:
    """Return TORCH_CUDA_ARCH_LIST, by default 8.0, 9.0 and 10.0 + PTX, without what this nvcc does not know."""
    named = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if named:
        return " ".join(named.replace(";", " ").split())
    wanted = ["8.0", "9.0", "10.0"]
    run = subprocess.run(["nvcc", "--list-gpu-arch"], capture_output=True, text=True, timeout=60)
    known = [a for a in wanted if f"compute_{a.replace('.', '')}" in run.stdout.split()]
    return " ".join(known or wanted) + "+PTX"


def extension() -> dict:
    """Return the setup() arguments of the extension; empty where there is nothing to build or to build with."""
    if os.environ.get("FASTLR_NO_EXT") == "1":
        return {}
    root = cuda_root() if shutil.which("nvcc") else None
    if root:
        os.environ["CUDA_HOME"] = root  # read by torch.utils.cpp_extension when it is imported
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError:
        print("fastlr: torch is not importable here (use --no-build-isolation); no extension", file=sys.stderr)
        return {}

    def sources(suffix: str) -> list[str]:
        return sorted(str(p.relative_to(HERE)) for p in HERE.glob(f"csrc/*{suffix}"))

    def described(make: type | Callable, files: list[str], **options: Any) -> Any:
        flags = ["-O3", "-g0", "-Wall"]
        made = make(
            "fastlr._C",
            files,
            include_dirs=["csrc", *options.pop("include_dirs", [])],
            depends=sources(".h"),
            extra_compile_args={"cxx": flags, "nvcc": ["-O3"]} if options else {"cxx": flags},
            **options,
        )
        made.libraries = [name for name in made.libraries if name == "cudart"]  # nothing of torch's is called
        return made

    def on_cpu() -> Any:
        return described(cpp_extension.CppExtension, sources(".cpp"))

    def on_gpu() -> Any:
        os.environ["TORCH_CUDA_ARCH_LIST"] = architectures()
        define = [
            ("FASTLR_WITH_CUDA", None),
            ("FASTLR_ARCHITECTURES", '"' + os.environ["TORCH_CUDA_ARCH_LIST"] + '"'),
        ]
        headers = [str(p) for folder in sys.path for p in Path(folder).glob("nvidia/cu*/include")]
        files = sources(".cpp") + sources(".cu")
        return described(cpp_extension.CUDAExtension, files, include_dirs=headers, define_macros=define)

    class OptionalBuild(cpp_extension.BuildExtension):
        """With the GPU's part if there is nvcc, else without, else not at all: a failure leaves a working install."""

        def build_extensions(self) -> None:
            while True:
                try:
                    return super().build_extensions()
                except Exception as error:
                    print(f"fastlr: the extension was not built: {error}", file=sys.stderr)
                if not attempts:
                    break
                print("fastlr: trying without the GPU's part", file=sys.stderr)
                vars(self.extensions[0]).update(vars(attempts.pop()()))
            self.extensions = self.distribution.ext_modules = []

    attempts = [on_cpu, on_gpu] if root and torch.version.cuda else [on_cpu]
    return {"ext_modules": [attempts.pop()()], "cmdclass": {"build_ext": OptionalBuild}}


setup(
    packages=["fastlr", "fastlr.kernels", *find_packages(str(HERE), include=["fastlr.*"])],
    package_dir={"fastlr": "fastlr", "fastlr.kernels": "kernels"},
    package_data={"fastlr": ["py.typed"]},
    **extension(),
)
