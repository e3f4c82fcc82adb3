"""The sources of fastlr._C: sanitizers check the protocol on the CPU, nvcc compiles them.

nvcc compiles for every architecture, with no GPU present.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
from expected import refused
from pytest import fixture, importorskip, mark, param, raises, skip

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ["-std=c++20", "-fno-strict-aliasing", "-pthread", "-Wall", "-Wextra", "-Werror"]
CHECK = ["tests/native/check_reductions.cpp", "csrc/host_group.cpp"]
STAND_IN = ["-Itests/native/stand_in", "-Icsrc"]
CHECK_OF_DEVICE = [
    "tests/native/check_device_group.cpp",
    "tests/native/stand_in/runtime.cpp",
    "csrc/host_group.cpp",
    "-xc++",
    "csrc/device_group.cu",
    "-xnone",
]
COMPILER = shutil.which("g++") or shutil.which("clang++")
pytestmark = mark.skipif(not (ROOT / "csrc").is_dir(), reason="needs a checkout with csrc/")


def run(command, **options):
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, **options)
    return done.returncode, done.stdout + done.stderr


def sanitized(sanitizer, includes, sources, program):
    """Build a check of tests/native, which says how much it checked; return what it says."""
    flags = [*FLAGS, "-O1", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    code, said = run([COMPILER, *flags, *includes, *sources, "-o", str(program), "-lrt"])
    if code != 0 and re.search(r"cannot find .*(asan|ubsan|tsan)", said):
        skip("this compiler has no sanitizers")
    assert code == 0, said
    code, said = run([str(program)])
    assert code == 0, said[-4000:]
    return said


@mark.skipif(COMPILER is None, reason="needs g++ or clang++")
@mark.long
@mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(sanitizer, tmp_path):
    """Sanitizers pass kernels in slow motion and their twins, which are compared with a plain sum.

    Time-outs and disagreements between ranks are among the cases.
    """
    said = sanitized(sanitizer, ["-Icsrc"], CHECK, tmp_path / "check")
    assert re.search(r"^\d{6,} checks, 0 wrong$", said, re.MULTILINE), said[-4000:]


@mark.skipif(COMPILER is None or sys.platform != "linux", reason="needs g++ or clang++, and Linux")
@mark.long
def test_the_gpus_host_side_works_between_processes(tmp_path):
    """DeviceGroup in several processes, over a stand-in of the CUDA runtime, with its kernels.

    Sums have the bits of a plain sum and of the CPU's group, at odd sizes and in chunks; ranks
    that call something else, calls of the runtime that fail and a rank that ends or is stuck are
    told in time, and nothing is held after the end.
    """
    said = sanitized("address,undefined", STAND_IN, CHECK_OF_DEVICE, tmp_path / "check")
    assert re.search(r"^\d{4,} checks, 0 wrong$", said, re.MULTILINE), said[-4000:]


@mark.skipif(COMPILER is None, reason="needs g++ or clang++")
def test_the_gpus_host_side_fits_the_stand_in():
    """What the long test above runs compiles without a warning, where nvcc is not."""
    command = [COMPILER, *FLAGS, *STAND_IN, "-fsyntax-only", "-x", "c++", "csrc/device_group.cu"]
    assert run(command) == (0, "")


def load_setup():
    """setup.py without running setup()."""
    import setuptools

    spec = importlib.util.spec_from_file_location("fastlr_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    before, setuptools.setup = setuptools.setup, lambda **_: None
    try:
        spec.loader.exec_module(module)
    finally:
        setuptools.setup = before
    return module


@fixture(scope="module")
def setup_module_of_fastlr():
    return load_setup()


def test_setuptools_that_is_too_old_is_told_in_a_line(monkeypatch):
    monkeypatch.setattr("setuptools.__version__", "65.5.0")
    said = "fastlr: setuptools 65.5.0 is too old, 77 is needed: pip install -U setuptools wheel"
    with raises(SystemExit, match=said):
        load_setup()


def test_without_torch_the_part_for_the_cpu_is_built(monkeypatch, setup_module_of_fastlr):
    """As in an isolated build."""
    importorskip("pybind11")
    monkeypatch.setitem(sys.modules, "torch", None)
    (made,) = setup_module_of_fastlr.extension()["ext_modules"]
    assert made.sources
    assert all(source.endswith(".cpp") for source in made.sources)
    assert isinstance(made.extra_compile_args, list)
    assert not made.libraries


@mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@mark.parametrize("every", [False, param(True, marks=mark.long)])
def test_nvcc_compiles_and_links(every, tmp_path, setup_module_of_fastlr, monkeypatch):
    """nvcc gives kernels with no spills and 16-byte loads and stores, in a library that loads.

    It compiles for every architecture, or the kernels alone for the newest, and links nothing.
    """
    root = setup_module_of_fastlr.cuda_root()
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    wanted = setup_module_of_fastlr.architectures()
    # An older nvcc does not know the last.
    assert wanted == "8.0 9.0 10.0+PTX" or "10.0" not in wanted
    archs = [a.replace(".", "") for a in wanted.removesuffix("+PTX").split()][0 if every else -1 :]
    library = tmp_path / "device_group.so"
    nvcc = [f"{root}/bin/nvcc", *"-std=c++17 -O3 -Icsrc -Xptxas -v csrc/device_group.cu".split()]
    nvcc += ["--keep", "--keep-dir", str(tmp_path)]
    if every:
        nvcc += [f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs]
        nvcc += ["-Xcompiler", "-fPIC", "-shared", "--cudart=static", "-o", str(library)]
    else:
        nvcc += [f"-arch=sm_{archs[-1]}", "-cubin", "-o", str(tmp_path / "device_group.cubin")]
    code, said = run(nvcc)
    assert code == 0, said
    kernels = re.findall(r"Compiling entry function '(\w+)' for 'sm_(\d+)'", said)
    for name in ("one_shot", "two_shot", "norm"):
        for arch in archs:
            assert sum(f"{name}_kernel" in kernel and at == arch for kernel, at in kernels) == 2, (
                name,
                arch,
            )
    assert not re.search(r"[1-9]\d* bytes spill", said), said
    if every:
        loaded = f"import ctypes, os; ctypes.CDLL({str(library)!r}, mode=os.RTLD_NOW)"
        assert run([sys.executable, "-c", loaded]) == (0, "")
    of_top = f".compute_{archs[-1]}" if every else ""
    text = (tmp_path / f"device_group{of_top}.ptx").read_text()
    for instruction in (
        "ld.acquire.sys",
        "st.release.sys",
        "fence.acq_rel.sys|fence.sc.sys|membar.sys",
        r"ld\S*\.v4",
        r"st\S*\.v4",
    ):
        assert re.search(instruction, text), instruction
    assert "ld.global.nc" not in text, "peers write what is read: no read-only cache"


@mark.skipif(COMPILER is None, reason="needs a compiler")
def test_an_install_without_a_working_compiler_has_no_extension(tmp_path):
    """Sources that do not compile, FASTLR_NO_EXT, no compiler: the build ends well, and says so."""
    for name in ("csrc", "fastlr", "kernels"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "__pycache__")
        )
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    no_nvcc = {
        **os.environ,
        "PATH": str(tmp_path / "bin"),
        "CC": "false",
        "CXX": "false",
        "PYTHONWARNINGS": "ignore",
    }
    (tmp_path / "bin").mkdir()
    for environment in ({**no_nvcc, "FASTLR_NO_EXT": "1"}, no_nvcc):
        done = subprocess.run(
            build, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        assert ("was not built" in done.stderr) == (environment is no_nvcc)
        assert not list((tmp_path / "fastlr").glob("_C*"))


def test_what_was_built_says_what_it_has():
    native = importorskip("fastlr._C")
    assert native.cuda == bool(native.architectures)
    assert hasattr(native, "DeviceGroup") == native.cuda
    assert native.protocol == int(
        re.search(r"kProtocol = (\d+)", (ROOT / "csrc/protocol.h").read_text()).group(1)
    )
    assert Path(native.__file__).suffix == Path("x" + sysconfig.get_config_var("EXT_SUFFIX")).suffix


def test_arguments_of_the_binding_are_checked():
    native = importorskip("fastlr._C")
    from fastlr.errors import DistributedError, InputError

    for options, says in [
        ({"rank": 2}, "rank must be from 0 to 1"),
        ({"size": 1}, "size must be from 2 to 8"),
        ({"size": 9}, "size must be from 2 to 8"),
        ({"half_bytes": 100}, "half_bytes must be at least 4096"),
        ({"timeout": float("nan")}, "timeout must be"),
        ({"half_bytes": 1 << 60}, "cannot reserve|cannot make"),
    ]:
        with raises((InputError, DistributedError), match=says):
            native.HostGroup(
                **{"rank": 0, "size": 2, "half_bytes": 4096, "timeout": 1.0, **options}
            )
    group = native.HostGroup(0, 2, 4096, 1.0)
    for bad, says in [
        ([1.0], "must be a tensor, not list"),
        (
            torch.ones(3, dtype=torch.float64),
            "dtype must be torch.bfloat16 or torch.float32, not torch.float64",
        ),
        (torch.ones(4, 4)[:, ::2], "dense and contiguous"),
        (torch.ones(3, device="meta"), "is on meta, but this group works on cpu"),
        (torch._neg_view(torch.ones(3)), "resolve_neg"),
    ]:
        with refused(says):
            group.all_reduce(bad)
    with refused("algorithm must be"):
        group.all_reduce(torch.ones(3), algorithm="ring")
    with refused(r"open\(\) has not been called", DistributedError):
        group.all_reduce(torch.ones(3))
    with refused("one address for each rank"):
        group.open([group.address()])
    with refused("not an address"):
        group.open([group.address(), b"nonsense"])
    with refused("cannot reach the memory of rank 1|is not the memory of rank 1", DistributedError):
        group.open([group.address(), b"1 999999 5"])
    group.seal()
    with refused("sealed", DistributedError):
        group.address()
