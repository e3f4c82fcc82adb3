"""The model keeps nothing of a measurement: attributes, containers, caches, buffers; and one proof serves all estimates."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, deque

import pytest
import torch
from recorders import Again
from torch import nn

import fastlr
from fastlr.ghost import adapt
from fastlr.ghost.api import engine_for
from fastlr.ghost.program import all_modules
from fastlr.ghost.proof import Prover
from fastlr.ghost.state import BufferKeeper, attributes_kept, emptied, tensor_caches
from fastlr.ghost.subjects import with_buffers_moved
from fastlr.replay import Replays

norms = fastlr.per_sample_grad_sq_norms


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def proofs(monkeypatch):
    """Counts the proofs."""
    made, prove = [], Prover.prove
    monkeypatch.setattr(Prover, "prove", lambda self, *a, **k: (made.append(1), prove(self, *a, **k))[1])
    return made


def truth(model, x, v):
    """One backward pass for each sample, beside a copy of itself whose cotangent is zero."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = []
    for j in range(len(x)):
        grads = torch.autograd.grad(model(x[[j, j]])[:1], parameters, v[j : j + 1])
        found.append(sum(g.double().square().sum() for g in grads))
    return torch.stack(found)


class Keeps(nn.Module):
    """A model that keeps what it has seen in every way there is."""

    def __init__(self, fails=False):
        super().__init__()
        self.layer, self.fails = nn.Linear(3, 2), fails
        self.hidden, self.calls, self.gone = None, 0, "here"
        self.cache, self.ordered = {}, OrderedDict(a=torch.zeros(2), b=1)
        self.history, self.recent, self.shapes = [torch.zeros(1)], deque([0], 3), {1}
        self.register_buffer("last", torch.zeros(2))
        self.eval()

    def forward(self, x):
        h = self.layer(x)
        self.hidden, self.calls, self.fresh = h.detach(), self.calls + 1, h.detach().mean()
        self.cache[x.shape], self.cache["h"] = h.detach(), h
        self.ordered["a"] = h.detach()[0]
        self.ordered.move_to_end("a")
        self.history.append(h.detach())
        self.recent.append(self.calls)
        self.shapes.add(tuple(x.shape))
        self.last = h.detach()[0]
        if "gone" in vars(self):
            del self.gone
        if self.fails and len(x) == self.fails:
            raise ValueError("no")
        return h.tanh()


def contents(model):
    """Every attribute and entry of a model's modules, by identity."""
    return [
        (name, id(value), [id(v) for v in (*value, *getattr(value, "values", tuple)())])
        if isinstance(value, (dict, list, deque, set))
        else (name, id(value))
        for module in model.modules()
        for name, value in (*vars(module).items(), *module._buffers.items())
        if not name.startswith("_")
    ]


def test_attributes_are_as_they_were():
    model = Keeps()
    before, held = contents(model), (model.cache, model.hidden, model.last.clone())
    x, v = torch.randn(5, 3), torch.randn(5, 2)
    got = norms(model, x, v)
    fastlr.estimate(model, fastlr.TensorInputs(x), n=5)
    assert sorted(map(str, contents(model))) == sorted(map(str, before))
    assert held[0] is model.cache and model.hidden is None and torch.equal(model.last, held[2])
    assert not hasattr(model, "fresh") and model.gone == "here" and list(model.ordered) == ["a", "b"]
    torch.testing.assert_close(got, truth(model, x, v), rtol=1e-5, atol=0)


@pytest.mark.parametrize("fails", [3, 5])
def test_attributes_are_as_they_were_after_an_error(fails):
    model = Keeps(fails)
    before = contents(model)
    with pytest.raises((ValueError, fastlr.errors.FastlrError)):
        norms(model, torch.randn(5, 3), torch.randn(5, 2))
    assert sorted(map(str, contents(model))) == sorted(map(str, before))


def test_every_forward_pass_begins_with_the_same_state():
    class Alternates(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.calls = nn.Linear(3, 2), 0

        def forward(self, x):
            self.calls += 1
            return self.layer(x) * (1 if self.calls % 2 else 3)

    model, x, v = Alternates().eval(), torch.randn(5, 3), torch.randn(5, 2)
    torch.testing.assert_close(norms(model, x, v), norms(model, x, v))
    assert model.calls == 0


def test_submodules_made_in_a_forward_pass_stay():
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.ready = None, False

        def forward(self, x):
            if not self.ready:
                self.head, self.ready = nn.Linear(x.shape[1], 2), True
            return self.head(x)

    model = Lazy().eval()
    adapt.call(model, torch.randn(2, 3))
    assert model.ready and isinstance(model.head, nn.Linear)
    model(torch.randn(2, 3))


def test_plain_tensors_take_the_dtype_of_the_copy():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.mix, self.more, self.pair = torch.randn(3, 3), [torch.randn(3, 3)], (torch.randn(3, 3), 1)
            self.by_name, self.order = {"a": torch.randn(3, 3)}, torch.tensor([2, 0, 1])

        def forward(self, x):
            return (self.layer(x) @ self.mix @ self.more[0] @ self.pair[0] @ self.by_name["a"])[:, self.order].tanh()

    model, x, v = Plain().eval(), torch.randn(4, 3), torch.randn(4, 3)
    before = contents(model)
    torch.testing.assert_close(norms(model, x, v), truth(model, x, v), rtol=1e-4, atol=0)
    assert engine_for(model).ledger.subject == "perturbed float64 copy"
    assert contents(model) == before and model.mix.dtype == torch.float32


# -- caches ------------------------------------------------------------------------------------------------------------


class Biased(nn.Module):
    """Attention biases kept as timm's LeViT keeps them in eval mode."""

    def __init__(self):
        super().__init__()
        self.layer, self.biases = nn.Linear(3, 4), nn.Parameter(torch.randn(7))
        self.register_buffer("index", torch.tensor([0, 2, 2, 5]), persistent=False)
        self.attention_bias_cache = {}
        self.eval()

    def forward(self, x):
        if "cpu" not in self.attention_bias_cache:
            self.attention_bias_cache["cpu"] = self.biases[self.index]
        return (self.layer(x) + self.attention_bias_cache["cpu"]).tanh()


def test_caches_that_a_forward_pass_fills():
    model, x, v = Biased(), torch.randn(5, 3), torch.randn(5, 4)
    got = norms(model, x, v, per_parameter=True)
    assert model.attention_bias_cache == {}
    assert bool((got["biases"] > 0).all())
    want = []
    for j in range(5):
        alone = model(x[[j, j]])[:1]
        want.append(torch.autograd.grad(alone, model.biases, v[j : j + 1])[0].double().square().sum())
        model.attention_bias_cache.clear()
    torch.testing.assert_close(got["biases"], torch.stack(want), rtol=1e-5, atol=0)


def test_caches_are_found_and_can_be_left_out():
    model, x = Biased(), torch.randn(5, 3)
    assert tensor_caches(model) == []
    with torch.no_grad():
        model(x)
    kept = model.attention_bias_cache["cpu"]
    caches = tensor_caches(model)
    assert [(m is model, name) for m, name in caches] == [(True, "attention_bias_cache")]
    biases = model.biases
    assert torch.autograd.grad(adapt.call(model, x).sum(), biases, allow_unused=True) == (None,)
    with emptied(caches):
        assert torch.autograd.grad(adapt.call(model, x).sum(), biases)[0].abs().sum() > 0
    tensors = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}
    with emptied(caches):
        z = adapt.call_with(model, tensors, x.double(), dtype=torch.float64)
    assert torch.autograd.grad(z.sum(), tensors["biases"])[0].dtype == torch.float64
    assert model.attention_bias_cache["cpu"] is kept


# -- buffers -----------------------------------------------------------------------------------------------------------


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("small", torch.zeros(3))
        self.register_buffer("large", torch.zeros(BufferKeeper.LARGE + 1))
        self.table = nn.Embedding(4, 3, max_norm=0.1)


def test_buffers_are_put_back_call_after_call():
    model, keeper = Buffers(), BufferKeeper()
    modules, weight = all_modules(model), model.table.weight.detach().clone()
    for value in range(3):
        small, large = model.small, model.large
        small.data.fill_(value)  # which leaves no trace
        large.fill_(value)
        with keeper.kept(modules) as changed:
            model.small.add_(1)
            if value == 1:
                model.large.add_(1)
            else:
                model.large = torch.ones(2)
            model.table(torch.arange(4))
        assert sorted(changed) == ["large", "small", "weight"]
        assert model.small is small and model.large is large and torch.equal(model.table.weight, weight)
        assert torch.equal(small, torch.full_like(small, value)) and torch.equal(large, torch.full_like(large, value))


def test_large_buffers_are_copied_once():
    model, keeper = Buffers(), BufferKeeper()
    for _ in range(2):
        with keeper.kept(all_modules(model)) as changed:
            copy = keeper._copies[id(model.large)][2]
            copy.fill_(7)  # would be refreshed were it copied anew
    assert changed == [] and bool((copy == 7).all())


@pytest.mark.parametrize("unseen", [False, True])
def test_buffers_written_without_a_trace(unseen):
    model, keeper = Buffers(), BufferKeeper()
    for _ in range(2):
        with pytest.raises(KeyError), keeper.kept(all_modules(model), unseen=unseen):
            model.small.data.fill_(5)
            model.large.data.fill_(5)
            raise KeyError
        assert bool((model.small == 5).all()) is not unseen and bool((model.large == 5).all()) is not unseen


def test_zero_buffers_are_moved():
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("alpha", torch.zeros(()))

        def forward(self, x):
            h = self.layer(x)
            return h - self.alpha * h.mean(0)

    model, x = Centred().eval(), torch.randn(4, 3)
    subject = with_buffers_moved(model, adapt.trainable(model), 1.0, 0)
    assert subject is not None and float(model.alpha) == 0
    assert not torch.allclose(subject(x)[:2], subject(x[:2]))
    assert subject(x).dtype == torch.float64
    model.alpha.fill_(1)
    assert with_buffers_moved(model, adapt.trainable(model), 1.0, 0) is None


# -- engines -----------------------------------------------------------------------------------------------------------


class Equal(nn.Linear):
    def __eq__(self, other):
        return isinstance(other, Equal)

    def __hash__(self):
        return 1


def test_models_that_compare_equal_have_engines_of_their_own():
    x, v = torch.randn(4, 3), torch.randn(4, 2)
    models = [Equal(3, 2, bias) for bias in (True, False)]
    assert engine_for(models[0]) is not engine_for(models[1])
    for model in models:
        torch.testing.assert_close(norms(model, x, v), truth(model, x, v), rtol=1e-5, atol=0)


def test_buffers_of_modules_that_compare_equal():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.zeros(()))

        __eq__, __hash__ = Equal.__eq__, Equal.__hash__

    a, b = Counts(), Counts()
    with adapt.buffers_kept([a, b]):
        a.n += 1
        b.n += 1
        b.calls = 1  # which belongs to b's buffer alone
    assert (float(a.n), float(b.n)) == (0, 1)


def test_engines_go_with_the_model():
    model = nn.Linear(3, 2)
    norms(model, torch.randn(4, 3), torch.randn(4, 2))
    engine = weakref.ref(engine_for(model))
    del model
    gc.collect()
    assert engine() is None


def test_estimates_of_one_model_share_a_proof(proofs):
    model, inputs = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), fastlr.TensorInputs(torch.randn(8, 5))
    first = fastlr.estimate(model, inputs, n=8)
    assert len(proofs) == 1
    again = fastlr.estimate(model, inputs, n=8)
    fastlr.LocalRedundancy(model, inputs, 8).measure()
    norms(model.eval(), torch.randn(8, 5), torch.randn(8, 3))
    assert len(proofs) == 1 and again.value == first.value


def test_an_output_function_written_anew_is_proven_once(proofs):
    class Two(nn.Linear):
        def forward(self, x):
            return {"a": super().forward(x), "b": 2 * super().forward(x)}

    model, x, v = Two(3, 2), torch.randn(4, 3), torch.randn(4, 2)

    def total(key):
        return norms(model, x, v, output=lambda result: result[key].tanh()).sum()

    a, again = total("a"), total("a")
    assert len(proofs) == 1 and a == again
    assert total("b") != a
    assert len(proofs) == 2


def test_an_engine_that_others_used_captures_its_own_chunk():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)).eval()

    def estimator(side, graphs):
        made = fastlr.LocalRedundancy(model, fastlr.ShapeImages((3, side, side)), 8, batch_size=8)
        made._recorder = Again
        made._replays = Replays(made._replay if graphs else None, made.engine)
        return made

    small, large, plain = estimator(8, True), estimator(12, True), estimator(8, False)
    assert small.engine is large.engine is plain.engine
    want = plain.measure()
    for _ in range(3):
        got = small.measure()
        large.measure()
        torch.testing.assert_close(got.per_sample, want.per_sample, rtol=1e-6, atol=0)
    assert small._replays.held and large._replays.held and not small._replays.note


def test_attributes_of_what_is_no_module_are_left_alone():
    with attributes_kept(lambda x: x):
        pass
    assert adapt.call(lambda x: x + 1, torch.zeros(1)) == 1
