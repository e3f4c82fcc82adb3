"""Build fastlr: the Python packages always, the C++/CUDA extension (csrc/) where a compiler is found.

Everything else is in pyproject.toml. The extension is optional: without torch at build time (build isolation), a
compiler or nvcc, or when it does not compile, fastlr installs without it and ``fastlr doctor`` says so. Build it with
``pip install --no-build-isolation .``. FASTLR_NO_EXT=1 skips it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

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


def extension() -> dict:
    """Return the setup() arguments of the extension; empty where there is nothing to build or to build with."""
    cpp = sorted(str(p.relative_to(HERE)) for p in HERE.glob("csrc/*.cpp"))
    cu = sorted(str(p.relative_to(HERE)) for p in HERE.glob("csrc/*.cu"))
    if not cpp or os.environ.get("FASTLR_NO_EXT") == "1":
        return {}
    root = cuda_root() if cu else None
    if root:
        os.environ["CUDA_HOME"] = root  # read by torch.utils.cpp_extension when it is imported
    try:
        from torch.utils import cpp_extension
    except ImportError:
        print("fastlr: torch is not importable here (use --no-build-isolation); no extension", file=sys.stderr)
        return {}

    class OptionalBuild(cpp_extension.BuildExtension):
        def build_extensions(self) -> None:
            try:
                super().build_extensions()
            except Exception as error:  # any failure of compiler or toolkit leaves a working install without it
                print(f"fastlr: the extension was not built: {error}", file=sys.stderr)
                self.extensions = []
                self.distribution.ext_modules = []

    include = [str(HERE / "csrc")]
    if root:
        include += [str(p) for folder in sys.path for p in Path(folder).glob("nvidia/cu*/include")]
        flags = {"cxx": ["-O3"], "nvcc": ["-O3"]}
        define = [("FASTLR_WITH_CUDA", None)]
        ext = cpp_extension.CUDAExtension(
            "fastlr._C", cpp + cu, include_dirs=include, define_macros=define, extra_compile_args=flags
        )
    else:
        ext = cpp_extension.CppExtension("fastlr._C", cpp, include_dirs=include, extra_compile_args={"cxx": ["-O3"]})
    return {"ext_modules": [ext], "cmdclass": {"build_ext": OptionalBuild}}


setup(
    packages=["fastlr", "fastlr.kernels", *find_packages(str(HERE), include=["fastlr.*"])],
    package_dir={"fastlr": "fastlr", "fastlr.kernels": "kernels"},
    package_data={"fastlr": ["py.typed"]},
    **extension(),
)
