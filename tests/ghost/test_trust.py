"""No number without a check: each checked call is right, or refused where samples interact."""

import copy
import itertools

import torch
import torch.nn.functional as F
import trust_cases as cases
import trust_state as state
from exact import assert_norms, output_of, truth
from pytest import approx, mark, raises
from single_samples import Written
from torch import nn
from torch.testing import assert_close
from trust_cases import Call, Net

import fastlr
from fastlr.ghost.api import engine_for
from fastlr.ghost.trust.audits import Draw
from fastlr.models.patchtst import PatchTST

norms = fastlr.per_sample_grad_sq_norms
pytestmark = mark.usefixtures("double")


TOLERANCES = {
    torch.float64: (1e-9, 1e-12),
    torch.float32: (1e-3, 1e-4),
    torch.bfloat16: (0.1, 0.02),
}


def right(model, xs, v, want, samples=slice(None), dtype=None, audits=1):
    got = engine_for(model).run(xs, v, Draw(audits)).per_parameter
    assert_norms(got, want, *TOLERANCES[dtype or v.dtype], samples)


def output_like(model, xs):
    """A random cotangent."""
    return torch.randn_like(output_of(model, xs)[0]).to(torch.get_default_dtype())


def check_call(call):
    v = output_like(call.model, call.xs)
    want = truth(call.model, call.xs, v, call.shared)
    assert want.apart > 1e-3 if call.refused else want.apart < 1e-9, (
        "the case itself is not what it says"
    )
    try:
        # Also where samples interact by their gradients only: each beside a copy.
        right(call.model, call.xs, v, want.norms, audits=call.audits)
    except fastlr.InteractionError:
        assert call.refused or call.crowd


# The exact loop is right, and says that it is slow.
@mark.filterwarnings("ignore::fastlr.FastlrWarning")
@mark.parametrize("name", [*cases.CASES, *cases.LARGE])
def test_every_call_is_right_or_refused(name):
    for call in (cases.CASES | cases.LARGE)[name]():
        check_call(call)


@mark.filterwarnings("ignore::fastlr.FastlrWarning")
@mark.parametrize(
    "name",
    [
        *cases.LARGE,
        *(
            n
            for n in cases.CASES
            if n.startswith(("ragged", "permuted", "packed", "switch", "one_"))
        ),
    ],
)
def test_every_call_is_right_or_refused_in_single_precision(name):
    torch.set_default_dtype(torch.float32)
    for call in (cases.CASES | cases.LARGE)[name]():
        check_call(call)


# -- one estimate
# --------------------------------------------------------------------------------------------------


IN_TURN = (
    "ragged",
    "permuted",
    "packed",
    "switch-",
    "one_sample-plain-2_1",
    "one_sample-attention-2_1",
)
CATEGORICAL = fastlr.Categorical()


@mark.parametrize("name", [name for name in cases.CASES if name.startswith(IN_TURN)])
def test_the_calls_of_a_model_are_right_in_one_estimate(name):
    for model, calls in itertools.groupby(cases.CASES[name](), key=lambda call: call.model):
        chunks = [call.xs for call in calls]
        inputs = fastlr.TensorInputs(tuple(torch.cat(parts) for parts in zip(*chunks)))
        size = len(chunks[0][0])
        found = fastlr.estimate(
            model, inputs, n=len(inputs), batch_size=size, predictive=CATEGORICAL
        )
        want = []
        for k, xs in enumerate(chunks):
            at = range(k * size, k * size + len(xs[0]))
            v = CATEGORICAL.cotangent(output_of(model, xs)[0].detach(), "rademacher", at, 0)
            want.append(truth(model, xs, v).total)
        assert_close(found.per_sample, torch.cat(want), rtol=1e-9, atol=0)


@mark.parametrize("mix", [state.with_grad, state.detached])
@mark.parametrize("hold", ["buffer in place", "buffer replaced", "dict", "global"])
def test_a_monitor_refuses_what_an_estimate_refuses(hold, mix):
    model, set_to = state.HOLDERS[hold](mix)
    monitor = fastlr.LocalRedundancy(
        model, fastlr.TensorInputs(torch.randn(24, 5)), n=24, batch_size=8
    )
    before = monitor.measure().value
    set_to(1.0)
    with raises(fastlr.InteractionError):
        monitor.measure()
    with raises(fastlr.InteractionError):
        fastlr.estimate(model, fastlr.TensorInputs(torch.randn(24, 5)), n=24, batch_size=8)
    set_to(0.0)
    assert monitor.measure().value == approx(before, rel=1e-9)


# -- engines
# --------------------------------------------------------------------------------------------------


def test_models_that_compare_equal():
    first, second = (state.Equal(lambda net, x: net.c(net.a(x).tanh())) for _ in range(2))
    assert first == second
    assert engine_for(first) is not engine_for(second)
    for model in (first, second, first):
        check_call(Call(model, (torch.randn(4, 5),)))


def test_a_model_may_say_that_it_equals_everything():
    first = Net(lambda net, x: net.c(net.a(x).tanh()))
    second = Net(lambda net, x: net.c(net.b(net.a(x).tanh()).tanh()))
    for model in (first, second):
        model.__class__ = state.Equal
    for model in (first, second, first):
        check_call(Call(model, (torch.randn(4, 5),)))


# -- the user's module
# -------------------------------------------------------------------------------------------------


class Captures(Net):
    """A model that hooks itself at its first forward pass, and notes that it has.

    Models of transformers do so.
    """

    ready = False

    def forward(self, x):
        if not self.ready:
            self.ready = True
            self.a.register_forward_hook(lambda module, given, out: 1.1 * out)
        return self.c(self.a(x).tanh())


def test_hooks_that_a_forward_pass_makes_are_not_made_twice():
    model, x, v = Captures(None), torch.randn(4, 5), torch.randn(4, 4)
    want = truth(model, (x,), v).norms
    for _ in range(2):
        right(model, (x,), v, want)
        assert not model.a._forward_hooks
        assert not model.ready
    z = model(x)
    right(model, (x,), v, want)
    assert len(model.a._forward_hooks) == 1
    assert torch.equal(model(x), z)


@mark.parametrize("dtype", [torch.float32, torch.float64])
@mark.parametrize("measured_before", [False, True])
def test_biases_cached_by_a_validation_pass_count_or_are_refused(dtype, measured_before):
    torch.set_default_dtype(dtype)
    model = state.CachedBias()
    x = torch.randn(3, 4, 5)
    v = torch.randn(3, 4)
    want = truth(model, (x,), v).norms
    if measured_before:
        right(model, (x,), v, want)
        assert float(want["biases"].min()) > 0
        assert model.cache == {}
    with torch.no_grad():
        model(x)
    cached = {key: (value, value.clone()) for key, value in model.cache.items()}
    for _ in range(2):
        try:
            got = norms(model, x, v, per_parameter=True)
        except fastlr.errors.ModelError as error:
            assert "biases" in str(error)
        else:
            assert_close(got["biases"], want["biases"], rtol=1e-3, atol=0)
        assert all(
            model.cache[key] is value and torch.equal(value, old)
            for key, (value, old) in cached.items()
        )


@torch.no_grad()
def test_a_cache_that_has_become_stale_is_refused():
    model = state.CachedBias()
    x = torch.randn(3, 4, 5)
    v = torch.randn(3, 4)
    model(x)
    norms(model, x, v)
    model.biases.mul_(3)
    with raises(fastlr.HiddenParameterError, match="biases"):
        norms(model, x, v)


def test_a_buffer_first_written_at_a_later_call_is_put_back():
    def how(net, x):
        if net.options["counts"]:
            net.calls += 1
        return net.c(net.a(x).tanh())

    model = Net(how, options={"counts": False})
    model.register_buffer("calls", torch.zeros(()))
    for counts in (False, True, True, False, True):
        model.options["counts"] = counts
        check_call(Call(model, (torch.randn(4, 5),)))
        assert model.calls.item() == 0


@mark.filterwarnings("ignore::fastlr.FastlrWarning")
def test_hard_routing_is_judged_the_same_for_every_seed():
    judged = set()
    for seed in range(20):
        torch.manual_seed(seed)
        model, x, v = state.Hard(), torch.randn(8, 5), torch.randn(8, 4)
        want = truth(model, (x,), v)
        assert not want.interact
        try:
            right(model, (x,), v, want.norms)
            judged.add("right")
        except fastlr.errors.ModelError as error:
            judged.add(type(error).__name__)
    assert len(judged) == 1, judged


# -- what must stay fast
# -----------------------------------------------------------------------------------------------


@mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@mark.filterwarnings("error::fastlr.FastlrWarning")
def test_ragged_rows_of_many_samples_stay_off_the_loop(dtype):
    torch.set_default_dtype(torch.float32)
    model = cases.Experts()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        for count in (8, 512, 512):
            x, v = torch.randn(count, 8), torch.randn(count, 4)
            chosen = torch.randint(0, count, (12,)).tolist()
            with torch.autocast("cpu", enabled=False):
                want = truth(model, (x,), v, samples=chosen).norms
            right(model, (x,), v, want, chosen, dtype)
        routes = fastlr.support_report(model, x).routes
    assert set(routes.values()) == {"rule"}, routes


def mixer():
    """A mixer over T positions, with samples, positions and channels of one number."""
    parts = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}
    return Written(
        lambda m, x: m.b((x + m.a(x.transpose(1, 2)).transpose(1, 2)).tanh()).mean(1), **parts
    )


def windows():
    """Swin's: roll, partition into windows, attention in them with a table of biases, and back."""

    def forward(m, x):
        count = len(x)
        windows = (
            x.roll((-1, -1), (1, 2)).view(count, 2, 2, 2, 2, 4).transpose(2, 3).reshape(-1, 4, 4)
        )
        q, k, v = m.qkv(windows).chunk(3, -1)
        h = (q @ k.transpose(1, 2) + m.bias).softmax(-1) @ v
        h = (
            h.view(count, 2, 2, 2, 2, 4)
            .transpose(2, 3)
            .reshape(count, 4, 4, 4)
            .roll((1, 1), (1, 2))
        )
        return m.head(h.mean((1, 2)))

    return Written(
        forward, qkv=nn.Linear(4, 12), bias=nn.Parameter(torch.randn(4, 4)), head=nn.Linear(4, 3)
    )


def residual():
    def forward(m, x):
        h = m.bn2(m.conv2(m.bn1(m.conv1(x)).relu()))
        return m.fc((h + m.down(x)).relu().mean((2, 3)))

    parts = {"conv1": nn.Conv2d(3, 6, 3, padding=1, bias=False), "bn1": nn.BatchNorm2d(6)}
    parts |= {"conv2": nn.Conv2d(6, 6, 3, padding=1), "bn2": nn.BatchNorm2d(6)}
    return Written(forward, **parts, down=nn.Conv2d(3, 6, 1), fc=nn.Linear(6, 3))


def along_features(net, x):
    h = net.a(x)
    order = h.argsort(-1)
    top = h.topk(3, -1).values.sum(-1, keepdim=True)
    return net.c((h.sort(-1).values + h.gather(-1, order.flip(-1)) + top).tanh())


def running_sums(net, x):
    return net.c(net.b(net.a(x).cumsum(1).tanh()).cummax(1).values).sum(1)


def pooled(net, x):
    h = F.max_pool1d(net.a(x).transpose(1, 2), 2) + F.adaptive_avg_pool1d(
        net.a(x).transpose(1, 2), 2
    )
    return net.c(F.interpolate(h, size=3).transpose(1, 2)).sum(1)


def shuffled(net, x):
    h = F.pixel_shuffle(net.a(x).permute(0, 3, 1, 2)[:, :4], 2)
    h = F.interpolate(h, scale_factor=2, mode="bilinear")
    return net.c(F.unfold(h, 2, stride=2).transpose(1, 2)[..., [0, 1, 2, 3, 0, 1]].tanh()).mean(1)


def by_letters(net, x):
    h = torch.einsum("btd,ed->bte", x, net.a.weight) + net.a.bias
    scores = torch.einsum("bte,bse->bts", h, h).softmax(-1)
    return torch.einsum("bts,bse,fe->bf", scores, h, net.c.weight) + net.c.bias


def encoder(batch_first):
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(4, 4, 8, 0.0, batch_first=batch_first),
        2,
        enable_nested_tensor=False,
    )


def patches():
    return PatchTST(
        channels=2, context=16, horizon=4, patch=4, stride=4, width=8, heads=2, layers=1, ffn=8
    )


FINE = {
    "mixer": (mixer, (4, 4)),
    "windows": (windows, (4, 4, 4)),
    "residual": (residual, (3, 4, 4)),
    "encoder-batch_first": (lambda: encoder(True), (4, 4)),
    "encoder-time_first": (lambda: encoder(False), (4, 4)),
    "along_features": (lambda: Net(along_features), (5,)),
    "running_sums": (lambda: Net(running_sums), (4, 5)),
    "pooled": (lambda: Net(pooled), (4, 5)),
    "shuffled": (lambda: Net(shuffled), (2, 2, 5)),
    "by_letters": (lambda: Net(by_letters), (4, 5)),
    "patchtst": (patches, (16, 2)),
}


@mark.parametrize("dtype", [torch.float32, torch.float64])
@mark.parametrize("name", FINE)
@mark.filterwarnings("error::fastlr.FastlrWarning")
def test_models_that_keep_the_rules(name, dtype):
    torch.set_default_dtype(dtype)
    build, shape = FINE[name]
    model = build().eval()
    axis = 1 if name == "encoder-time_first" else 0
    # Samples along axis 0.
    front = Written(lambda m, x: m.model(x.movedim(0, axis)).movedim(axis, 0), model=model)
    for count in (4, 2, 5, 4):
        x = torch.randn(count, *shape)
        v = output_like(model, (x,))
        want = truth(front, (x,), v).norms
        x, v = x.movedim(0, axis), v.movedim(0, axis)
        got = norms(model, x, v, in_dim=axis, out_dim=axis, per_parameter=True)
        assert_norms({f"model.{n}": value for n, value in got.items()}, want, *TOLERANCES[dtype])
        report = fastlr.support_report(model, x, in_dim=axis, out_dim=axis)
        assert {report.routes[n] for n in got if want[f"model.{n}"].any()} == {"rule"}, report
        # By an index.
        assert any("every batch" in note for note in report.notes) == (name == "shuffled"), report


@mark.filterwarnings("error::fastlr.FastlrWarning")
def test_running_statistics_may_move():
    """In training between two estimates, which costs no check and no comparison."""
    model = residual()
    images = fastlr.TensorInputs(torch.randn(8, 3, 4, 4))
    compared = []
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(60):
        optimizer.zero_grad()
        model.train()(torch.randn(6, 3, 4, 4)).square().mean().backward()
        optimizer.step()
        fastlr.estimate(model, images, n=8)
        compared.append(engine_for(model).independence.comparisons)
    assert engine_for(model).independence.comparisons == 1
    assert compared[-1] == compared[0]
    check_call(Call(model.eval(), (torch.randn(5, 3, 4, 4),)))
    assert set(fastlr.support_report(model, torch.randn(5, 3, 4, 4)).routes.values()) == {"rule"}


class ByLength(nn.Module):
    """A model that weighs samples by lengths, or positions by masks, beside the batch's mean."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, x, lengths):
        lengths = lengths != 0 if lengths.ndim == 3 else lengths  # what is zero is padding
        lengths = lengths.to(x.dtype).reshape(len(x), -1)
        return self.layer(x).tanh() * (2 + lengths.mean(1, True)) / (1 + lengths.mean())


@mark.parametrize(
    ("equal", "unequal"),
    [
        (torch.full((5,), 8), torch.tensor([8, 7, 3, 5, 2])),
        (
            torch.full((5, 1), 8, dtype=torch.uint16),
            torch.tensor([[8], [7], [3], [5], [2]], dtype=torch.uint16),
        ),
        (
            torch.ones(5, 3, dtype=torch.bool),
            torch.arange(3) < torch.tensor([[3], [1], [2], [3], [1]]),
        ),
        (
            torch.ones(5, 1, 2, 3, dtype=torch.long),
            (torch.arange(30) % 4 > 0).long().view(5, 1, 2, 3),
        ),
        (torch.ones(5, dtype=torch.bool), torch.arange(5) > 1),
        (torch.zeros(5, 2), torch.arange(10.0).view(5, 2)),
        (
            torch.randn(5, 3, 2),
            torch.tensor([0.0, 1, 1, 0, 1]).view(5, 1, 1) * torch.randn(5, 3, 2).tril(),
        ),
    ],
    ids=["lengths", "unsigned lengths", "mask", "rows of a mask", "flags", "zeros", "padding"],
)
def test_inputs_that_are_equal_at_first_may_differ_later(equal, unequal):
    model, x = ByLength(), torch.randn(5, 5)
    check_call(Call(model, (x, equal)))
    check_call(Call(model, (x, unequal), refused=True))


def test_a_copy_of_a_model_has_its_own_engine():
    model = state.HOLDERS["buffer in place"](state.detached)[0]
    check_call(Call(model, (torch.randn(4, 5),)))
    other = copy.deepcopy(model)
    other.alpha.fill_(1.0)
    check_call(Call(other, (torch.randn(4, 5),), refused=True))
    check_call(Call(model, (torch.randn(4, 5),)))


class ByDtype(nn.Module):
    """Cannot run in float64, and says so by an exception of its own kind, without a word."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 4)
        self.scales = {torch.float32: 2.0}

    def forward(self, x):
        if x.dtype != torch.float32:
            raise AssertionError
        return self.layer(x).tanh() * self.scales[x.dtype]


def test_a_model_that_cannot_run_in_float64_is_checked_in_its_own_dtype():
    torch.set_default_dtype(torch.float32)
    model, x, v = ByDtype().eval(), torch.randn(6, 5), torch.randn(6, 4)
    got = norms(model, x, v)
    slopes = 2 * (1 - torch.tanh(model.layer(x)) ** 2) * v
    assert_close(
        got, (slopes.square().sum(1) * (1 + x.square().sum(1))).double(), rtol=1e-4, atol=0
    )
    assert fastlr.support_report(model, x).subject == "float32 copy"
