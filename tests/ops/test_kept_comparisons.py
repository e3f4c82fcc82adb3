"""What a machine has compared, a later process does not compare again; anything else it does."""

import json
import os
import threading
import time
from types import SimpleNamespace

import torch
from expected import needs_triton, warned
from pytest import fixture, mark

from fastlr.ops import dispatch, kept_comparisons, kernel_checks
from fastlr.ops.kernel_calls import draw

changed_as_it_is = kept_comparisons.sources_changed
KEY = {"fastlr": "a digest", "triton": "3.6.0", "GPU": "H100 9.0"}


def sums(g, x):
    return (g * x).sum(1)


class Process:
    """Comparisons as a new process has them, on a stand-in for a GPU."""

    def __init__(self, **options):
        self.comparisons = kernel_checks.Comparisons(kept_comparisons.KeptComparisons(**options))
        self.compared = []

    def agrees(self, kernel=sums, kind="float32 by _sums(BLOCK=64)", name="sums"):
        def twin(*args):
            self.compared.append(kind)
            return sums(*args)

        args = draw(3, 5), draw(3, 5, seed=1)
        return self.comparisons.agrees(name, kind, kernel, twin, args, (0, 1))


@fixture
def key(monkeypatch, tmp_path):
    """What comparisons are made for, to be changed by tests."""
    key = dict(KEY)
    monkeypatch.setenv("FASTLR_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr(kept_comparisons, "made_for", lambda device: dict(key))
    return key


def files(tmp_path):
    return sorted(path for path in (tmp_path / "kept").glob("*") if path.name != "lock")


def test_what_was_passed_is_not_compared_again(key):
    first, second = Process(), Process()
    assert first.agrees()
    assert first.compared
    launches = []
    assert second.agrees(lambda *args: launches.append(1) or sums(*args))
    assert (second.compared, launches) == ([], [1]), "launched once, so that it is loaded"
    assert second.agrees(kind="float32 by _sums(BLOCK=128)"), "another compiled variant"
    assert second.agrees(name="norms")
    assert len(set(second.compared)) == 2
    third = Process(believed=False)
    assert third.agrees()
    assert third.compared


@mark.parametrize("changed", [*KEY, "another"])
def test_nothing_is_believed_where_the_key_is_another(key, changed):
    assert Process().agrees()
    key[changed] = "another"
    later = Process()
    assert later.agrees()
    assert later.compared


def test_a_file_of_another_key_under_this_name_is_not_believed(key, tmp_path):
    assert Process().agrees()
    (path,) = files(tmp_path)
    text = path.read_text()
    key["triton"] = "3.7.0"
    assert Process().agrees()
    (other,) = {*files(tmp_path)} - {path}
    other.write_text(text)
    later = Process()
    assert later.agrees()
    assert later.compared


def one_digit(text):
    return text.replace("BLOCK=64", "BLOCK=65")


@mark.parametrize(
    "damaged",
    [
        lambda text: text[:-20],
        lambda text: "",
        lambda text: "[1, 2]",
        lambda text: "[" * 100_000,
        one_digit,
        lambda text: json.dumps({**json.loads(text), "passed": 3}),
        lambda text: json.dumps({**json.loads(text), "digest": None}),
    ],
)
def test_a_damaged_file_is_made_anew(key, tmp_path, damaged):
    kind = "float32 by _sums(BLOCK=65)"
    assert Process().agrees()
    (path,) = files(tmp_path)
    path.write_text(damaged(path.read_text()))
    later = Process()
    assert later.agrees(kind=kind)
    assert later.compared
    assert files(tmp_path) == [path]
    again = Process()
    assert again.agrees(kind=kind)
    assert not again.compared


def test_the_file_of_another_user_is_not_believed(key, monkeypatch):
    assert Process().agrees()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    later = Process()
    assert later.agrees()
    assert later.compared


def test_a_failed_comparison_is_not_kept_and_its_op_is_compared_anew(key):
    assert Process().agrees()
    assert Process().agrees(name="norms")
    second = Process()
    with warned("sums: its Triton kernel is off"):
        assert not second.agrees(lambda g, x: 2 * sums(g, x), kind="bfloat16")
    third = Process()
    with warned("sums: its Triton kernel is off"):
        assert not third.agrees(lambda g, x: 2 * sums(g, x), kind="bfloat16")
    assert third.agrees()
    assert "float32 by _sums(BLOCK=64)" in third.compared
    third.compared.clear()
    assert third.agrees(name="norms")
    assert not third.compared, "the other op's are kept"


def test_what_others_have_written_meanwhile_stays(key):
    first, second = Process(), Process()
    assert first.agrees(kind="a")
    assert second.agrees(kind="b")
    assert first.agrees(kind="c")
    later = Process()
    for kind in "abc":
        assert later.agrees(kind=kind)
    assert not later.compared


def test_what_fails_is_forgotten_while_another_enters(key):
    """The one that has read what was passed writes it after the one that has dropped it."""
    kept = kept_comparisons.KeptComparisons()
    kept.enter(0, "sums", "wrong now")
    other = threading.Thread(target=kept_comparisons.KeptComparisons().forget, args=(0, "sums"))

    def slowly(passed):
        other.start()
        other.join(0.3)  # it waits, or forgets now
        return passed | {("norms", "a")}

    kept._change(0, slowly)
    other.join()
    later = kept_comparisons.KeptComparisons()
    assert later.passed(0, "norms", "a")
    assert not later.passed(0, "sums", "wrong now")


def test_a_folder_that_cannot_be_written_is_no_error(key, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FASTLR_CACHE", str(tmp_path / "file" / "kept"))
    for process in (Process(), Process()):
        assert process.agrees()
        assert process.compared


def test_a_full_disk_leaves_no_part_of_a_file(key, monkeypatch, tmp_path):
    assert Process().agrees(kind="a")

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(kept_comparisons.os, "replace", full)
        assert Process().agrees(kind="b")
    assert files(tmp_path) == []


def test_nothing_is_kept_where_it_is_switched_off(key, monkeypatch, tmp_path):
    assert Process().agrees()
    monkeypatch.setenv("FASTLR_CACHE", "0")
    later = Process()
    assert later.agrees()
    assert later.compared
    assert len(files(tmp_path)) == 1
    assert kept_comparisons.summary().startswith("none: FASTLR_CACHE=0")


def test_the_folder_is_that_of_the_users_caches(monkeypatch, tmp_path):
    monkeypatch.delenv("FASTLR_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kept_comparisons.folder() == tmp_path / "fastlr"
    assert kept_comparisons.summary() == f"none yet in {tmp_path}/fastlr"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kept_comparisons.folder() == tmp_path / ".cache" / "fastlr"


def test_without_a_folder_of_the_users_nothing_is_kept(monkeypatch):
    """In a container of a user without HOME, or with a relative one, none is made where it runs."""
    monkeypatch.delenv("FASTLR_CACHE")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert kept_comparisons.folder() is None


def test_on_a_cpu_nothing_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("FASTLR_CACHE", str(tmp_path / "kept"))
    assert Process().agrees()
    assert files(tmp_path) == []


def test_doctor_compares_what_was_kept(key, monkeypatch):
    earlier = Process()
    assert earlier.agrees()
    monkeypatch.setattr(dispatch, "_comparisons", earlier.comparisons)
    process = Process()
    with dispatch.compared_anew():
        process.comparisons = dispatch._comparisons
        assert process.agrees()
    assert process.compared
    assert dispatch._comparisons is earlier.comparisons


# ---------------------------------------------------------------------------------- the key itself


@fixture
def gpu(monkeypatch, tmp_path):
    """A stand-in for a GPU of which everything can be told."""
    gpu = SimpleNamespace(name="H100", major=9, minor=0, multi_processor_count=132, total_memory=80)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(kept_comparisons, "DRIVER", tmp_path / "version")
    kept_comparisons.DRIVER.write_text("NVRM version: 580.65")
    monkeypatch.setattr(kept_comparisons, "sources_changed", lambda: False)
    kept_comparisons._described.cache_clear()
    kept_comparisons._sources.cache_clear()
    yield gpu
    kept_comparisons._sources.cache_clear()
    kept_comparisons._described.cache_clear()


@needs_triton
def test_the_key_tells_every_part(gpu, monkeypatch, tmp_path):
    def told():
        kept_comparisons._described.cache_clear()
        return kept_comparisons.made_for(0)

    before = told()
    assert set(before) == {"fastlr", "triton", "ptxas", "environment", "torch", "driver", "GPU"}
    assert before == told()
    assert "ptxas" in before["ptxas"]
    assert before["driver"] == "NVRM version: 580.65"
    assert kept_comparisons.made_for(-1) is None
    kept_comparisons.DRIVER.write_text("NVRM version: 590.10")
    assert [part for part, text in told().items() if text != before[part]] == ["driver"]
    gpu.multi_processor_count = 114
    assert [part for part, text in told().items() if text != before[part]] == ["driver", "GPU"]
    monkeypatch.setenv("TRITON_F32_DEFAULT", "tf32")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert "TRITON_F32_DEFAULT" in told()["environment"]
    assert "TRITON_CACHE_DIR" not in told()["environment"]
    kept_comparisons.DRIVER.unlink()
    assert told() is None, "a driver that cannot be told"


@needs_triton
@mark.parametrize("name", ["TRITON_F32_DEFAULT", "NVIDIA_TF32_OVERRIDE", "TRITON_KERNEL_OVERRIDE"])
def test_nothing_is_kept_once_the_environment_is_another(gpu, monkeypatch, name):
    """Kernels may have been compiled, and comparisons made, with either."""
    before = kept_comparisons.made_for(0)
    assert before is not None
    monkeypatch.setenv(name, "1")
    assert kept_comparisons.made_for(0) is None
    monkeypatch.delenv(name)
    assert kept_comparisons.made_for(0) == before


@needs_triton
def test_code_from_files_that_nobody_looks_at_is_never_known(gpu, monkeypatch):
    monkeypatch.setenv("TRITON_KERNEL_OVERRIDE", "1")
    assert kept_comparisons.made_for(0) is None


@needs_triton
@mark.parametrize("lost", [[], ["gone.py"]])
def test_nothing_is_kept_where_sources_are_missing(gpu, monkeypatch, tmp_path, lost):
    """As in a zip file, after an uninstall, or beside the dangling links of an editor."""
    package = SimpleNamespace(__path__=[tmp_path])
    for name in lost:
        (tmp_path / name).symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr(kept_comparisons, "import_module", lambda _: package)
    monkeypatch.setattr(kept_comparisons, "sources_changed", changed_as_it_is)
    assert kept_comparisons.made_for(0) is None


@needs_triton
def test_a_changed_source_changes_the_key(monkeypatch, tmp_path):
    path = tmp_path / "kernel.py"
    path.write_text("x = 1")
    monkeypatch.setattr(kept_comparisons, "_sources", lambda: [path])
    monkeypatch.setattr(kept_comparisons, "_IMPORTED", time.time() + 60)
    assert not kept_comparisons.sources_changed()
    before = kept_comparisons._digest_of_sources()
    path.write_text("x = 2")
    assert kept_comparisons._digest_of_sources() != before
    monkeypatch.setattr(kept_comparisons, "_IMPORTED", time.time() - 60)
    assert kept_comparisons.sources_changed(), "what is loaded may be older"
    assert kept_comparisons.made_for(0) is None


def test_every_kernel_is_among_the_sources():
    names = {path.name for path in kept_comparisons._sources()}
    assert {"row_norms.py", "launching.py", "kernel_checks.py", "tuned.json", "norms.py"} <= names
