"""The model keeps nothing of a measurement, and one proof serves all estimates.

Attributes, containers, caches and buffers are looked at.
"""

import gc
import weakref
from collections import deque

import torch
import trust_state
from pytest import fixture, mark, raises
from recorders import Again
from single_samples import Written
from torch import nn
from torch.testing import assert_close
from untouched import untouched

import fastlr
from bench import cases
from fastlr.ghost.api import engine_for
from fastlr.ghost.model_io import ModelView, call, call_with
from fastlr.ghost.program import all_modules
from fastlr.ghost.state import BufferKeeper, attributes_kept, emptied, put_back, tensor_caches
from fastlr.ghost.verification.copies import with_buffers_moved

norms = fastlr.per_sample_grad_sq_norms


@fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def contents(model):
    """Return all attributes of all modules, by identity and by value.

    What the containers and tensors among them hold is included.
    """

    def held(value):
        if torch.is_tensor(value):
            return id(value), value.dtype, value.tolist()
        if isinstance(value, dict):
            return id(value), [(key, held(v)) for key, v in value.items()]
        if isinstance(value, (list, deque, set)):
            return id(value), [held(v) for v in value]
        return id(value)

    return [
        (path, key, held(v))
        for path, module in model.named_modules()
        for key, v in vars(module).items()
    ]


@mark.usefixtures("double")
@mark.filterwarnings("ignore::fastlr.FastlrWarning")
@mark.parametrize("dtype", [torch.float32, torch.float64])
@mark.parametrize("fails_at", range(13))
def test_attributes_are_as_they_were(dtype, fails_at):
    """Also after an error in any forward pass, at the proof or at a later call; 0: none fails."""
    torch.set_default_dtype(dtype)
    model = trust_state.Keeps()
    before = contents(model)
    for count in (4, 4, 6):
        trust_state.FUSE[0] = fails_at
        try:
            norms(model, torch.randn(count, 3), torch.randn(count, 2))
            fastlr.estimate(model, fastlr.TensorInputs(torch.randn(count, 3)), n=count)
        except (ValueError, fastlr.FastlrError):
            assert fails_at, "refused"
        assert contents(model) == before


def test_every_forward_pass_begins_with_the_same_state():
    def alternates(net, x):
        net.calls += 1
        return net.layer(x) * (1 if net.calls % 2 else 3)

    model = Written(alternates, layer=nn.Linear(3, 2), calls=0).eval()
    x = torch.randn(5, 3)
    v = torch.randn(5, 2)
    assert_close(norms(model, x, v), norms(model, x, v))
    assert model.calls == 0


def test_submodules_made_in_a_forward_pass_stay():
    def lazy(net, x):
        if not net.ready:
            net.head, net.ready = nn.Linear(x.shape[1], 2), True
        return net.head(x)

    model = Written(lazy, head=None, ready=False).eval()
    call(model, torch.randn(2, 3))
    assert model.ready
    assert isinstance(model.head, nn.Linear)
    model(torch.randn(2, 3))


def test_plain_tensors_take_the_dtype_of_the_copy():
    def function(net, x):
        return (net.layer(x) @ net.mix @ net.more[0] @ net.pair[0] @ net.by_name["a"])[
            :, net.order
        ].tanh()

    held = {"mix": torch.randn(3, 3), "more": [torch.randn(3, 3)], "pair": (torch.randn(3, 3), 1)}
    held |= {"by_name": {"a": torch.randn(3, 3)}, "order": torch.tensor([2, 0, 1])}
    model = Written(function, layer=nn.Linear(3, 3), **held).eval()
    x = torch.randn(4, 3)
    v = torch.randn(4, 3)
    before = contents(model)
    want = sum(cases.loop_norms(cases.Case(model, x), v).values())
    assert_close(norms(model, x, v), want, rtol=1e-4, atol=0)
    assert engine_for(model).ledger.subject == "perturbed float64 copy"
    assert contents(model) == before
    assert model.mix.dtype == torch.float32


# -- caches
# --------------------------------------------------------------------------------------------------


def test_caches_are_found_and_can_be_left_out():
    model, x = trust_state.CachedBias(), torch.randn(5, 4, 5)
    assert tensor_caches(model) == []
    with torch.no_grad():
        model(x)
    kept = model.cache["cpu"]
    caches = tensor_caches(model)
    assert [(m is model, name) for m, name in caches] == [(True, "cache")]
    biases = model.biases
    assert torch.autograd.grad(call(model, x).sum(), biases, allow_unused=True) == (None,)
    with emptied(caches):
        assert torch.autograd.grad(call(model, x).sum(), biases)[0].abs().sum() > 0
    tensors = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}
    with emptied(caches):
        z = call_with(model, tensors, x.double(), dtype=torch.float64)
    assert torch.autograd.grad(z.sum(), tensors["biases"])[0].dtype == torch.float64
    assert model.cache["cpu"] is kept


# -- buffers
# --------------------------------------------------------------------------------------------------


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("small", torch.zeros(3))
        self.register_buffer("large", torch.zeros(BufferKeeper.LARGE + 1))
        self.table = nn.Embedding(4, 3, max_norm=0.1)


def test_buffers_are_put_back_call_after_call():
    model, keeper = Buffers(), BufferKeeper()
    for value in range(3):
        model.small.data.fill_(value)  # which leaves no trace
        model.large.fill_(value)
        with untouched(model), put_back(keeper.keep(all_modules(model))):
            model.small.add_(1)
            if value == 1:
                model.large.add_(1)
            else:
                model.large = torch.ones(2)
            model.table(torch.arange(4))


def test_large_buffers_are_copied_once():
    model, keeper = Buffers(), BufferKeeper()
    for _ in range(2):
        with put_back(keeper.keep(all_modules(model))):
            copy = keeper._copies[id(model.large)].values
            copy.fill_(7)  # would be refreshed were it copied anew
    assert bool((model.large == 0).all())
    assert bool((copy == 7).all())


@mark.parametrize("unseen", [False, True])
def test_buffers_written_without_a_trace(unseen):
    model, keeper = Buffers(), BufferKeeper()
    for _ in range(2):
        with (
            raises(KeyError),
            put_back(keeper.keep(all_modules(model), unseen_writes=unseen)),
        ):
            model.small.data.fill_(5)
            model.large.data.fill_(5)
            raise KeyError
        assert bool((model.small == 5).all()) is not unseen
        assert bool((model.large == 5).all()) is not unseen


def test_zero_buffers_are_moved():
    def centred(net, x):
        h = net.layer(x)
        return h - net.alpha * h.mean(0)

    model = Written(centred, layer=nn.Linear(3, 2), alpha=nn.Buffer(torch.zeros(()))).eval()
    x = torch.randn(4, 3)
    subject = with_buffers_moved(ModelView.of(model), 1.0, 0)
    assert subject is not None
    assert float(model.alpha) == 0
    assert not torch.allclose(subject(x)[:2], subject(x[:2]))
    assert subject(x).dtype == torch.float64
    model.alpha.fill_(1)
    assert with_buffers_moved(ModelView.of(model), 1.0, 0) is None


# -- engines
# --------------------------------------------------------------------------------------------------


def test_buffers_of_modules_that_compare_equal():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.zeros(()))

        def __eq__(self, other):
            return isinstance(other, Counts)

        def __hash__(self):
            return 1

    a, b = Counts(), Counts()
    with put_back(BufferKeeper().keep([a, b], with_attributes=True)):
        a.n += 1
        b.n += 1
        b.calls = 1  # which belongs to b's buffer alone
    assert (float(a.n), float(b.n)) == (0, 1)


def test_engines_go_with_the_model():
    model = nn.Linear(3, 2)
    norms(model, torch.randn(4, 3), torch.randn(4, 2))
    gone = weakref.ref(model), weakref.ref(engine_for(model))
    del model
    gc.collect()
    assert [what() for what in gone] == [None, None]


def test_an_output_function_written_anew_is_proven_once(proofs):
    class Two(nn.Linear):
        def forward(self, x):
            return {"a": super().forward(x), "b": 2 * super().forward(x)}

    model, x, v = Two(3, 2), torch.randn(4, 3), torch.randn(4, 2)

    def total(key):
        return norms(model, x, v, output=lambda result: result[key].tanh()).sum()

    a, again = total("a"), total("a")
    assert len(proofs) == 1
    assert a == again
    assert total("b") != a
    assert len(proofs) == 2


def test_an_engine_that_others_used_captures_its_own_chunk():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    ).eval()

    def estimator(side, graphs):
        made = fastlr.LocalRedundancy(model, fastlr.ShapeImages((3, side, side)), 8, batch_size=8)
        made.chunks.replays.recorder = Again if graphs else None
        return made

    small = estimator(8, True)
    large = estimator(12, True)
    plain = estimator(8, False)
    assert small.engine is large.engine is plain.engine
    want = plain.measure()
    for _ in range(3):
        got = small.measure()
        large.measure()
        assert_close(got.per_sample, want.per_sample, rtol=1e-6, atol=0)
    assert small.chunks.replays.held
    assert large.chunks.replays.held
    assert not small.chunks.replays.note


def test_attributes_of_what_is_no_module_are_left_alone():
    with attributes_kept(lambda x: x):
        pass
    assert call(lambda x: x + 1, torch.zeros(1)) == 1
