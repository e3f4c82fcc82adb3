"""How many inputs a chunk takes: on a GPU, as many as the measured peak of one chunk allows.

The number is the same on all ranks and has no effect on results.
"""

import gc
from functools import partial
from itertools import count
from types import SimpleNamespace
from weakref import ref

import pytest
import torch
from expected import needs_gpu, warned
from torch import nn

import fastlr
from fastlr.ghost import runtime
from fastlr.ghost.model_io import ModelView
from fastlr.ghost.runtime import InputsThatFit
from fastlr.ghost.verification import audit

BYTES = 1000  # that an input takes at the peak, in these tests


@pytest.fixture
def peaks(monkeypatch):
    """Stand in for a GPU's memory, and return the list of chunk sizes that were measured.

    The first guess, 8 inputs, is far below what fits.
    """
    measured = []

    def peak_bytes(device, work):
        size = len(work()[0])
        measured.append(size)
        return size * BYTES

    monkeypatch.setattr("fastlr.estimator.chunks.chunk_for_memory", lambda *_: InputsThatFit(8, 8))
    monkeypatch.setattr("fastlr.estimator.chunks.peak_bytes", peak_bytes)
    monkeypatch.setattr(runtime, "free_bytes", lambda device: 50 * BYTES)
    return measured


def estimator(n, **how):
    torch.manual_seed(0)
    made = fastlr.LocalRedundancy(
        nn.Sequential(nn.Flatten(), nn.Linear(48, 3)), fastlr.ShapeImages((3, 4, 4)), n, **how
    )
    made.chunks.on_gpu = True
    return made


def test_the_measured_peak_gives_the_chunk_once(peaks):
    made = estimator(60)
    first, second = made.measure(), made.measure()
    assert peaks == [8], "measured once, on a chunk of the size that is safe"
    # 0.4 of the memory, then no more than as many chunks of one size.
    assert first.batch_size == second.batch_size == 20
    assert first.bytes_per_input == first.to_dict()["bytes_per_input"] == BYTES
    assert torch.equal(first.per_sample, second.per_sample)
    again = fastlr.LocalRedundancy(made.model, made.options.inputs, 60)
    again.chunks.on_gpu = True
    assert again.measure().batch_size == 20 and peaks == [8], "not once more for the same model"
    given = estimator(60, batch_size=8).measure()
    torch.testing.assert_close(first.per_sample, given.per_sample, rtol=1e-6, atol=0)
    assert (first.n, given.bytes_per_input) == (60, 0)


def measured_with(free, monkeypatch):
    """Measure a model of 48-entry inputs where only so many bytes are free."""
    monkeypatch.setattr(runtime, "total_bytes", lambda device: 1_000_000)
    monkeypatch.setattr(runtime, "free_bytes", lambda device: free)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 300), nn.Tanh(), nn.Linear(300, 3))
    return fastlr.estimate(model, fastlr.ShapeImages((3, 4, 4)), 60)


def test_the_chunk_is_the_same_whatever_is_free(monkeypatch):
    plenty, less = (measured_with(free, monkeypatch) for free in (1_000_000, 650_000))
    assert 1 < plenty.batch_size == less.batch_size < 60
    assert torch.equal(plenty.per_sample, less.per_sample)
    assert not less.notes


def test_a_note_says_that_little_memory_makes_the_chunk_smaller(monkeypatch):
    plenty, little = (measured_with(free, monkeypatch) for free in (1_000_000, 250_000))
    assert little.batch_size < plenty.batch_size
    assert "little memory is free" in " ".join(little.notes)
    torch.testing.assert_close(little.per_sample, plenty.per_sample, rtol=1e-4, atol=0)


def test_a_value_does_not_depend_on_the_time_that_passes(monkeypatch):
    results = []
    for clock in (lambda: 0.0, count().__next__):
        monkeypatch.setattr(audit.time, "perf_counter", clock)
        results.append(estimator(60, batch_size=8).measure())
    still, running = results
    assert still.audits > running.audits, "only audits go by it"
    assert torch.equal(still.per_sample, running.per_sample)
    assert still.per_parameter == running.per_parameter


@pytest.mark.parametrize(
    "how",
    [
        {"n": 8},
        {"n": 60, "target_rel_stderr": 0.5},
        {"n": 60, "batch_size": 30},
        {"n": 20, "probe": "exact"},
    ],
)
def test_no_peak_is_measured_where_it_would_change_nothing(peaks, how):
    assert estimator(**how).measure().bytes_per_input == 0
    assert not peaks


def test_a_peak_above_the_guess_makes_chunks_smaller(peaks, monkeypatch):
    monkeypatch.setattr(runtime, "free_bytes", lambda device: 10 * BYTES)
    assert estimator(60).measure().batch_size == 4


def test_memory_that_runs_out_while_measuring_halves_the_chunk(peaks):
    made = estimator(60)
    whole = made.passes.norms

    def norms(start, stop):
        if stop - start > 4:
            raise torch.OutOfMemoryError("out of memory")
        return whole(start, stop)

    made.passes.norms = norms  # type: ignore[method-assign]
    with warned("out of memory with 8 inputs"):
        assert made.measure().batch_size == 4


def test_ranks_take_the_least_of_their_chunks(peaks):
    asked = []
    members = SimpleNamespace(size=2, least=lambda most: asked.append(most) or 10)
    assert estimator(60).chunks.first_size(members) == 10
    assert asked == [20]
    assert estimator(16).chunks.first_size(SimpleNamespace(size=2, least=lambda most: most)) == 8
    assert len(peaks) == 1, "a rank's share of 16 inputs fits the first guess"


def test_the_peak_is_of_the_work_alone(monkeypatch):
    held = {"now": 700, "peak": 9000}

    def work():
        held["peak"] = max(held["peak"], held["now"] + 300)

    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda device: held.update(peak=held["now"])
    )
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: held["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: held["peak"])
    assert runtime.peak_bytes(torch.device("cuda"), work) == 300


@needs_gpu
def test_a_chunk_on_a_gpu_takes_what_was_measured():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 3)
    ).cuda()
    result = fastlr.estimate(model, fastlr.ShapeImages((3, 64, 64)), 5000)
    assert result.bytes_per_input > 0
    assert result.batch_size <= 1024


def test_looking_at_what_a_pass_saves_leaves_no_graph():
    class Marker:
        """Lives as long as the graph."""

    model = nn.Linear(3, 2)
    markers = [Marker()]

    def forward():
        z = torch.tanh(model(torch.ones(1, 3)))  # saves its output
        assert z.grad_fn is not None
        z.grad_fn.register_prehook(partial(lambda held, g: None, markers[0]))
        return z

    assert min(runtime.chunk_for_memory(ModelView.of(model), 1, forward)) > 1
    alive = ref(markers.pop())
    gc.collect()
    assert alive() is None
