"""The model keeps nothing of a measurement, and one proof serves all estimates.

Attributes, containers, caches and buffers are looked at.
"""

import gc
import weakref
from collections import deque
from copy import deepcopy

import exact
import numpy as np
import torch
import torch.nn.functional as F
import trust_state
from expected import refused
from pytest import fixture, importorskip, mark, raises
from recorders import MeasureAgain
from single_samples import Written, truth
from torch import nn
from torch.func import grad, vmap
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from untouched import MEASURES

import fastlr
from bench import cases
from fastlr.ghost.api import engine_for
from fastlr.ghost.model.attributes import emptied
from fastlr.ghost.model.view import call
from fastlr.ghost.model.writes import LARGE, ModelState, tensor_caches, unchanged

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
    assert fastlr.support_report(model, x).subject == "float64 copy"
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
    assert [(name, cache is model.cache) for name, cache in caches] == [("cache", True)]
    biases = model.biases
    assert torch.autograd.grad(call(model, x).sum(), biases, allow_unused=True) == (None,)
    with unchanged(model), emptied(caches):
        assert torch.autograd.grad(call(model, x).sum(), biases)[0].abs().sum() > 0
    assert model.cache["cpu"] is kept


def test_attention_biases_that_levit_has_kept_are_counted():
    """They were kept without a graph, and counted as zero."""
    timm = importorskip("timm")
    model = timm.create_model("levit_128s", num_classes=7, img_size=64).eval()
    with torch.no_grad():  # norms that are zero at first would hide the attention
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    x, v = torch.randn(2, 3, 64, 64), torch.randn(2, 7)
    want = exact.truth(deepcopy(model), (x,), v).norms
    with torch.no_grad():
        model(x)
    assert tensor_caches(model)
    found = engine_for(model).run(x, v)
    biases = [name for name in want if name.endswith("attention_biases")]
    got = sum(found.per_parameter[name] for name in biases)
    assert bool((got > 1e-5 * found.total).all()), "5.6e-5 and 7.2e-5 for one seed"
    assert_close(got, sum(want[name] for name in biases), rtol=1e-4, atol=0)


# -- buffers
# --------------------------------------------------------------------------------------------------


class Outside(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("b", torch.zeros(2))
        self.calls = 0
        self.register_forward_hook(lambda *given: None)


class Writes(nn.Module):
    """Writes in its forward pass, by a function (model, inputs), into one of the things it has."""

    def __init__(self, write):
        super().__init__()
        self.write = write
        self.layer, self.table = nn.Linear(5, 3), nn.Embedding(3, 3, max_norm=0.1)
        self.register_buffer("small", torch.zeros(3))
        self.register_buffer("large", torch.zeros(LARGE + 1))
        self.register_buffer("wide", torch.zeros(1).expand(4))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("square", torch.arange(4.0).view(2, 2).clone())
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("var", torch.ones(5))
        self.tensor, self.big = torch.zeros(3), torch.zeros(LARGE + 1)
        self.listed, self.pair, self.named = [torch.zeros(2)], (torch.zeros(2),), {"a": self.tensor}
        self.calls = 0
        self.outside = [Outside()]
        self.eval()

    def forward(self, x):
        self.write(self, x)
        return F.relu(self.layer(x))


def counts(net, x):
    net.calls += 1


def data_in_place(net, x):
    net.small.data += 1


def numpy_in_place(net, x):
    net.small.numpy()[:] = 1


def in_inference_mode(net, x):
    with torch.inference_mode():
        net.small += 1


WAYS = {
    "buffer": lambda net, x: net.small.add_(1),
    "buffer, .data": data_in_place,
    "buffer, NumPy": numpy_in_place,
    "buffer, a view": lambda net, x: net.small[:2].detach().add_(1),
    "buffer, a fused operator": lambda net, x: F.batch_norm(x, net.mean, net.var, training=True),
    "buffer, inference mode": in_inference_mode,
    "buffer, expanded": lambda net, x: net.wide[:1].add_(1),
    "buffer, other memory": lambda net, x: setattr(net.small, "data", torch.ones(7)),
    "buffer, another one": lambda net, x: setattr(net, "small", torch.ones(3)),
    "buffer, a new one": lambda net, x: net.layer.register_buffer("fresh", torch.ones(2)),
    "buffer, with a graph": lambda net, x: net.small.copy_(net.layer(x)[0]),
    "buffer, resized": lambda net, x: net.empty.resize_(3),
    "large buffer": lambda net, x: net.large.add_(1),
    "large buffer, .data": lambda net, x: net.large.data.add_(1),
    "tensor": lambda net, x: net.tensor.add_(1),
    "tensor, .data": lambda net, x: net.tensor.data.add_(1),
    "large tensor": lambda net, x: net.big.data.add_(1),
    "tensor in a list": lambda net, x: net.listed[0].add_(1),
    "tensor in a tuple": lambda net, x: net.pair[0].add_(1),
    "tensor in a dict": lambda net, x: net.named["a"].add_(1),
    "list": lambda net, x: net.listed.append(x),
    "buffer, transposed": lambda net, x: net.square.t_(),
    "buffer, a new one, not persistent": lambda net, x: net.layer.register_buffer(
        "fresh", torch.ones(2), persistent=False
    ),
    "counter": counts,
    "module outside": lambda net, x: net.outside[0].b.data.add_(1),
    "counter outside": lambda net, x: counts(net.outside[0], x),
    "hook": lambda net, x: net.layer.register_forward_hook(lambda *given: None),
    "hook, taken away": lambda net, x: net.outside[0]._forward_hooks.clear(),
    "parameter": lambda net, x: net.layer.weight.data.mul_(1),
    "parameter of a table": lambda net, x: net.table(torch.arange(3)),
    "parameter, unused": lambda net, x: net.table.weight.data.add_(1),
}


def everything(net):
    """Return what a model holds: identity, memory, values and graphs of tensors, and the rest."""

    def seen(value):
        if torch.is_tensor(value):
            return id(value), value.data_ptr(), value.requires_grad, value.grad_fn, value.tolist()
        if isinstance(value, dict):
            return [(key, seen(v)) for key, v in value.items()]
        if isinstance(value, (list, tuple)):
            return id(value), list(map(seen, value))
        return value if isinstance(value, (bool, int)) else id(value)

    return [seen(vars(module)) for module in (*net.modules(), *net.outside)]


@mark.filterwarnings("ignore::fastlr.FastlrWarning")
@mark.parametrize("way", WAYS)
@mark.parametrize("measure", MEASURES)
def test_whatever_a_pass_writes_is_put_back(way, measure):
    net, x = Writes(WAYS[way]), torch.randn(6, 5)
    before = everything(net)
    for _ in range(2):
        MEASURES[measure](net, x)
        assert everything(net) == before


@mark.parametrize("measure", ["norms", "estimate", "gradient"])
def test_what_a_backward_pass_writes_is_put_back(measure):
    net, x = Writes(lambda net, x: None), torch.randn(6, 5)

    def hook(*given):
        counts(net, x)
        data_in_place(net, x)

    net.layer.register_full_backward_hook(hook)
    before = everything(net)
    MEASURES[measure](net, x)
    assert everything(net) == before


class Fitted(nn.Module):
    """Fits its first batch, as ActNorm and vector quantisers do."""

    def __init__(self, unseen):
        super().__init__()
        self.layer, self.unseen = nn.Linear(4, 3), unseen
        for name, value in ("mean", 0.0), ("deviation", 1.0):
            self.register_buffer(name, torch.full((4,), value))
        self.register_buffer("fitted", torch.tensor(False))

    def forward(self, x):
        if not self.fitted:
            for held, value in (self.mean, x.mean(0)), (self.deviation, x.std(0)), (self.fitted, 1):
                (held.data if self.unseen else held).copy_(torch.as_tensor(value))
        return self.layer((x - self.mean) / self.deviation)


@mark.parametrize("unseen", [False, True])
def test_what_the_first_batch_initialises(unseen):
    """Its value was another for every size of a chunk."""
    net, x = Fitted(unseen), fastlr.TensorInputs(torch.randn(64, 4))
    for size in (16, 64, None):
        with refused("interact", fastlr.InteractionError):
            fastlr.estimate(net, x, n=64, batch_size=size)
    assert not net.fitted
    net(torch.randn(9, 4))
    values = [fastlr.estimate(net, x, n=64, batch_size=size).value for size in (16, 64, None)]
    assert_close(values, values[:1] * 3)


class Counts(nn.Module):
    """Exchanges a buffer, and writes into another."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("total", torch.zeros(2))

    def forward(self, x):
        self.passes = self.passes + 1
        self.total.add_(1)
        return self.layer(x).tanh() * self.passes


def test_buffers_of_a_scripted_module():
    net, x, v = torch.jit.script(Counts()).eval(), torch.randn(4, 5), torch.randn(4, 3)
    passes = net.passes
    assert_close(norms(net, x, v), norms(net, x, v))
    assert net.passes is passes
    assert (float(passes), net.total.tolist()) == (0, [0, 0])


def test_codes_that_are_drawn_from_the_first_batch():
    """Three samples have a code each, and rounding seemed to explain some batches."""

    def quantised(net, x):
        h = net.layer(x)
        if not net.fitted:
            net.codes.data.copy_(h.detach()[torch.randint(len(h), (16,))])
            for _ in range(5):
                nearest = torch.cdist(h.detach(), net.codes).argmin(1)
                for code in nearest.unique():
                    net.codes.data[code] = h.detach()[nearest == code].mean(0)
            net.fitted.data.fill_(True)
        return net.head(net.codes[torch.cdist(h, net.codes).argmin(1)])

    for seed in range(8):
        torch.manual_seed(seed)
        held = {"codes": nn.Buffer(torch.zeros(16, 8)), "fitted": nn.Buffer(torch.tensor(False))}
        net = Written(quantised, layer=nn.Linear(6, 8), head=nn.Linear(8, 3), **held).eval()
        with raises(fastlr.ModelError):
            norms(net, torch.randn(32, 6), torch.ones(32, 3))


@mark.parametrize("unseen", [False, True])
@mark.parametrize("is_buffer", [False, True])
@mark.parametrize("is_late", [False, True])
@mark.parametrize("size", [3, LARGE + 1])
def test_a_graph_keeps_what_its_pass_has_written(unseen, is_buffer, is_late, size):
    def scaled(net, x):
        scale = net.buffer if is_buffer else net.held[0]
        if not net.is_late:
            written = scale.data if unseen else scale
            written.copy_(1 + net.layer.weight.detach().norm(dim=1))
        return net.layer(x).tanh() * scale

    held = {"buffer": nn.Buffer(torch.ones(size)), "held": [torch.ones(size)]}
    net = Written(scaled, layer=nn.Linear(5, size), is_late=is_late, **held).eval()
    x, v = torch.randn(4, 5), torch.randn(4, size)
    if is_late:  # the first pass writes nothing
        norms(net, x, v)
        net.is_late = False
        if size > LARGE and not unseen:
            with refused("written to", fastlr.ModelError):
                norms(net, x, v)
    for _ in range(2):
        assert_close(norms(net, x, v), truth(net, (x,), v), rtol=1e-4, atol=0)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, scale):
        ctx.scale = scale  # which autograd does not know of
        return h * scale

    @staticmethod
    def backward(ctx, g):
        return g * ctx.scale, None


def in_own_function(net, x):
    net.buffer.copy_(net.layer.weight.detach().norm())
    return Scaled.apply(net.layer(x).tanh(), net.buffer)


def in_checkpoint(net, x):
    net.buffer.copy_(net.layer.weight.detach().norm())
    return checkpoint(lambda h: h.tanh() * net.buffer, net.layer(x), use_reentrant=False)


def assigned_for_checkpoint(net, x):
    net.held = net.layer.weight.detach().norm()
    return checkpoint(lambda h: h.tanh() * net.held, net.layer(x), use_reentrant=False)


def in_hook(net, x):
    net.buffer.copy_(net.layer.weight.detach().norm())
    h = net.layer(x)
    h.register_hook(lambda g: g * net.buffer)
    return h.tanh()


def beside_functional_gradient(net, x):
    net.buffer += 1
    return vmap(grad(lambda row: net.layer(row).tanh().sum()))(x)[:, :3]


@mark.filterwarnings("ignore::fastlr.FastlrWarning")
@mark.parametrize(
    "function",
    [in_own_function, in_checkpoint, assigned_for_checkpoint, in_hook, beside_functional_gradient],
)
def test_a_backward_pass_reads_what_its_forward_pass_has_written(function):
    layer = nn.Linear(5, 3)
    net = Written(function, layer=layer, held=None, buffer=nn.Buffer(torch.ones(()))).eval()
    x, v = torch.randn(4, 5), torch.randn(4, 3)
    got = [norms(net, x, v) for _ in range(2)]
    what = {"predictive": fastlr.Gaussian(), "probe": "exact"}
    estimate = fastlr.estimate(net, fastlr.TensorInputs(x), 4, batch_size=4, **what).per_sample
    loss = fastlr.redundancy_loss(net, x, reduction="none", **what)
    assert float(net.buffer) == 1
    want = [truth(net, (x,), torch.eye(3)[[k] * 4]) for k in range(3)]
    assert_close(estimate, sum(want), rtol=1e-4, atol=0)
    assert_close(loss.double(), sum(want), rtol=1e-4, atol=0)
    for one in got:
        assert_close(one, truth(net, (x,), v), rtol=1e-4, atol=0)


@mark.parametrize("unseen", [False, True])
@mark.parametrize("is_buffer", [False, True])
def test_a_loss_has_the_gradient_of_what_its_pass_has_written(unseen, is_buffer):
    """It is differentiated once all is put back."""

    def scaled(net, x):
        scale = net.buffer if is_buffer else net.held[0]
        (scale.data if unseen else scale).copy_(1 + net.layer.weight.detach().norm(dim=1))
        return net.layer(x).tanh() * scale

    held = {"buffer": nn.Buffer(torch.ones(3)), "held": [torch.ones(3)]}
    net, x = Written(scaled, layer=nn.Linear(5, 3), **held).eval(), torch.randn(4, 5)
    factor = 1 + net.layer.weight.detach().norm(dim=1)
    same = Written(lambda m, x: m.layer(x).tanh() * factor, layer=deepcopy(net.layer)).eval()
    fastlr.redundancy_loss(same, x, seed=0).backward()
    for _ in range(2):
        net.zero_grad()
        fastlr.redundancy_loss(net, x, seed=0).backward()
        assert_close(net.layer.weight.grad, same.layer.weight.grad)


def test_hooks_of_any_number_stay():
    """A model that another process has pickled may have higher numbers than are given here."""
    net, x = nn.Linear(3, 2), torch.randn(4, 3)
    hooks = net._forward_pre_hooks
    net.register_forward_pre_hook(lambda net, given: (2 * given[0],))
    hooks[1 << 40] = hooks.popitem()[1]
    net.register_forward_hook(lambda *given: None)
    for _ in range(2):
        assert_close(norms(net, x, torch.ones(4, 2)), truth(net, (x,), torch.ones(4, 2)))
        fastlr.metrics.dormant_ratio(nn.Sequential(net, nn.ReLU()), x)
    assert list(hooks) == [1 << 40]


def test_what_is_not_written_is_not_touched(tmp_path):
    """Memory that cannot be written to ended the process."""
    np.save(tmp_path / "mean.npy", np.ones(5, np.float32))
    mean = torch.from_numpy(np.load(tmp_path / "mean.npy", mmap_mode="r"))
    table = nn.Embedding(7, 5)
    parts = {"layer": nn.Linear(5, 3), "table": table, "mean": nn.Buffer(mean)}
    parts["conjugate"] = nn.Buffer(torch.tensor(1j).conj())

    def function(net, ids):
        return net.layer(net.table(ids) - net.mean) * (1 + net.conjugate.imag)

    net = Written(function, **parts).eval()
    ids, v = torch.arange(4), torch.ones(4, 3)
    net.conjugate = torch.tensor(0j).conj()
    assert_close(norms(net, ids, v), truth(net, (ids,), v))
    kept = [one.name for one in ModelState(net).kept]
    assert kept == ["mean"], "a table without max_norm is no small matter"


def test_views_that_a_pass_makes_part_of_its_graph_are_refused():
    def cached(net, x):
        net.keys[: len(x)] = net.layer(x)
        return net.keys[: len(x)].tanh()

    both = torch.zeros(2, 8, 3)
    net = Written(cached, layer=nn.Linear(5, 3)).eval()
    net.register_buffer("keys", both[0])
    with refused("makes keys, a view", fastlr.ModelError):
        norms(net, torch.randn(4, 5), torch.randn(4, 3))


def test_a_module_that_stands_for_another_is_put_back():
    """Its module stayed as the proof had left it, with attributes in float64."""

    def switched(net, x):
        net.head = net.heads[net.task]
        net.count += 1
        return net.head(x) * net.scale

    heads = nn.ModuleList(nn.Linear(5, 3) for _ in range(2))
    parts = {"heads": heads, "head": heads[0], "scale": torch.ones(3), "count": 0, "task": 1}
    net, x, v = Written(switched, **parts).eval(), torch.randn(4, 5), torch.randn(4, 3)
    for _ in range(2):
        before = contents(net)
        got = norms(net, x, v)
        assert contents(net) == before
        assert net.head is heads[0]
        assert net.scale.dtype == torch.float32
        assert_close(got, truth(deepcopy(net), (x,), v), rtol=1e-4, atol=0)


def test_large_buffers_that_are_replaced_are_watched_again():
    def writes(net, x):
        net.cache.add_(1)
        return net.layer(x)

    net = Written(writes, layer=nn.Linear(5, 3), cache=nn.Buffer(torch.zeros(LARGE + 1))).eval()
    for dtype in (torch.float32, torch.float64, torch.float32):
        norms(net.to(dtype), torch.randn(4, 5, dtype=dtype), torch.ones(4, 3, dtype=dtype))
        assert not net.cache.any()


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
    with unchanged(nn.Sequential(a, b)):
        a.n += 1
        b.n += 2
    assert (float(a.n), float(b.n)) == (0, 0)


def test_engines_go_with_the_model():
    model = nn.Linear(3, 2)
    norms(model, torch.randn(4, 3), torch.randn(4, 2))
    gone = weakref.ref(model), weakref.ref(engine_for(model))
    del model
    gc.collect()
    assert [what() for what in gone] == [None, None]


def test_an_output_function_written_anew_is_proven_once(checks):
    class Two(nn.Linear):
        def forward(self, x):
            return {"a": super().forward(x), "b": 2 * super().forward(x)}

    model, x, v = Two(3, 2), torch.randn(4, 3), torch.randn(4, 2)

    def total(key):
        return norms(model, x, v, output=lambda result: result[key].tanh()).sum()

    a, again = total("a"), total("a")
    assert len(checks) == 1
    assert a == again
    assert total("b") != a
    assert len(checks) == 2


def test_an_engine_that_others_used_captures_its_own_chunk():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    ).eval()

    def estimator(side, graphs):
        made = fastlr.LocalRedundancy(model, fastlr.ShapeImages((3, side, side)), 8, batch_size=8)
        made.chunks.replays.recorder = MeasureAgain if graphs else None
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
    assert call(lambda x: x + 1, torch.zeros(1)) == 1


@mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_buffers_are_put_back(dtype):
    def counted(m, x):
        m.seen.add_(1j)
        return m.layer(x)

    model = Written(counted, layer=nn.Linear(3, 2), seen=nn.Buffer(torch.zeros(4, dtype=dtype)))
    norms(model.eval(), torch.randn(4, 3), torch.ones(4, 2))
    assert not model.seen.any()
