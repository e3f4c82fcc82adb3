"""estimate and LocalRedundancy are unbiased, invariant to chunks, and leave the model untouched."""

import copy
import inspect
import io
import json
import math
import sys
import types
import warnings
from contextlib import nullcontext

import torch
from exact import redundancy, seeded
from expected import failing, refused, warned
from fisher import (
    bernoulli_fisher,
    categorical_fisher,
    diagonal_gaussian_fisher,
    gaussian_fisher,
)
from pytest import approx, mark, raises
from single_samples import Written
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader
from untouched import untouched

from fastlr.errors import FastlrWarning, InputError, ModelError, NonFiniteError
from fastlr.estimator import progress as shown_progress
from fastlr.estimator.estimator import (
    LocalRedundancy,
    estimate,
    memorization_gain,
    paired_difference,
    regression_memorization_bound,
)
from fastlr.estimator.options import EstimateOptions
from fastlr.estimator.predictive import Bernoulli, Categorical, DiagonalGaussian, Gaussian
from fastlr.estimator.result import Estimate
from fastlr.estimator.statistics import CHECK_EVERY, Moments
from fastlr.inputs import NoiseImages, TensorInputs, TokenInputs


class Normal:
    """Inputs [n, width] as a function of (seed, index), cut from a tensor drawn at every call."""

    def __init__(self, width=6, most=4096):
        self.width, self.most = width, most

    def batch(self, start, stop, *, seed, device, dtype):
        generator = seeded(seed)
        x = torch.randn(self.most, self.width, generator=generator, dtype=torch.float64)
        return x[start:stop].to(device, dtype)


def mlp(outputs, scale=1.0, width=6, hidden=5):
    torch.manual_seed(outputs)
    model = nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).double()
    model[2].weight.data.mul_(scale)
    return model


def loop(model, x, fisher):
    """tr(J^T F J) of each sample."""
    return torch.stack([redundancy(model, model(row[None]).flatten(), fisher) for row in x])


CASES = {
    "2": (mlp(2, 3.0), Categorical(), categorical_fisher),
    "10": (mlp(10, 3.0), Categorical(), categorical_fisher),
    "100": (mlp(100, 3.0), Categorical(), categorical_fisher),
    "bernoulli": (mlp(3, 3.0), Bernoulli(), bernoulli_fisher),
    "gaussian": (mlp(4), Gaussian(0.7), lambda z: gaussian_fisher(4, 0.7)),
    "diagonal": (mlp(4), DiagonalGaussian(), diagonal_gaussian_fisher),
}


@mark.parametrize("name", CASES)
def test_exact_is_the_label_expectation(name):
    model, predictive, fisher = CASES[name]
    n = 7
    want = loop(model, Normal().batch(0, n, seed=0, device="cpu", dtype=torch.float64), fisher)
    got = estimate(model, Normal(), n, probe="exact", predictive=predictive, batch_size=3)
    assert_close(got.per_sample, want, rtol=1e-10, atol=0)
    assert got.value == approx(float(want.mean()), rel=1e-12)
    assert got.stderr == approx(float(want.std()) / math.sqrt(n), rel=1e-9)


@mark.parametrize("probe", ["rademacher", "sampled"])
@mark.parametrize("name", CASES)
def test_probes_converge_to_exact(name, probe):
    """Over 500 draws of each of 8 inputs a probe's mean error is zero within its standard error."""
    model, predictive, fisher = CASES[name]
    x = Normal().batch(0, 8, seed=0, device="cpu", dtype=torch.float64)
    want = loop(model, x, fisher).repeat(500)
    got = estimate(
        model, TensorInputs(x.repeat(500, 1)), 4000, probe=probe, predictive=predictive, seed=11
    )
    difference = got.per_sample - want
    stderr = float(difference.std()) / math.sqrt(len(difference))
    assert abs(float(difference.mean())) < 4.5 * stderr + 1e-12 * got.value


@mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@mark.parametrize("gap", [20.0, 60.0, 95.0, 100.0])
@mark.parametrize("probe", ["rademacher", "sampled"])
def test_confident_low_precision_networks(dtype, gap, probe):
    """A two-class linear model of known logit gap has norms v^2 (||x||^2 + 1), not zero or off."""
    model = nn.Linear(4, 2).to(dtype)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor([gap, 0.0]))
    x = torch.tensor([[1.0, -2.0, 0.5, 1.5]] * 6)
    got = estimate(model, TensorInputs(x), 6, probe=probe)
    gap = float(model.bias.detach()[0])
    p, q = 1 / (1 + math.exp(-gap)), 1 / (1 + math.exp(gap))
    squared = p * q if probe == "rademacher" else q * q
    want = 2 * squared * (float(x[0].square().sum()) + 1)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    assert got.value == approx(want, rel=tolerance)
    assert want > 0


def test_chunks_change_nothing_but_rounding():
    model = mlp(3)
    whole = estimate(model, Normal(), 101, batch_size=101)
    for size in (1, 2, 17, 100, 1000):
        part = estimate(model, Normal(), 101, batch_size=size)
        assert_close(part.per_sample, whole.per_sample, rtol=1e-12, atol=0)
        assert part.value == approx(whole.value, rel=1e-12)
        assert part.per_parameter == approx(whole.per_parameter, rel=1e-11)
    more = estimate(model, Normal(), 150)
    assert_close(more.per_sample[:101], whole.per_sample, rtol=1e-12, atol=0)
    assert not torch.allclose(estimate(model, Normal(), 101, seed=1).per_sample, whole.per_sample)


def test_target_stops_at_the_same_n_for_every_chunk():
    model = mlp(3)
    results = [
        estimate(model, Normal(), 4000, target_rel_stderr=0.03, min_n=100, batch_size=size)
        for size in (13, 64, 500)
    ]
    n = results[0].n
    assert {r.n for r in results} == {n}
    assert 100 < n < 4000
    assert (n - 100) % CHECK_EVERY == 0
    assert all(r.rel_stderr <= 0.03 for r in results)
    for r in results[1:]:
        assert_close(r.per_sample, results[0].per_sample, rtol=1e-12, atol=0)
        assert r.per_parameter == approx(results[0].per_parameter, rel=1e-11)
    before = torch.tensor(results[0].per_sample[: n - CHECK_EVERY].tolist())
    # It could not have stopped one look earlier.
    assert before.std() / math.sqrt(len(before)) / before.mean() > 0.03


def test_target_keeps_to_its_limits():
    model = mlp(3)
    assert estimate(model, Normal(), 600, target_rel_stderr=1e-9).n == 600
    assert estimate(model, Normal(), 10, target_rel_stderr=1e-9, max_n=700).n == 700
    assert estimate(model, Normal(), 4000, target_rel_stderr=0.9).n == 512
    assert estimate(model, Normal(), 300, target_rel_stderr=0.9).n == 300
    x = torch.randn(200, 6, dtype=torch.float64)
    assert estimate(model, TensorInputs(x), target_rel_stderr=1e-9).n == 200


def test_batch_probe_has_the_same_expectation():
    model = mlp(3, 2.0)
    exact = estimate(model, Normal(), 500, probe="exact", batch_size=100)
    got = estimate(model, Normal(), 4000, probe="batch", batch_size=8)
    assert got.n == 500
    assert got.inputs_used == 4000
    assert got.bound(0.5) == approx(0.5 * 4000 * got.value)
    assert abs(got.value - exact.value) < 4.5 * math.hypot(got.stderr, exact.stderr)
    assert sum(got.per_parameter.values()) == approx(got.value, rel=1e-10)
    # one batch by hand
    x = Normal().batch(0, 8, seed=0, device="cpu", dtype=torch.float64)
    z = model(x)
    v = Categorical().cotangent(z, "sampled", range(8), 0)
    grads = torch.autograd.grad((z * v).sum() / 8, list(model.parameters()))
    assert float(got.per_sample[0]) == approx(
        8 * sum(float(g.square().sum()) for g in grads), rel=1e-10
    )
    # 250 by default, the last one of a single input.
    assert estimate(model, Normal(), 1001, probe="batch").n == 5


class Stateful(nn.Module):
    """Dropout, batch norm, a frozen layer, a buffer that counts calls even in eval mode."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)
        self.drop = nn.Dropout(0.5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.last = nn.Linear(5, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.last(self.drop(self.frozen(self.norm(self.first(x)).relu())))


@mark.parametrize("probe", ["rademacher", "batch"])
@mark.parametrize("fail", [False, True])
def test_the_model_is_left_unchanged(fail, probe):
    torch.manual_seed(0)
    model = Stateful().train()
    model.norm.eval()  # mixed flags
    model.first.weight.grad = torch.ones_like(model.first.weight)
    hooked = []
    model.last.register_forward_hook(lambda *_: hooked.append(1))
    x = torch.randn(40, 6, generator=seeded(0))
    if fail:
        x[33] = torch.nan
    with untouched(model), raises(NonFiniteError) if fail else nullcontext():
        result = estimate(model, TensorInputs(x), 40, probe=probe, batch_size=8)
        assert set(result.per_parameter) == {
            n for n, p in model.named_parameters() if p.requires_grad
        }


@mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_grad_mode_of_the_caller_does_not_matter(context):
    model = mlp(3)
    want = estimate(model, Normal(), 20)
    with context():
        assert torch.is_grad_enabled() is False
        got = estimate(model, Normal(), 20)
        assert torch.is_grad_enabled() is False
    assert torch.equal(got.per_sample, want.per_sample)


def test_local_redundancy_follows_the_weights():
    model = mlp(3)
    meter = LocalRedundancy(model, Normal(), 50, batch_size=16)
    first = meter.measure()
    again = meter.measure()
    assert torch.equal(first.per_sample, again.per_sample)
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    changed = meter.measure()
    fresh = estimate(model, Normal(), 50, batch_size=16)
    assert_close(changed.per_sample, fresh.per_sample, rtol=1e-12, atol=0)
    difference, stderr = paired_difference(changed, first)
    assert difference == approx(changed.value - first.value, rel=1e-9)
    spread = (changed.per_sample - first.per_sample).std()
    assert stderr == approx(float(spread) / math.sqrt(50), rel=1e-9)


@mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_kept_estimator_follows_the_precision(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 3))
    inputs = NoiseImages((3, 4, 4))
    kept = LocalRedundancy(model, inputs, 16)
    first = kept.measure()
    model.to(dtype)
    other = kept.measure()
    assert torch.equal(other.per_sample, estimate(copy.deepcopy(model), inputs, 16).per_sample)
    assert math.isclose(other.value, first.value, rel_tol=0.02)
    assert kept.passes.inputs(0, 1).dtype == dtype


def test_sample_axes_and_positions():
    """Samples on axis 1 of input and output; T = 6 positions."""
    torch.manual_seed(0)
    x = Normal(12).batch(0, 10, seed=0, device="cpu", dtype=torch.float64).view(10, 6, 2)
    time_first = Written(lambda m, x: m.linear(x).cumsum(0), linear=nn.Linear(2, 3).double())
    batch_first = Written(lambda m, x: m.inner(x.transpose(0, 1)).transpose(0, 1), inner=time_first)
    kwargs = {"predictive": Categorical(), "n": 10, "batch_size": 4}
    want = estimate(batch_first, TensorInputs(x), **kwargs)
    moved = estimate(time_first, TensorInputs(x), in_dim=1, out_dim=1, **kwargs)
    own = estimate(
        time_first,
        TensorInputs(x.transpose(0, 1).contiguous(), in_dim=1),
        in_dim=1,
        out_dim=1,
        **kwargs,
    )
    assert_close(moved.per_sample, want.per_sample, rtol=1e-12, atol=0)
    assert_close(own.per_sample, want.per_sample, rtol=1e-12, atol=0)
    exact = estimate(time_first, TensorInputs(x), in_dim=1, out_dim=1, probe="exact", **kwargs)
    by_hand = []
    for row in x:
        z = time_first(row[:, None])[:, 0]
        # Independent labels: F is block diagonal.
        by_hand.append(sum(redundancy(time_first, one) for one in z))
    assert_close(exact.per_sample, torch.stack(by_hand), rtol=1e-10, atol=0)


def test_autocast_is_used_and_named():
    model = mlp(3).float()
    full = estimate(model, Normal(), 64)
    low = estimate(model, Normal(), 64, dtype="bf16")
    assert low.dtype == "bfloat16"
    assert full.dtype is None
    assert low.value != full.value
    assert low.value == approx(full.value, rel=0.03)


def test_the_default_device_is_not_asked():
    model, inputs = mlp(3), TensorInputs(torch.randn(64, 6))
    want = estimate(model, inputs)
    with torch.device("meta"):
        record = estimate(copy.deepcopy(model), inputs).to_dict(per_sample=True)
        got = Estimate.from_dict(record)
    assert torch.equal(got.per_sample, want.per_sample)


def test_out_of_memory_halves_the_chunk(monkeypatch):
    model = mlp(3)
    meter = LocalRedundancy(model, Normal(), 50, batch_size=32)
    run = meter.engine.run
    sizes = []

    def limited(x, cotangent, draw):
        sizes.append(len(x))
        if len(x) > 10:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return run(x, cotangent, draw)

    monkeypatch.setattr(meter.engine, "run", limited)
    with warned("32 inputs") as caught:
        got = meter.measure()
    assert len(caught) == 1
    assert sizes[:3] == [32, 16, 8]
    assert got.batch_size == 8
    assert len(got.notes) == 2
    assert_close(got.per_sample, estimate(model, Normal(), 50).per_sample, rtol=1e-12, atol=0)
    full = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    monkeypatch.setattr(meter.engine, "run", failing(full))
    with refused("out of memory on cpu: one input does not fit", ModelError):
        meter.measure()
    monkeypatch.setattr(meter.engine, "run", failing(RuntimeError("something else")))
    with refused("something else", RuntimeError):
        meter.measure()


def test_progress_is_told():
    seen = []
    got = estimate(mlp(3), Normal(), 50, batch_size=20, progress=lambda *args: seen.append(args))
    assert [s[:2] for s in seen] == [(20, 50), (40, 50), (50, 50)]
    assert seen[-1][2] == approx(got.value)
    assert seen[-1][3] == approx(got.stderr)


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self):
        return True


@mark.parametrize(
    ("progress", "terminal", "patience", "shown"),
    [
        (None, True, 0.0, True),
        (None, True, 60.0, False),
        (None, False, 0.0, False),
        (False, True, 0.0, False),
    ],
)
def test_a_long_call_shows_its_progress_on_a_terminal(
    monkeypatch, capsys, progress, terminal, patience, shown
):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(shown_progress, "PATIENCE", patience)
    monkeypatch.setattr(sys, "stderr", stderr := Terminal() if terminal else io.StringIO())
    meter = LocalRedundancy(mlp(3), Normal(), 50, batch_size=20, progress=progress)
    got, text = meter.measure(), stderr.getvalue()
    assert ("local redundancy" in text) is shown
    assert bool(text) is shown
    assert capsys.readouterr().out == ""
    again = meter.measure()
    assert_close(got.per_sample, again.per_sample, rtol=0, atol=0)


def test_a_notebook_is_no_file(monkeypatch):
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    assert shown_progress._watched()
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: None))
    monkeypatch.setattr(sys, "stderr", None)
    assert not shown_progress._watched()


def test_records():
    got = estimate(mlp(3), Normal(), 30)
    record = json.loads(json.dumps(got.to_dict(per_sample=True), allow_nan=False))
    back = Estimate.from_dict(record)
    assert torch.equal(back.per_sample, got.per_sample)
    assert back.to_dict() == got.to_dict()
    assert paired_difference(got, back) == (0.0, 0.0)
    bare = Estimate.from_dict(got.to_dict())
    with refused("per_sample=True"):
        paired_difference(got, bare)
    one = estimate(mlp(3), Normal(), 1)
    assert math.isnan(one.stderr)
    assert one.to_dict()["stderr"] is None
    assert "(one input gives no standard error)" in str(one)
    assert "nan" not in str(one)
    assert math.isnan(Estimate.from_dict(one.to_dict()).stderr)
    assert f"{got.value:.6g}" in str(got)
    assert "n = 30" in str(got)
    assert float(got) == got.value
    assert repr(got) == f"Estimate(value={got.value:.6g}, stderr={got.stderr:.2g}, n=30)"
    with refused("record"):
        Estimate.from_dict({"value": 1.0})


@mark.parametrize(
    ("change", "words"),
    [
        ({"value": "a"}, "value must be a number, not 'a'"),
        ({"value": None}, "value must be a number, not None"),
        ({"stderr": "a"}, "stderr must be a number, not 'a'"),
        ({"n": -3}, "n must be an integer of at least 1, not -3"),
        ({"per_sample": "a"}, "invalid data type"),
        ({"notes": 1}, "not iterable"),
    ],
)
def test_what_is_no_record_of_an_estimate(change, words):
    record = {**estimate(mlp(3), Normal(), 3).to_dict(), **change}
    with refused(f"not a record of an estimate: .*{words}"):
        Estimate.from_dict(record)
    with refused("not a record of an estimate but of type NoneType: give what"):
        Estimate.from_dict(None)


def test_signatures_are_written_alike():
    arguments = inspect.signature(estimate).parameters
    assert arguments == inspect.signature(LocalRedundancy).parameters
    fields = inspect.signature(EstimateOptions).parameters
    assert list(arguments) == list(fields)


def test_all_of_few_inputs_are_used_by_default():
    x = torch.randn(64, 6)
    got = estimate(mlp(3), TensorInputs(x))
    assert got.n == 64
    assert got.value == estimate(mlp(3), TensorInputs(x), 64).value
    assert LocalRedundancy(mlp(3), TensorInputs(torch.zeros(6000, 6))).options.n == 5000
    assert LocalRedundancy(mlp(3), Normal()).options.n == 5000


@mark.parametrize(
    ("name", "dtype"),
    [("bfloat16", torch.bfloat16), ("float16", torch.float16), ("float32", torch.float32)],
)
def test_dtypes_have_the_names_that_torch_gives_them(name, dtype):
    x, model = TensorInputs(torch.randn(8, 6)), mlp(3)
    by_name, by_dtype = (estimate(model, x, dtype=given) for given in (name, dtype))
    assert by_name.value == by_dtype.value
    assert by_name.dtype == by_dtype.dtype == (None if name == "float32" else name)


class Words(nn.Module):
    """A language model of plain modules, with logits or features at every token."""

    def __init__(self, vocabulary, width, out):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.recurrent = nn.LSTM(width, 8, batch_first=True)
        self.head = nn.Linear(8, out)

    def forward(self, words):
        return self.head(self.recurrent(self.embed(words))[0])


def test_the_output_of_a_language_model_is_categorical_by_default():
    torch.manual_seed(0)
    model, words = Words(11, 4, 11), TokenInputs(11, 5, name=None)
    got = estimate(model, words, 6)
    assert got.predictive == "Categorical(dim=-1)"
    assert got.value == estimate(model, words, 6, predictive=Categorical()).value
    with_positions = Words(11, 4, 6)
    with_positions.positions = nn.Embedding(6, 4)  # as many as there are features
    others = [Words(11, 4, 7), Words(11, 11, 11), Words(5, 4, 5), with_positions]
    others.append(nn.Sequential(Words(11, 4, 11), nn.Flatten(1), nn.Unflatten(1, (11, 5))))
    for other in others:  # its output may be features, or have its classes on axis 1
        words = TokenInputs(5, 5, name=None)
        with refused(r"pass predictive=fastlr.Categorical\(\) for logits at several positions"):
            estimate(other, words, 6)


def test_probabilities_of_tokens_are_refused():
    model = nn.Sequential(Words(11, 4, 11), nn.Softmax(-1))
    with refused(r"outputs \[2, 5, 11\] torch.float32 look like probabilities"):
        estimate(model, TokenInputs(11, 5, name=None), 2, batch_size=2)


def test_bound():
    got = estimate(mlp(3), Normal(), 30)
    assert got.bound(0.1) == approx(0.1 * 30 * got.value)
    assert got.bound(0.1, n=1000) == approx(100 * got.value)
    assert got.bound(0.1, unit="bits") == approx(got.bound(0.1) / math.log(2))
    for bad in (
        {"epsilon": -1},
        {"epsilon": math.nan},
        {"epsilon": "x"},
        {"epsilon": torch.ones(2)},
        {"epsilon": 1, "n": 0},
        {"epsilon": 1, "unit": "bytes"},
    ):
        with raises(InputError):
            got.bound(**bad)


@mark.parametrize(
    "change",
    [{"seed": 1}, {"n": 31}, {"probe": "sampled"}, {"inputs": TensorInputs(torch.randn(30, 6))}],
)
def test_only_like_estimates_pair(change):
    base = {"inputs": Normal(), "n": 30}
    a, b = estimate(mlp(3), **base), estimate(mlp(3), **(base | change))
    with refused("not paired"):
        paired_difference(a, b)
    with refused("two results of fastlr.estimate.* not float and Estimate"):
        paired_difference(1.0, b)


def test_batches_pair_only_where_they_are_of_the_same_inputs():
    a, b = (estimate(mlp(3), Normal(), 50, probe="batch", batch_size=size) for size in (20, 24))
    assert a.n == b.n == 3
    assert paired_difference(a, a) == (0.0, 0.0)
    with refused("batch_size is 20 and 24"):
        paired_difference(a, b)


class Wrong:
    def batch(self, start, stop, *, seed, device, dtype):
        return torch.randn(stop - start + 1, 6, dtype=dtype)


@mark.parametrize(
    ("change", "error", "match"),
    [
        ({"n": 0}, InputError, "n must be"),
        ({"n": True}, InputError, "n must be"),
        ({"N": 3}, TypeError, "unexpected keyword argument 'N'"),
        ({"inputs": DataLoader(range(3))}, InputError, "of a DataLoader its loader.dataset"),
        ({"inputs": TensorInputs(torch.zeros(20))}, InputError, "an axis of samples"),
        ({"probe": "hutchinson"}, InputError, "unknown probe"),
        ({"batch_size": 0}, InputError, "batch_size"),
        ({"seed": -1}, InputError, "seed"),
        ({"dtype": torch.float64}, InputError, "autocast"),
        ({"dtype": "half"}, InputError, "dtype='half' is no autocast dtype: give 'bfloat16'"),
        ({"device": "cuda"}, InputError, "the model is on cpu"),
        ({"device": "gpu"}, InputError, "device='gpu'.*'cuda'"),
        ({"device": 1.5}, InputError, "device=1.5"),
        (
            {"inputs": TensorInputs},
            InputError,
            r"TensorInputs is a class: pass an instance, TensorInputs\(",
        ),
        (
            {"predictive": Categorical},
            InputError,
            r"predictive=Categorical is a class.*Categorical\(",
        ),
        ({"model": nn.Tanh}, InputError, "model=Tanh is a class"),
        ({"inputs": torch.zeros(9, 6)}, InputError, "TensorInputs"),
        ({"inputs": TensorInputs(torch.zeros(9, 6))}, InputError, "there are 9"),
        ({"inputs": TensorInputs(torch.zeros(9, 6).double(), in_dim=1)}, InputError, "axis 1"),
        ({"inputs": Wrong()}, InputError, "sample"),
        ({"predictive": "categorical"}, InputError, "predictive"),
        ({"model": "resnet18"}, InputError, "Module"),
        ({"model": mlp(1)}, InputError, "Bernoulli"),
        ({"model": nn.Sequential(mlp(4), nn.Unflatten(1, (2, 2)))}, InputError, "Categorical"),
        ({"model": nn.Tanh()}, ModelError, "trainable"),
        ({"model": mlp(2).requires_grad_(False)}, ModelError, "trainable"),
        ({"target_rel_stderr": 1}, InputError, "fraction.*0.05 for 5 %"),
        ({"target_rel_stderr": math.nan}, InputError, "fraction"),
        ({"target_rel_stderr": 0.1, "max_n": 100}, InputError, "min_n"),
        ({"target_rel_stderr": 0.1, "min_n": 0}, InputError, "min_n"),
        ({"max_n": 100}, InputError, "max_n"),
        ({"progress": "yes"}, InputError, "progress"),
        ({"probe": "exact", "predictive": Categorical(limit=1)}, InputError, "limit=1"),
        ({"model": nn.Linear(6, 3, device="meta")}, ModelError, "meta"),
    ],
)
def test_errors(change, error, match):
    arguments = {"model": mlp(3), "inputs": Normal(), "n": 20} | change
    with raises(error, match=match):
        estimate(**arguments)


def constant(*bias):
    """A linear layer whose weights are zero: the same output for every input."""
    model = nn.Linear(6, len(bias))
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor(bias))
    return model


@mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@mark.parametrize(
    ("head", "options"),
    [
        (nn.Linear(6, 2), {}),
        (nn.Linear(6, 500), {"batch_size": 1}),
        (nn.Linear(6, 10), {"probe": "batch"}),
        (nn.Linear(6, 10), {"probe": "exact", "batch_size": 3}),
        (constant(0.0, 0.0), {}),  # a zero-initialised head: rows of 1 / C
        (constant(90.0, 0.0, 0.0), {}),  # (1, 0, 0)
    ],
)
def test_probabilities_are_not_taken_for_logits(head, options, dtype):
    model = nn.Sequential(copy.deepcopy(head), nn.Softmax(1)).to(dtype)
    meter = LocalRedundancy(model, Normal(), 8, **options)
    for _ in range(2):  # an estimator that is kept says it again
        with refused(r"probabilities.*logits.*predictive=fastlr.Categorical\(\)"):
            meter.measure()
    given = estimate(model, Normal(), 8, predictive=Categorical(), **options)
    assert given.predictive == "Categorical(dim=-1)"


def test_probabilities_of_autocast_are_seen():
    with refused("probabilities"):
        estimate(nn.Sequential(nn.Linear(6, 5), nn.Softmax(1)), Normal(), 8, dtype=torch.bfloat16)


@mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(6, 5), nn.LogSoftmax(1)),  # the same distribution, and gradient
        nn.Sequential(nn.Linear(6, 2), nn.ReLU()),
        constant(0.0, 0.0, 0.0),
        constant(1.5, -0.5),  # sums to one, but one is negative
        constant(0.5, 0.6),
        nn.Sequential(
            nn.Linear(6, 4), nn.Softmax(1), nn.Unflatten(1, (2, 2)), nn.Flatten(), nn.Linear(4, 3)
        ),
    ],
    ids=lambda model: str(model).replace("\n", ""),
)
def test_logits_give_no_alarm(model):
    got, given = (
        estimate(model, Normal(), 8, batch_size=4, **more)
        for more in ({}, {"predictive": Categorical()})
    )
    assert_close(got.per_sample, given.per_sample, rtol=0, atol=0)


class Logistic(nn.Module):
    """A sigmoid that a user wrote."""

    def forward(self, x):
        return 1 / (1 + (-x).exp())


def collapsed(layer):
    """The layer with outputs near a half, which hardly depend on its input."""
    layer = copy.deepcopy(layer)
    with torch.no_grad():
        layer.weight.mul_(1e-3)
        layer.bias.fill_(0.5)
    return layer


@mark.parametrize(
    ("head", "options"),
    [  # by the graph; by the values of 64 samples, two chunks of them
        ([nn.Linear(6, 5), nn.Sigmoid()], {"n": 8}),
        ([nn.Linear(6, 1), nn.Sigmoid(), nn.Flatten(0)], {"n": 8, "predictive": Bernoulli()}),
        ([nn.Linear(6, 5), nn.Sigmoid()], {"n": 8, "batch_size": 4}),
        ([nn.Linear(6, 5), nn.Sigmoid()], {"n": 8, "batch_size": 4, "probe": "batch"}),
        ([nn.Linear(6, 5), Logistic()], {"n": 64, "batch_size": 32, "probe": "batch"}),
        ([nn.Linear(6, 5), nn.Hardsigmoid()], {"n": 64, "batch_size": 32}),
        ([nn.Linear(6, 5), Logistic()], {"n": 64, "batch_size": 32}),
    ],
)
def test_a_sigmoid_head_is_told_where_logits_are_taken(head, options):
    model, inputs = nn.Sequential(*head), TensorInputs(torch.randn(64, 6))
    with warned(r"sigmoid.*takes logits.*leave out the model's last"):
        estimate(model, inputs, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FastlrWarning)
        estimate(model, inputs, **{**options, "predictive": Gaussian()})
        estimate(model[:1], inputs, **options)
        estimate(constant(0.5, 0.7), inputs, n=64)  # always the same
        estimate(collapsed(model[0]), inputs, **{"n": 64} | options)  # logits, but small


class WritesToInputs(nn.Module):
    """It writes to its inputs, and ends in a sigmoid that the graph does not name."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, x):
        return 1 / (1 + (-self.layer(x.mul_(2))).exp())


class Views:
    """Inputs that hand out a user's own tensor."""

    def __init__(self):
        self.x = torch.rand(64, 6)

    def batch(self, start, stop, **_):
        return self.x[start:stop]


@mark.parametrize("batch_size", [None, 32])
def test_a_model_that_writes_to_its_inputs_leaves_the_users_tensor(batch_size):
    """Also in the passes that choose the chunk and look for a sigmoid."""
    torch.manual_seed(0)
    model, inputs = WritesToInputs(), Views()
    before = inputs.x.clone()
    with warned("sigmoid"):
        estimate(model, inputs, n=64, batch_size=batch_size)
    estimate(nn.Sequential(model, nn.Linear(5, 3)), inputs, n=64, batch_size=16, probe="batch")
    assert_close(inputs.x, before, rtol=0, atol=0)


def test_moments():
    values = torch.randn(1000, generator=seeded(0), dtype=torch.float64) + 1e6
    moments = Moments()
    for part in values.split([1, 0, 300, 699]):
        moments.add(part)
    assert moments.n == 1000
    assert moments.mean == approx(float(values.mean()), rel=1e-15)
    assert moments.variance == approx(float(values.var()), rel=1e-9)
    assert moments.stderr == approx(float(values.std()) / math.sqrt(1000), rel=1e-9)
    assert math.isnan(Moments().stderr)


def test_memorization_bounds():
    assert memorization_gain([-0.5, -1.5], 3.0) == approx(1.0)
    assert memorization_gain(torch.tensor([[-0.5, -1.5], [-1.0, -3.0]]), [1.0, 2.0]) == approx(0.0)
    assert memorization_gain(-2.0, 4 * math.log(2), "bits") == approx(4 - 2 / math.log(2))
    assert regression_memorization_bound(10, 3, 1.0, 0.5) == approx(15 * math.log(2))
    assert regression_memorization_bound(10, 3, 1.0, 0.5, "bits") == approx(15)


@mark.parametrize(
    "arguments",
    [
        ([], 1.0),
        ([math.nan], 1.0),
        ([-1.0, -1.0], [1.0]),
        (torch.zeros(1, 1, 1), 1.0),
        ([-1.0], 1.0, "bytes"),
        (None, 1.0),
        (["many"], 1.0),
        ([-1.0], {"entropy": 1.0}),
    ],
)
def test_bad_arguments_of_the_gain(arguments):
    with raises(InputError):
        memorization_gain(*arguments)


@mark.parametrize(
    "arguments",
    [
        (0, 1, 1.0, 1.0),
        (1, 0, 1.0, 1.0),
        (1, 1, 0.0, 1.0),
        (1, 1, 1.0, 0.0),
        (1, 1, 1.0, math.nan),
        (1, 1, 1.0, 1.0, "b"),
        (1, 1, None, 1.0),
        (1, 1, 1.0, "half"),
        (1, 1, torch.ones(2), 1.0),
    ],
)
def test_bad_arguments_of_the_bound(arguments):
    with raises(InputError):
        regression_memorization_bound(*arguments)
