"""Build fastlr: the Python packages always, the C++/CUDA extension (csrc/) where it compiles.

Everything else is in pyproject.toml. The extension is optional: without a compiler, or when it does
not compile, fastlr installs without it, and its first use and ``fastlr doctor`` say so; without
nvcc, or without torch at build time (build isolation), it has no GPU part. Build it with ``pip
install --no-build-isolation .``, or in place with ``python setup.py build_ext --inplace``.
TORCH_CUDA_ARCH_LIST chooses the GPUs (default "8.0 9.0 10.0+PTX"); FASTLR_NO_EXT=1 skips it all.
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

import setuptools
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

if int(setuptools.__version__.split(".")[0]) < 77:  # PEP 639
    sys.exit(
        f"fastlr: setuptools {setuptools.__version__} is too old, 77 is needed: pip install -U "
        "setuptools wheel"
    )

HERE = Path(__file__).parent.resolve()


def cuda_root() -> str | None:
    """Return the toolkit's folder as nvcc itself sees it.

    The nvcc on PATH may be a wrapper outside the toolkit.
    """
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return os.environ.get("CUDA_HOME")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "x.cu").write_text("")
        try:
            run = subprocess.run(
                [nvcc, "--dryrun", "x.cu"], capture_output=True, text=True, cwd=folder, timeout=60
            )
        except (OSError, subprocess.SubprocessError):
            return None
    top = re.search(r"^#\$ _?TOP=(.+)$", run.stderr + run.stdout, re.MULTILINE)
    return os.path.realpath(top.group(1).strip()) if top else None


def architectures() -> str:
    """Return TORCH_CUDA_ARCH_LIST, by default 8.0, 9.0 and 10.0 + PTX.

    What this nvcc does not know is left out.
    """
    named = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if named:
        return " ".join(named.replace(";", " ").split())
    wanted = ["8.0", "9.0", "10.0"]
    run = subprocess.run(["nvcc", "--list-gpu-arch"], capture_output=True, text=True, timeout=60)
    known = [a for a in wanted if f"compute_{a.replace('.', '')}" in run.stdout.split()]
    return " ".join(known or wanted) + "+PTX"


def extension() -> dict:
    """Return the setup() arguments of the extension.

    They are empty where there is nothing to build or to build with.
    """
    if os.environ.get("FASTLR_NO_EXT") == "1":
        return {}
    root = cuda_root() if shutil.which("nvcc") else None
    if root:
        os.environ["CUDA_HOME"] = root  # read by torch.utils.cpp_extension when it is imported
    builder, headers, gpu = build_ext, [], False
    try:
        import torch
        from torch.utils import cpp_extension

        builder, headers = cpp_extension.BuildExtension, cpp_extension.include_paths()
        gpu = bool(root and torch.version.cuda)
    except ImportError:
        print(
            "fastlr: torch is not importable here (use --no-build-isolation): no GPU part",
            file=sys.stderr,
        )
    try:
        import pybind11

        headers = [pybind11.get_include()]
    except ImportError:
        if not headers:  # torch has those of pybind11 too
            print("fastlr: pybind11 is not importable here: no extension", file=sys.stderr)
            return {}

    def sources(suffix: str) -> list[str]:
        return sorted(str(p.relative_to(HERE)) for p in HERE.glob(f"csrc/*{suffix}"))

    def described(make: type | Callable, files: list[str], **options: Any) -> Any:
        flags = ["-O3", "-g0", "-Wall", "-std=c++17", "-fvisibility=hidden"]
        made = make(
            "fastlr._C",
            files,
            include_dirs=["csrc", *headers, *options.pop("include_dirs", [])],
            depends=sources(".h"),
            language="c++",
            extra_compile_args={"cxx": flags, "nvcc": ["-O3"]} if options else flags,
            **options,
        )
        # Nothing of torch's is called.
        made.libraries = [name for name in made.libraries if name == "cudart"]
        return made

    def on_cpu() -> Any:
        return described(Extension, sources(".cpp"))

    def on_gpu() -> Any:
        os.environ["TORCH_CUDA_ARCH_LIST"] = architectures()
        define = [
            ("FASTLR_WITH_CUDA", None),
            ("FASTLR_ARCHITECTURES", '"' + os.environ["TORCH_CUDA_ARCH_LIST"] + '"'),
        ]
        toolkit = [str(p) for folder in sys.path for p in Path(folder).glob("nvidia/cu*/include")]
        files = sources(".cpp") + sources(".cu")
        return described(
            cpp_extension.CUDAExtension, files, include_dirs=toolkit, define_macros=define
        )

    class OptionalBuild(builder):
        """Build with the GPU's part if there is nvcc, else without it, else not at all.

        A failure leaves a working install.
        """

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

    attempts = [on_cpu, on_gpu] if gpu else [on_cpu]
    return {"ext_modules": [attempts.pop()()], "cmdclass": {"build_ext": OptionalBuild}}


setup(
    # fastlr/kernels is a link to kernels/, so that an editable install is a path that mypy and
    # pyright can follow.
    packages=find_packages(str(HERE), include=["fastlr", "fastlr.*"]),
    package_dir={"": "."},
    package_data={"fastlr": ["py.typed", "__init__.pyi", "ops/tuned.json"]},
    **extension(),
)
