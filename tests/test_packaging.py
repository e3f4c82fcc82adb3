"""The source distribution builds a wheel that is complete and installs into a bare environment.

Type checkers find the package there, and in an editable install.
"""

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEFT_OUT = {".git", ".venv", "build", "dist", "__pycache__", "demo-output", "runs"}
# The extension has tests of its own, and takes a compiler a minute.
ENVIRONMENT = os.environ | {"FASTLR_NO_EXT": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}


BUILD = "from setuptools import build_meta; build_meta.build_{}('{}')"


def run(*command, cwd, env=ENVIRONMENT):
    found = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(sdist, wheel), the wheel built from the sdist as an installer would."""
    if not (ROOT / "setup.py").exists():
        pytest.skip("not a source tree")
    folder = tmp_path_factory.mktemp("packages")
    source = folder / "source"

    def left_out(path, names):
        left = {n for n in names if n in LEFT_OUT or n.endswith((".egg-info", ".so", "_cache"))}
        return left if Path(path) == ROOT else left - {"runs"}

    shutil.copytree(ROOT, source, ignore=left_out, symlinks=True)
    run(sys.executable, "-c", BUILD.format("sdist", folder), cwd=source)
    sdist = next(folder.glob("*.tar.gz"))
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    unpacked = next((folder / "unpacked").iterdir())
    run(sys.executable, "-c", BUILD.format("wheel", folder), cwd=unpacked)
    return sdist, next(folder.glob("*.whl"))


def test_sdist_holds_what_builds_and_tests_it(built):
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = [
        p
        for pattern in ("csrc/*", "kernels/*.py", "fastlr/**/*.py", "tests/**/*.py")
        for p in ROOT.glob(pattern)
    ]
    wanted = {str(p.relative_to(ROOT)) for p in sources if p.is_file()} | {
        "LICENSE",
        "README.md",
        "setup.py",
        "Makefile",
    }
    assert wanted <= names, wanted - names
    assert not any("__pycache__" in name or name.endswith((".so", ".pyc")) for name in names)


def test_wheel_holds_the_packages_and_nothing_stray(built):
    with zipfile.ZipFile(built[1]) as archive:
        names = archive.namelist()
        described = next(name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(described))
        scripts = archive.read(described.replace("METADATA", "entry_points.txt")).decode()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"fastlr", described.split("/")[0]}
    modules = {str(p.relative_to(ROOT)) for p in ROOT.glob("fastlr/**/*.py")} | {
        "fastlr/py.typed",
        "fastlr/__init__.pyi",
        "fastlr/ops/tuned.json",
    }
    modules |= {f"fastlr/kernels/{p.name}" for p in ROOT.glob("kernels/*.py")}
    assert {name for name in names if name.startswith("fastlr/")} == modules
    assert metadata["Name"] == "fastlr"
    assert metadata["License-Expression"] == "Apache-2.0"
    extras = set(metadata.get_all("Provides-Extra"))
    wanted = {"models", "logging", "lightning", "huggingface", "avalanche", "rl", "docs", "dev"}
    assert wanted <= extras
    assert "fastlr = fastlr.__main__:run" in scripts


def environment_with(wheel, folder):
    """Return the programs and the packages' place of a new environment with the wheel.

    Its dependencies, torch too, come from this environment.
    """
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env", cwd=folder)
    bin_folder = folder / "env" / ("Scripts" if os.name == "nt" else "bin")
    python = bin_folder / "python"
    options = ["--no-deps", "--no-index", "--disable-pip-version-check", "-q"]
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel, cwd=folder)
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    place = Path(run(python, "-c", ask, cwd=folder).strip())
    (place / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return bin_folder, place


@pytest.mark.long
def test_installs_into_an_empty_environment(built, tmp_path):
    """The wheel alone gives fastlr."""
    bin_folder, place = environment_with(built[1], tmp_path)
    python = bin_folder / "python"
    version = built[1].name.split("-")[1]
    assert run(bin_folder / "fastlr", "--version", cwd=tmp_path).startswith(
        f"fastlr {version} (torch "
    )
    script = """
import torch, fastlr, fastlr.kernels
from pathlib import Path
home = Path(fastlr.__file__).parent
assert Path(fastlr.kernels.__file__).parent == home / "kernels", fastlr.kernels.__file__
found = fastlr.estimate(torch.nn.Linear(4, 2), fastlr.TensorInputs(torch.ones(8, 4)), 8)
print(home, fastlr.__version__, found.n)
"""
    home, found, n = run(python, "-W", "error", "-c", script, cwd=tmp_path).split()
    assert Path(home).parent == place
    assert found == version
    assert n == "8"


@pytest.mark.long
@pytest.mark.parametrize("compiler", ["with-a-compiler", "without"])
def test_a_wheel_has_the_extension_where_there_is_a_compiler(built, tmp_path, compiler):
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    env = {name: value for name, value in ENVIRONMENT.items() if name != "FASTLR_NO_EXT"}
    env["TORCH_CUDA_ARCH_LIST"] = "9.0"
    if compiler == "without":
        nowhere = tmp_path / "nothing"
        nowhere.mkdir()
        env |= {"CC": "false", "CXX": "false", "PATH": str(nowhere)}
    with tarfile.open(built[0]) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.glob("fastlr-*")
    run(sys.executable, "-c", BUILD.format("wheel", tmp_path), cwd=source, env=env)
    (wheel,) = tmp_path.glob("*.whl")
    programs, _ = environment_with(wheel, tmp_path)
    said = run(programs / "fastlr", "doctor", cwd=tmp_path, env=env)
    (line,) = [line for line in said.splitlines() if re.match(r"\w+ +fastlr\._C\b", line)]
    assert line.split()[0] == ("found" if compiler == "with-a-compiler" else "missing")


CALLS = """
import torch

import fastlr
from fastlr.integrations.lightning import LocalRedundancyMonitor

model = torch.nn.Linear(4, 2)
inputs = fastlr.TensorInputs(torch.ones(8, 4))
estimate = fastlr.estimate(model, inputs, 8, dtype="bfloat16", predictive=fastlr.Categorical())
print(estimate.value + 1.0, float(estimate), estimate.bound(0.1, unit="bits"))
estimator = fastlr.LocalRedundancy(model, inputs, seed=1, target_rel_stderr=0.05)
print(estimator.measure().stderr)
monitor = fastlr.Monitor(model, inputs, every_n_steps=10, measures=["dormant_ratio"], seed=3)
reading = monitor.step()
if reading is not None:
    print(reading.value, reading.values()["local_redundancy"])
fastlr.estimate(model, inputs, n="5")  # wrong
fastlr.estimate(model, torch.ones(8, 4))  # wrong
fastlr.LocalRedundancy(model, inputs, probe=3)  # wrong
fastlr.Monitor(model, inputs, every_n_step=10)  # wrong
LocalRedundancyMonitor(inputs, batch_size="large")  # wrong
"""
WRONG = {i for i, line in enumerate(CALLS.splitlines(), 1) if line.endswith("# wrong")}


def lines_with_errors(checker, python, folder):
    """Return the lines of the script in which a checker sees an error."""
    (folder / "script.py").write_text(CALLS)
    if checker == "mypy":
        command = [sys.executable, "-m", "mypy", "--python-executable", str(python), "script.py"]
    elif shutil.which("pyright"):
        command = ["pyright", "--pythonpath", str(python), "script.py"]
    else:
        pytest.skip("pyright is not installed")
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    found = re.findall(r"script\.py:(\d+)(?::\d+)?:? (?:- )?error", said.stdout)
    assert len(found) == len(set(found)), said.stdout
    return {int(line) for line in found}


@pytest.mark.long
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_five_wrong_calls_are_five_errors_in_an_editable_install(checker, tmp_path):
    assert lines_with_errors(checker, sys.executable, tmp_path) == WRONG


@pytest.mark.long
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_five_wrong_calls_are_five_errors_in_an_installed_package(checker, built, tmp_path):
    bin_folder, place = environment_with(built[1], tmp_path)
    assert (place / "fastlr" / "py.typed").exists()
    assert lines_with_errors(checker, bin_folder / "python", tmp_path) == WRONG
