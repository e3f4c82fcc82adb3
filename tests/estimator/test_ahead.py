"""What a first estimate will launch is compiled before it: noted soundly, found by the launches."""

import copy
import os
import sys
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from expected import needs_triton
from pytest import fixture, importorskip, mark, raises
from torch import nn
from torch.testing import assert_close

import fastlr
from bench import launched_kernels
from fastlr import ops
from fastlr.estimator import ahead, progress
from fastlr.estimator.ahead import Ahead
from fastlr.ops import compile_ahead, cudnn, kept_comparisons
from fastlr.ops.compile_ahead import Architecture, Launch, Memory
from fastlr.ops.torch_private import cudnn_enabled

pytestmark = needs_triton
H100 = Architecture("cuda", 90, 32)


def net():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Hardswish()
    depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.BatchNorm2d(16), nn.ReLU()
    pointwise = nn.Conv2d(16, 24, 1), nn.BatchNorm2d(24), nn.ReLU()
    end = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10)
    return nn.Sequential(*layers, *depthwise, *pointwise, *end).eval()


def estimator(n=8, **options):
    images = fastlr.TensorInputs(
        torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    )
    return fastlr.LocalRedundancy(net(), images, n, batch_size=4, progress=False, **options)


@fixture
def h100(monkeypatch, tmp_path):
    """Chunks as on a GPU; what would be compiled is listed, not compiled."""
    compiled = []

    def compile_side_by_side(noting, target):
        compiled.append((len(noting()), target))
        return True

    monkeypatch.setenv("FASTLR_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr(kept_comparisons, "made_for", lambda device: {"GPU": "H100"})
    monkeypatch.setattr(Ahead, "_target", lambda self: H100)
    monkeypatch.setattr(compile_ahead, "compile_side_by_side", compile_side_by_side)
    return compiled


def measured(one):
    """An estimate whose chunks are compiled ahead, as those on a GPU are."""
    norms = one.chunks.passes.norms

    def after(start, stop, draw):
        one.chunks.ahead.compile(start, stop)
        return norms(start, stop, draw)

    one.chunks.passes.norms = after
    return one.measure()


def noted_and_launched(monkeypatch, model, x, dtype):
    """The variants that are noted, and those of a pass whose kernels are asked and give zeros."""
    from fastlr.kernels import launching

    launched = set()
    plain = launched_kernels.variant

    def noted(kernel, args, given):
        constants = {name: given[name] for name in given if name not in launching.FUSED}
        launched.add(launching.variant(kernel, args, constants))
        return plain(kernel, args, given)

    def cotangent(z):
        return fastlr.Categorical().cotangent(z, "rademacher", torch.arange(len(z)), 0)

    launches, note = compile_ahead.noted()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        expected = fastlr.per_sample_grad_sq_norms(copy.deepcopy(model), x, cotangent)
        with ops.noting_launches(note):
            found = fastlr.per_sample_grad_sq_norms(copy.deepcopy(model), x, cotangent)
    assert_close(found, expected, rtol=1e-4 if dtype == torch.float32 else 0.05, atol=0)
    monkeypatch.setattr(launched_kernels, "variant", noted)
    launched_kernels.launched(model, x, dtype, fastlr.Categorical())
    return set(launches), launched


def test_all_that_is_launched_is_noted(monkeypatch):
    """Comparisons and audits launch more, which are noted too."""
    noted, launched = noted_and_launched(monkeypatch, net(), torch.randn(4, 3, 8, 8), torch.float32)
    assert len(launched) > 8
    assert launched <= noted


@mark.long
def test_all_that_the_headline_launches_is_noted(monkeypatch):
    """MobileNetV3-Large in bf16, by a chunk of four."""
    torchvision = importorskip("torchvision")
    torch.manual_seed(0)
    model = torchvision.models.mobilenet_v3_large(num_classes=2).eval()
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 224, 224).contiguous(memory_format=torch.channels_last)
    noted, launched = noted_and_launched(monkeypatch, model, x, torch.bfloat16)
    assert len(launched) > 50
    assert launched <= noted


def test_an_estimate_is_the_same_and_its_engine_untouched(h100):
    plain, one = estimator(), estimator()
    expected = plain.measure()
    found = measured(one)
    assert found.value == expected.value
    assert one.engine.audits.failed == 0
    assert one.engine.known.comparisons == plain.engine.known.comparisons == 1
    ((count, target),) = h100
    assert target == H100
    assert count > 8


def test_cudnn_plans_nothing_of_what_kernels_will_serve(h100, monkeypatch):
    monkeypatch.setattr(cudnn, "PLANNED_ON", ("cpu",))
    one, seen = estimator(), []
    one.model[0].register_forward_hook(lambda *_: seen.append(cudnn_enabled()))
    launches = one.chunks.ahead._launches(0, 4)
    assert launches and seen and not any(seen)
    assert cudnn_enabled()


class Augmented(torch.utils.data.Dataset):
    """Images with noise of torch's own generator, as augmented ones have."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((3, 8, 8), index / 8) + torch.randn(3, 8, 8)


def test_inputs_that_draw_draw_the_same_whether_kernels_were_compiled(h100):
    values = []
    for measure in (fastlr.LocalRedundancy.measure, measured, measured):
        torch.manual_seed(2)
        one = fastlr.LocalRedundancy(
            net(), fastlr.TensorInputs(Augmented()), 8, batch_size=4, progress=False
        )
        values.append(measure(one).value)
    assert len(h100) == 1
    assert values[1:] == values[:1] * 2


def test_a_machine_compiles_once_for_a_model(h100, tmp_path):
    measured(estimator())
    measured(estimator())
    measured(estimator(n=6))  # a last chunk of two
    assert len(h100) == 1
    measured(estimator(n=8, dtype="bf16"))
    assert len(h100) == 2
    assert len(list((tmp_path / "kept").iterdir())) == 2


def test_what_did_not_compile_is_tried_again(h100, monkeypatch):
    monkeypatch.setattr(compile_ahead, "compile_side_by_side", lambda *_: h100.append(1))
    measured(estimator())
    measured(estimator())
    assert h100 == [1, 1]


def test_a_failure_leaves_the_estimate_as_it_is(h100, monkeypatch):
    def fail(*_):
        raise OSError("no process can be started")

    monkeypatch.setattr(compile_ahead, "compile_side_by_side", fail)
    assert measured(estimator()).value == estimator().measure().value


def test_nothing_is_compiled_ahead_on_a_cpu_or_where_nothing_is_kept(monkeypatch):
    one = estimator()
    monkeypatch.setattr(Ahead, "_launches", lambda *_: 1 / 0)
    one.chunks.ahead.compile(0, 4)
    monkeypatch.setattr(ahead, "suppress", lambda *_: nullcontext())
    monkeypatch.setattr(Ahead, "_target", lambda self: H100)
    other = estimator()
    other.chunks.ahead.compile(0, 4)  # FASTLR_CACHE=0
    monkeypatch.setattr(Ahead, "_mark", lambda *_: SimpleNamespace(exists=lambda: False))
    with raises(ZeroDivisionError):
        estimator().chunks.ahead.compile(0, 4)


def test_it_is_said_after_two_seconds(h100, monkeypatch, capsys):
    said = threading.Event()
    monkeypatch.setattr(progress, "LINE_PATIENCE", 0)
    monkeypatch.setattr(progress, "_watched", lambda: True)
    monkeypatch.setattr(compile_ahead, "compile_side_by_side", lambda *_: said.wait(0.3))
    one = estimator()
    one.chunks.ahead.told = True
    one.chunks.ahead.compile(0, 4)
    assert "fastlr: compiling " in capsys.readouterr().err
    untold = estimator()
    untold.chunks.ahead.compile(0, 4)
    assert capsys.readouterr().err == ""


def test_two_threads_do_not_note_at_once():
    with ops.noting_launches(print), raises(RuntimeError, match="another thread"):
        ops.noting_launches(print).__enter__()
    assert ops.backend_for(torch.ones(1)) == "torch"


# ------------------------------------------------------------------------- Triton's cache on disk


def files_of(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def launches_of(*calls):
    launches, note = compile_ahead.noted()
    with ops.noting_launches(note):
        for name, *args in calls:
            ops.run(name, *args)
    return list(launches.values())


@fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return tmp_path / "triton"


def found_in_the_cache(monkeypatch, *calls):
    """Go the way of these calls' launches up to the compiled kernel; whether it was there."""
    from triton import knobs

    from fastlr.kernels import launching

    found = []

    def launch(kernel, args, constants):
        kernel.device_caches.clear()  # as a new process has them
        kernel.warmup(*args, grid=(1,), **constants, **launching.FUSED)

    listener = lambda *, cache_hit, **_: found.append(cache_hit)  # noqa: E731
    monkeypatch.setattr(knobs.compilation, "listener", listener)
    with compile_ahead.without_gpu(H100), launching.noting(launch):
        for name, *args in calls:
            ops.get(name, "triton")(*args)
    return found


def test_what_is_compiled_ahead_is_found_by_the_launch(cache, monkeypatch):
    call = "dense_sq_norms", torch.ones(3, 7)
    (launch,) = launches_of(call)
    assert launch.kernel == "row_norms_kernel"
    assert compile_ahead.compiled(launch, H100)
    before = files_of(cache)
    assert any(path.suffix == ".cubin" for path in before)
    assert found_in_the_cache(monkeypatch, call) == [True]
    assert files_of(cache) == before
    unaligned = "dense_sq_norms", torch.ones(22)[1:].view(3, 7)
    assert launches_of(unaligned)[0].args[1] == Memory(torch.float32, 4)
    assert found_in_the_cache(monkeypatch, unaligned) == [False], "another variant"


@mark.long
def test_processes_compile_all_that_an_estimate_launches(cache, monkeypatch):
    """Side by side, for an H100 without one; every launch then finds its kernel, aligned or not."""
    a, g = torch.randn(3, 1, 35, 80), torch.randn(3, 1, 35, 80)
    x = torch.randn(3, 1, 6, 7)
    odd = torch.randn(3 * 42 + 1)[1:].view(3, 1, 6, 7)
    calls = [
        ("dense_sq_norms", a.flatten(1)),
        ("linear_sq_norms", a, g),
        ("linear_sq_norms", a.bfloat16(), g.bfloat16()),
        ("channel_sums", x, x),
        ("channel_sums", odd, odd),
    ]
    launches = launches_of(*calls)
    monkeypatch.setattr(compile_ahead, "processes", lambda: 2)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # is not inherited
    assert compile_ahead.compile_side_by_side(lambda: launches, H100)
    monkeypatch.delenv("TRITON_INTERPRET")
    before = files_of(cache)
    found = found_in_the_cache(monkeypatch, *calls)
    assert len(found) >= len(launches) >= 5
    assert all(found)
    assert files_of(cache) == before
    broken = Launch("fastlr.kernels.row_norms", "row_norms_kernel", (1, 2), {})
    assert not compile_ahead.compile_side_by_side(lambda: [broken], H100)


UNKNOWN = Launch("fastlr.kernels.row_norms", "no_kernel", (), {})


def test_processes_run_nothing_of_the_folder_they_are_started_in(monkeypatch, tmp_path):
    (tmp_path / "pickle.py").write_text("open('seen', 'w')\nfrom _pickle import *\n")
    monkeypatch.chdir(tmp_path)
    assert not compile_ahead.compile_side_by_side(lambda: [UNKNOWN], H100)
    assert not (tmp_path / "seen").exists()


def test_what_is_started_starts_no_more(monkeypatch, tmp_path):
    """Where Python is part of another program, that program starts, or none."""
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\nprintf "$FASTLR_CACHE" >> {tmp_path}/started\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setenv("FASTLR_CACHE", str(tmp_path))
    monkeypatch.setattr(compile_ahead, "processes", lambda: 1)
    compile_ahead.compile_side_by_side(lambda: [UNKNOWN], H100)
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    compile_ahead.compile_side_by_side(lambda: [UNKNOWN], H100)
    assert (tmp_path / "started").read_text() == "0"


def test_processes_end_where_the_launches_could_not_be_noted(monkeypatch):
    started = []
    start = compile_ahead._start
    monkeypatch.setattr(compile_ahead, "_start", lambda: started.append(start()) or started[-1])
    with raises(ZeroDivisionError):
        compile_ahead.compile_side_by_side(lambda: 1 / 0, H100)
    assert started
    assert all(process.poll() is not None for process in started)


def test_cores_are_shared_among_the_ranks_of_a_machine(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    assert compile_ahead.processes() == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert compile_ahead.processes() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100")
    assert compile_ahead.processes() == 1


def test_tritons_own_files_are_hashed_once_in_a_thread():
    from triton.runtime.cache import triton_key

    thread = compile_ahead.hash_triton_in_background()
    thread.join()
    assert triton_key.cache_info().currsize == 1
    assert compile_ahead.hash_triton_in_background() is thread
