"""How many inputs a chunk takes: as many as the memory allows, by a formula.

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
from fastlr.estimator import memory
from fastlr.estimator.memory import InputsThatFit
from fastlr.ghost.model.view import ModelView


def estimator(n, **how):
    torch.manual_seed(0)
    made = fastlr.LocalRedundancy(
        nn.Sequential(nn.Flatten(), nn.Linear(48, 3)), fastlr.ShapeImages((3, 4, 4)), n, **how
    )
    made.chunks.on_gpu = True
    return made


def let_fit(monkeypatch, count):
    monkeypatch.setattr(
        "fastlr.estimator.chunks.chunk_for_memory", lambda *_: InputsThatFit(count, count)
    )


def measured_with(free, monkeypatch):
    """Measure a model of 48-entry inputs where only so many bytes are free."""
    monkeypatch.setattr(memory, "total_bytes", lambda device: 1_000_000)
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
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
        monkeypatch.setattr("time.perf_counter", clock)
        results.append(estimator(60, batch_size=8).measure())
    still, running = results
    assert still.audits == running.audits
    assert torch.equal(still.per_sample, running.per_sample)
    assert still.per_parameter == running.per_parameter


def test_memory_that_runs_out_halves_the_chunk(monkeypatch):
    let_fit(monkeypatch, 8)
    made = estimator(64)
    whole = made.passes.norms

    def norms(start, stop, draw):
        if stop - start > 4:
            raise torch.OutOfMemoryError("out of memory")
        return whole(start, stop, draw)

    made.passes.norms = norms  # type: ignore[method-assign]
    with warned("out of memory with 8 inputs"):
        assert made.measure().batch_size == 4


# Four chunks of one size instead of three of two sizes, a prime, two ranks, one with little memory.
@pytest.mark.parametrize(
    "total, fitting, ranks, least, size",
    [(512, 208, 1, 208, 128), (97, 30, 1, 30, 25), (512, 200, 2, 200, 128), (60, 20, 2, 10, 10)],
)
def test_ranks_take_chunks_of_one_size(monkeypatch, total, fitting, ranks, least, size):
    let_fit(monkeypatch, fitting)
    members = SimpleNamespace(size=ranks, least={fitting: least}.get)
    assert estimator(total).chunks.first_size(members) == size


@needs_gpu
def test_a_chunk_on_a_gpu_fits_the_formula():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 3)
    ).cuda()
    result = fastlr.estimate(model, fastlr.ShapeImages((3, 64, 64)), 5000)
    assert result.batch_size <= 512 and not result.notes


def fitting_on(device, model, x, monkeypatch, **autocast):
    """Return the chunk for a quarter of a million bytes by the device and by what is free."""
    monkeypatch.setattr(ModelView, "device", torch.device(device))
    monkeypatch.setattr(memory, "total_bytes", lambda device: 1_000_000)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 625_000)
    with torch.autocast("cpu", torch.bfloat16, enabled=bool(autocast)):
        both = memory.chunk_for_memory(
            ModelView.of(model), 2, lambda count: model(x[:count].clone())
        )
    assert both.device == both.free
    return both.device


@pytest.mark.parametrize(
    ("device", "bytes_per_input"),
    # Saved are the input and the hidden layer; the output stays.
    [("cpu", 3 * 4 * 120), ("cuda", 1.5 * 4 * 120 + 4 * 4 * 20)],
)
def test_the_formula_counts_activations_outputs_and_the_largest_weight(
    monkeypatch, device, bytes_per_input
):
    model = nn.Sequential(nn.Linear(60, 40, bias=False), nn.Tanh(), nn.Linear(40, 20, bias=False))
    largest = 4 * 60 * 40
    found = fitting_on(device, model, torch.randn(2, 60), monkeypatch)
    assert found == 250_000 // (bytes_per_input + largest + 1)


def test_weights_that_autocast_casts_are_not_counted_for_each_input(monkeypatch):
    """On a GPU. They would be half of what a pass of two inputs saves."""
    model = nn.Sequential(nn.Linear(60, 40, bias=False), nn.Tanh(), nn.Linear(40, 20, bias=False))
    found = fitting_on("cuda", model, torch.randn(2, 60), monkeypatch, autocast=True)
    activations = 2 * (60 + 40) + 2 * 20
    assert found == 250_000 // (1.5 * activations + 4 * 2 * 20 + 4 * 60 * 40 + 1)


def test_a_model_that_takes_no_odd_batch_has_a_chunk(monkeypatch):
    class Odd(Exception):
        """An error of the model's own."""

    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(60, 40)

        def forward(self, x):
            if len(x) % 2:
                raise Odd
            return self.linear(x)

    assert 1 < fitting_on("cuda", Pairs(), torch.randn(2, 60), monkeypatch) < 30


def test_looking_at_what_a_pass_saves_leaves_no_graph():
    class Marker:
        """Lives as long as the graph."""

    model = nn.Linear(3, 2)
    markers = [Marker()]

    def forward(count):
        z = torch.tanh(model(torch.ones(count, 3)))  # saves its output
        assert z.grad_fn is not None
        z.grad_fn.register_prehook(partial(lambda held, g: None, markers[0]))
        return z

    assert min(memory.chunk_for_memory(ModelView.of(model), 1, forward)) > 1
    alive = ref(markers.pop())
    gc.collect()
    assert alive() is None
