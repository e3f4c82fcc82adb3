"""The engine's promises: never silently wrong, nothing touched, plans kept, errors that explain.

An error names the thing, the reason and the remedy.
"""

import dataclasses
import gc
import os

import torch
from exact import seeded
from expected import needs_gpu, warned
from pytest import mark, raises
from single_samples import Written, truth
from torch import nn
from torch.testing import assert_close
from untouched import untouched

import fastlr
from bench import cases
from fastlr.estimator import eval_mode
from fastlr.ghost import Engine
from fastlr.ghost.api import engine_for
from fastlr.ghost.graph.layouts import Ragged, Regular
from fastlr.ghost.graph.marks import Marks, explains, row_sums
from fastlr.ghost.graph.walk import ALIASES
from fastlr.ghost.norms import rules
from fastlr.ghost.norms.factors import NormsOnly
from fastlr.ghost.trust.agreement import computes_in_few_digits


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def images():
    """A convolutional network, its inputs and a cotangent."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3)
    ).eval()
    return model, torch.randn(8, 3, 8, 8), torch.randn(8, 3)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64)


def norms(model, x, v=None, **options):
    v = draw(4, 3) if v is None else v
    return fastlr.per_sample_grad_sq_norms(model, x, v, **options)


def agree(model, x, v, rtol=1e-10):
    assert_close(norms(model, x, v), truth(model, (x,), v), rtol=rtol, atol=0)


def agree_on_four(model):
    """Hold a model of five inputs and three outputs to the truth on four samples."""
    agree(model, draw(4, 5), draw(4, 3))


# -- plans
# --------------------------------------------------------------------------------------------------


def test_a_second_call_costs_no_check(checks):
    model = mlp()
    for count in (4, 4, 9, 2, 1, 64):
        agree(model, draw(count, 5), draw(count, 3))
    assert len(checks) == 1


def test_weights_may_change_between_calls(checks):
    model = mlp()
    for _ in range(3):
        agree_on_four(model)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1)
    assert len(checks) == 1


def test_a_new_structure_is_checked_again(checks):
    model = Written(
        lambda m, x: m.b(m.a(x)) if m.deep else m.a(x), a=nn.Linear(5, 5), b=nn.Linear(5, 5)
    ).double()
    for deep in (True, False, True, False):
        model.deep = deep
        agree(model, draw(4, 5), draw(4, 5))
    assert len(checks) == 2


def test_a_change_that_hides_a_parameter_is_seen():
    def forward(m, x):
        with torch.set_grad_enabled(not m.hide):
            y = m.b(x)
        return m.a(x) + y

    model = Written(forward, a=nn.Linear(5, 3), b=nn.Linear(5, 3)).double()
    model.hide = False
    agree_on_four(model)
    model.hide = True
    refused(fastlr.HiddenParameterError, "parameter b", model, draw(4, 5))


def test_a_change_that_makes_samples_interact_is_seen():
    model = Written(
        lambda m, x: m.a(x - x.mean(0).detach()) if m.centre else m.a(x * 1.0) + 0,
        a=nn.Linear(5, 3),
    )
    model = model.double()
    model.centre = False
    agree_on_four(model)
    model.centre = True
    refused(fastlr.InteractionError, "interact", model, draw(4, 5))


def test_a_single_sample_goes_by_one_pass():
    model = mlp()
    model.register_parameter("unused", nn.Parameter(torch.ones(3).double()))
    engine = Engine(model)
    v = draw(1, 3)
    routes = engine.run(draw(1, 5), lambda z: v).routes
    assert routes.pop("unused") == "zero"
    assert set(routes.values()) == {"loop"}
    v = draw(4, 3)
    routes = engine.run(draw(4, 5), lambda z: v).routes
    assert routes.pop("unused") == "zero"
    assert set(routes.values()) == {"rule"}


def test_freezing_is_seen(checks):
    model = mlp()
    agree_on_four(model)
    model[0].weight.requires_grad_(False)
    agree_on_four(model)
    assert set(norms(model, draw(4, 5), per_parameter=True)) == {"0.bias", "2.weight", "2.bias"}


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
def test_many_calls_leave_memory_flat():
    model, x, v = images()
    for _ in range(40):
        norms(model, x, v)
    gc.collect()
    before, objects = resident(), len(gc.get_objects())
    for _ in range(100):
        norms(model, x, v)
    gc.collect()
    assert resident() - before < 5 << 20
    assert len(gc.get_objects()) - objects < 66


def test_the_same_call_gives_the_same_bits():
    model, x, v = images()
    first = norms(model, x, v)  # with the checks
    assert all(torch.equal(norms(model, x, v), first) for _ in range(3))


def test_wrappers_are_looked_through():
    model = mlp()
    want = truth(model, (draw(4, 5),), draw(4, 3))
    compiled = torch.compile(model, backend="eager")
    assert_close(norms(compiled, draw(4, 5)), want)
    parallel = nn.DataParallel(model)
    assert set(norms(parallel, draw(4, 5), per_parameter=True)) == {
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    }


@mark.parametrize("in_dim", [0, 1])
def test_inputs_in_another_memory_order_keep_the_fast_route(in_dim):
    """A linear layer takes another path through autograd where its input is not contiguous."""
    model = nn.Linear(2, 3).double()
    # Time first, in memory sample first.
    x = draw(4, 6, 2).transpose(0, 1)
    v = draw(4, 6, 3).transpose(0, 1)
    x, v = (x, v) if in_dim else (x.transpose(0, 1), v.transpose(0, 1))
    got = norms(model, x, v, in_dim=in_dim, out_dim=in_dim)
    want = truth(model, (draw(4, 6, 2),), draw(4, 6, 3))
    assert_close(got, want)
    assert set(fastlr.support_report(model, x, in_dim=in_dim, out_dim=in_dim).routes.values()) == {
        "rule"
    }


# -- what a wrong rule or layout meets
# ----------------------------------------------------------------------------------


def wrong_rule(monkeypatch, when):
    """Make the linear rule give twice the gradient where ``when(site)``."""
    right = rules.RULES["AddmmBackward0"]

    def twice(site, slots):
        found = right(site, slots)
        if when(site) and 2 in found:
            found[2] = found[2].whole() if isinstance(found[2], NormsOnly) else found[2]
            found[2].g = found[2].g * 2
        return found

    monkeypatch.setitem(rules.RULES, "AddmmBackward0", twice)


def test_a_wrong_rule_is_found_by_audits(monkeypatch):
    wrong_rule(monkeypatch, lambda site: True)
    model = mlp()
    agree_on_four(model)
    report = fastlr.support_report(model, draw(4, 5))
    assert report.routes["0.weight"] == "node"
    assert "is off by" in str(report)


def test_a_rule_wrong_only_at_the_real_batch_is_found_by_audits(monkeypatch):
    wrong_rule(monkeypatch, lambda site: site.count != 3)
    model = mlp()
    agree(model, draw(8, 5), draw(8, 3))
    assert fastlr.support_report(model, draw(8, 5)).routes["0.weight"] == "node"


def test_a_missing_rule_takes_the_nodes_own_formula(monkeypatch):
    monkeypatch.delitem(rules.RULES, "AddmmBackward0")
    model = mlp()
    agree_on_four(model)
    report = fastlr.support_report(model, draw(4, 5))
    assert set(report.routes.values()) == {"node"}
    assert "no rule for AddmmBackward0" in str(report)


@mark.parametrize(
    "right",
    [Regular(0, 1, 3), Regular(0, 3, 1), Regular(1, 1, 1), Regular(1, 2, 2), Regular(2, 2, 1)],
)
def test_marks_tell_layouts_apart(right):
    count, shape = 5, [12, 12, 12]
    shape[right.dim] = right.outer * count * right.inner
    plain = draw(*shape)
    marks = Marks.make(count, torch.float64, torch.device("cpu"))
    ids = right.samples(count, plain.device)
    along = [1, 1, 1]
    along[right.dim] = -1
    sums = (
        row_sums(plain, right.dim),
        torch.stack([row_sums(plain * c[ids].view(along), right.dim) for c in marks.factors]),
    )
    for outer in (1, 2, 3):
        for inner in (1, 2, 3):
            if outer * count * inner == shape[right.dim]:
                layout = Regular(right.dim, outer, inner)
                assert (explains(layout, *sums, marks) is not None) == (layout == right)
    found = explains(Ragged(right.dim), *sums, marks)
    assert isinstance(found, Ragged)
    assert torch.equal(found.ids, ids)


@mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@mark.parametrize("count", [2, 3, 40, 512, 3000])
def test_rows_of_any_number_of_samples_are_told_apart(count, dtype):
    marks = Marks.make(count, dtype, torch.device("cpu"))
    assert len(marks.factors) <= 5
    ids = torch.randint(count, (4 * count,), generator=seeded(1))
    plain = draw(4 * count).abs()
    marked = (
        plain
        * marks.factors[:, ids]
        * (1 + 0.5 * marks.tolerance * draw(len(marks.factors), 4 * count).clamp(-1, 1))
    )
    found = explains(Ragged(0), plain, marked, marks)
    assert isinstance(found, Ragged)
    assert torch.equal(found.ids, ids)
    for share in (0.5, 0.25, 0.2):  # a row of two samples is that of neither, nor of a third
        others = torch.where(ids == 0, 1, 0)
        mixed = plain * ((1 - share) * marks.factors[:, ids] + share * marks.factors[:, others])
        for row in range(0, len(ids), max(1, len(ids) // 50)):
            one = marked.clone()
            one[:, row] = mixed[:, row]
            assert explains(Ragged(0), plain, one, marks) is None


def test_rows_that_mix_samples_have_no_layout():
    plain = draw(6, 4)
    marks = Marks.make(3, torch.float64, torch.device("cpu"))
    marked = plain * marks.factors.repeat(1, 2)[..., None]
    marked[:, 0, 0] = plain[0, 0] * marks.factors[:, 1]
    sums = row_sums(plain, 0), torch.stack([row_sums(m, 0) for m in marked])
    assert explains(Regular(0, 2, 1), *sums, marks) is None
    assert explains(Ragged(0), *sums, marks) is None


def test_a_gradient_that_is_zero_at_first_is_right_later():
    """A gate that is shut for all samples of the first batch."""
    gate = Written(
        lambda m, x: m.a(x) * (x[:, :1] > 0) + x.sum(1, keepdim=True) * m.b,
        a=nn.Linear(5, 1),
        b=nn.Parameter(torch.ones(1)),
    )
    gate = gate.double()
    x = draw(8, 5)
    x[:, 0] = -x[:, 0].abs()  # the gate is shut everywhere: a has no gradient at all
    agree(gate, x, draw(8, 1))
    x[:, 0] = x[:, 0].abs()
    agree(gate, x, draw(8, 1))


def test_a_batch_of_one_settles_nothing_for_larger_ones():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(
        8, 2, 16, 0.0, batch_first=True
    ).eval()  # its graph differs for one sample
    for size in (1, 3, 1, 7):
        x, v = torch.randn(size, 5, 8), torch.randn(size, 5, 8)
        got = norms(model, x, v, per_parameter=True)
        assert not engine_for(model).plan.by_sample
        for name, want in cases.loop_norms(cases.Case(model, x), v).items():
            assert_close(got[name].float(), want.float(), rtol=1e-3, atol=1e-6)


def test_what_the_first_batch_does_not_show_is_audited(monkeypatch):
    """A wrong rule is found where the gradient was zero in the first batch."""
    wrong_rule(monkeypatch, lambda site: bool(site.g.any()) and site.g.shape[-1] == 1)
    gate = Written(
        lambda m, x: m.a(x) * (x[:, :1] > 0) + m.b(x), a=nn.Linear(5, 1), b=nn.Linear(5, 2)
    ).double()
    x = draw(8, 5)
    x[:, 0] = -x[:, 0].abs()
    agree(gate, x, draw(8, 2))
    assert "gradient zero on those samples" in str(fastlr.support_report(gate, x))
    x[:, 0], v = x[:, 0].abs(), draw(8, 2)
    assert_close(norms(gate, x, v, check=True), truth(gate, (x,), v), rtol=1e-10, atol=0)
    assert fastlr.support_report(gate, x).routes["a.weight"] != "rule"


def test_a_later_audit_can_refute_an_earlier_one(monkeypatch):
    model = Written(lambda m, x: m.a(m.a(x)) if m.twice else m.a(x), a=nn.Linear(5, 5)).double()
    model.twice = False
    agree(model, draw(4, 5), draw(4, 5))
    wrong_rule(monkeypatch, lambda site: True)
    model.twice = True
    agree(model, draw(4, 5), draw(4, 5))
    model.twice = False
    agree(model, draw(4, 5), draw(4, 5))


# -- refusals
# --------------------------------------------------------------------------------------------------


def refused(error, pattern, model, x):
    with raises(error, match=pattern):
        norms(model, x)


def test_batch_norm_in_train_mode_is_named():
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    with untouched(model):
        refused(
            fastlr.InteractionError,
            r"module 1 \(BatchNorm1d\).*train mode.*model\.eval\(\)",
            model,
            draw(4, 5),
        )
    agree_on_four(model.eval())


def linear(function):
    """A function of a module with a linear layer ``a``, and of its inputs."""
    return Written(function, a=nn.Linear(5, 3)).double()


def test_parameters_outside_the_graph():
    hidden = Written(
        lambda m, x: m.a(x) + m.b(x).detach(), a=nn.Linear(5, 3), b=nn.Linear(5, 3)
    ).double()
    refused(
        fastlr.HiddenParameterError,
        r"b\.(weight|bias).*requires_grad_\(False\)",
        hidden,
        draw(4, 5),
    )
    unused = Written(lambda m, x: m.a(x), a=nn.Linear(5, 3), b=nn.Linear(5, 3)).double()
    agree_on_four(unused)
    report = fastlr.support_report(unused, draw(4, 5))
    assert report.routes["b.weight"] == "zero"
    assert "not used by the output" in str(report)


def test_leaves_that_are_not_parameters_are_named():
    stray = draw(5).requires_grad_()
    model = linear(lambda m, x: m.a(x * stray))
    with warned(r"shape \(5,\)\) require grad .* not counted"):
        agree_on_four(model)
    assert "1 other leaves require grad" in str(fastlr.support_report(model, draw(4, 5)))


def root_of_zero(m, x):
    """The gradient of the root is infinite."""
    return (m.a(x) * 0).abs().sqrt()


X = draw(4, 5)
NAN_COLUMN = draw(4, 5).index_fill(1, torch.tensor(2), torch.nan)
DROPOUT = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 3)).double()


def test_opposite_infinities_among_the_inputs_are_numbers():
    x = draw(4, 5)
    x[0, 0], x[1, 1] = torch.inf, -torch.inf  # their sum is none
    clamped = linear(lambda m, x: m.a(x.clamp(-1, 1)))
    assert torch.equal(norms(clamped, x), norms(clamped, x.clamp(-1, 1)))


@mark.parametrize(
    ("error", "pattern", "call"),
    [
        (
            "Interaction",
            "samples .*interact",
            lambda: norms(linear(lambda m, x: m.a(x - x.mean(0).detach())), X),
        ),
        ("RandomForward", r"train mode: 1.*model\.eval\(\)", lambda: norms(DROPOUT, X)),
        ("NonFinite", "not a number", lambda: norms(mlp(), NAN_COLUMN)),
        (
            "NonFinite",
            "not finite|infinite",
            lambda: norms(linear(lambda m, x: m.a(x).exp().exp()), 100 * X),
        ),
        (
            "NonFinite",
            "gradient of parameter a.weight is not finite",
            lambda: norms(linear(root_of_zero), X),
        ),
        ("NonFinite", "cotangent", lambda: norms(mlp(), X, draw(4, 3) * torch.inf)),
        ("Input", "torch.nn.Module", lambda: norms("model", X)),
        ("Model", "no trainable parameters", lambda: norms(mlp().requires_grad_(False), X)),
        ("Input", "empty", lambda: norms(mlp(), draw(0, 5), draw(0, 3))),
        ("Input", "nested.*pad it", lambda: norms(mlp(), torch.nested.nested_tensor([*X]))),
        (
            "Input",
            "sparse.*make it dense",
            lambda: norms(linear(lambda m, x: m.a(x.to_dense())), X.to_sparse()),
        ),
        ("Input", "cotangent has shape", lambda: norms(mlp(), X, draw(4, 2))),
        ("Input", "cotangent is complex", lambda: norms(mlp(), X, draw(4, 3) * 1j)),
        ("Input", "cotangent is sparse", lambda: norms(mlp(), X, draw(4, 3).to_sparse())),
        ("Input", "output is sparse", lambda: norms(linear(lambda m, x: m.a(x).to_sparse()), X)),
        ("Input", "output is empty", lambda: norms(linear(lambda m, x: m.a(x)[:, :0]), X)),
        ("Model", "a parameter itself", lambda: norms(linear(lambda m, x: m.a.weight), draw(3, 5))),
        ("Input", "float16.*float64", lambda: norms(mlp(), X.half())),
        ("Input", "float32.*float64", lambda: norms(mlp(), X.float())),
        ("Input", "on meta", lambda: norms(mlp(), X.to("meta"))),
        ("Input", "out_dim=2", lambda: norms(mlp(), X, out_dim=2)),
        (
            "Input",
            "not a tensor but a tuple of 2",
            lambda: norms(linear(lambda m, x: (m.a(x), 1)), X),
        ),
        (
            "Input",
            "picks nothing.*keys",
            lambda: norms(linear(lambda m, x: {"y": m.a(x)}), X, output="z"),
        ),
        ("Input", "in_dim", lambda: norms(linear(lambda m, x: m.a(x.T)), draw(5, 4))),
        ("Model", "not initialised", lambda: norms(nn.LazyLinear(3), X)),
        ("Model", "complex", lambda: norms(nn.Linear(5, 3, dtype=torch.complex128), X)),
    ],
)
def test_what_cannot_be_measured_is_named(error, pattern, call):
    with raises(getattr(fastlr, f"{error}Error"), match=pattern):
        call()


def test_nothing_is_touched_when_a_call_fails():
    model = nn.Sequential(
        nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 3)
    ).double()
    for x in (draw(4, 5), draw(4, 5) * torch.nan):
        with untouched(model), raises(fastlr.FastlrError):
            norms(model, x, draw(4, 3))


# -- precision
# --------------------------------------------------------------------------------------------------


@mark.parametrize("scale", [1e-30, 1e-20, 1.0, 1e15])
@mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiny_and_huge_cotangents(scale, dtype):
    model = mlp().to(dtype)
    x = draw(4, 5).to(dtype)
    v = draw(4, 3).to(dtype).double()
    got = norms(model, x, v * scale)
    unit = norms(model, x, v)
    assert_close(got / scale**2, unit, rtol=1e-5 if dtype == torch.float32 else 0.05, atol=0)


def test_autocast_is_close():
    model, x, v = images()
    want = norms(model, x, v)
    with torch.autocast("cpu", torch.bfloat16):
        got = norms(model, x, v, per_parameter=True)
    assert_close(torch.stack(list(got.values())).sum(0), want, rtol=0.03, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        assert set(fastlr.support_report(model, x).routes.values()) == {"rule"}


def test_batch_norm_of_another_library(monkeypatch):
    """Batch norm by cuDNN has another node name and another name for epsilon, and is right.

    On a GPU it is the node of float32.
    """
    rule = rules.RULES["NativeBatchNormBackward0"]

    class Node:
        def __init__(self, node):
            self._node = node

        def __getattr__(self, name):
            if name == "_saved_eps":
                raise AttributeError(name)
            return getattr(self._node, "_saved_eps" if name == "_saved_epsilon" else name)

    seen = []

    def other(site, slots):
        seen.append(site)
        return rule(dataclasses.replace(site, node=Node(site.node)), slots)

    monkeypatch.setitem(rules.RULES, "NativeBatchNormBackward0", other)
    model = (
        nn.Sequential(
            nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 2)
        )
        .double()
        .eval()
    )
    x, v = draw(6, 5), draw(6, 2)
    result = Engine(model).run(x, lambda z: v)
    assert set(result.routes.values()) == {"rule"}
    assert_close(result.total, truth(model, (x,), v))
    assert {
        ALIASES[name] for name in ("CudnnBatchNormBackward0", "MiopenBatchNormBackward0")
    } <= set(rules.RULES)


@needs_gpu
@mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_norms_that_are_not_folded_keep_their_rule_on_a_gpu(dtype):
    model = (
        nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).eval().cuda()
    )
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        found = fastlr.support_report(model, torch.randn(8, 5, device="cuda"))
    assert set(found.routes.values()) == {"rule"}


@needs_gpu
def test_recurrent_layers_on_a_gpu():
    parts = {"rnn": nn.LSTM(4, 6, batch_first=True), "head": nn.Linear(6, 2)}
    model = Written(lambda m, x: m.head(m.rnn(x)[0][:, -1]), **parts).eval()
    x, v = torch.randn(5, 3, 4), torch.randn(5, 2)
    want = norms(model, x, v)
    got = norms(model.cuda(), x.cuda(), v.cuda())
    assert_close(got.cpu(), want, rtol=1e-3, atol=0)


def test_low_precision_is_that_of_products():
    gpu = torch.device("cuda")
    cpu = torch.device("cpu")
    backends = torch.backends
    before = backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32
    try:
        backends.cudnn.allow_tf32 = True
        backends.cuda.matmul.allow_tf32 = False
        assert computes_in_few_digits(gpu, {torch.float32})
        assert not computes_in_few_digits(gpu, {torch.float64})
        assert computes_in_few_digits(cpu, {torch.float32, torch.bfloat16})
        assert not computes_in_few_digits(cpu, {torch.float32})
        backends.cudnn.allow_tf32 = False
        assert not computes_in_few_digits(gpu, {torch.float32})
        with torch.autocast("cpu", torch.bfloat16):
            assert computes_in_few_digits(cpu, {torch.float32})
    finally:
        backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32 = before


def test_cudnn_is_as_set_afterwards():
    cudnn = torch.backends.cudnn
    before = cudnn.enabled, cudnn.benchmark, cudnn.deterministic
    for layer, enabled in ((nn.Linear(2, 2), before[0]), (nn.LSTM(2, 2), False)):
        with eval_mode._repeatable([layer], torch.device("cuda")):
            assert (cudnn.enabled, cudnn.benchmark, cudnn.deterministic) == (enabled, False, True)
        assert (cudnn.enabled, cudnn.benchmark, cudnn.deterministic) == before


def test_several_passes_add_up():
    model, x = mlp(), draw(4, 5)
    several = [draw(4, 3, seed=k) for k in range(3)]
    got = Engine(model).run(x, lambda z: iter(several)).total
    assert_close(got, sum(truth(model, (x,), v) for v in several))


def test_unit_passes_keep_the_fast_route():
    """One output element at a time, as probe="exact" does, keeps the sample axis.

    The zeros in such a cotangent must not lose it.
    """
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x = draw(4, 7, 5)

    def units(z):
        for p in range(z.shape[1]):
            v = torch.zeros_like(z)
            v[:, p, 0] = 1
            yield v

    result = Engine(model).run(x, units)
    assert set(result.routes.values()) == {"rule"}
    want = sum(truth(model, (x,), v) for v in units(torch.zeros(4, 7, 3, dtype=torch.float64)))
    assert_close(result.total, want)


def test_what_is_zero_for_most_samples_is_right_where_it_is_not():
    torch.manual_seed(0)
    gated = Written(
        lambda m, x: m.b(x) + (x[:, :1] > 10) * m.a(x), a=nn.Linear(5, 3), b=nn.Linear(5, 3)
    )
    x, v = torch.randn(6, 5), torch.randn(6, 3)
    x[4, 0] = 20.0
    first, second = (norms(gated, x, v, per_parameter=True) for _ in range(2))
    want = x[4].double().square().sum() * v[4].double().square().sum()
    assert_close(first["a.weight"][4], want, rtol=1e-5, atol=0)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_is_random_whatever_the_mode_is_told_apart():
    """Dropout that does not ask for the mode."""
    model = Written(lambda m, x: m.linear(nn.functional.dropout(x)), linear=nn.Linear(6, 3))
    with raises(fastlr.errors.RandomForwardError, match=r"call model.eval\(\)$"):
        norms(model, torch.randn(8, 6), torch.ones(8, 3))
    with raises(
        fastlr.errors.RandomForwardError,
        match="although the model is in eval mode.*training=self.training",
    ) as raised:
        norms(model.eval(), torch.randn(8, 6), torch.ones(8, 3))
    assert "model.eval()" not in str(raised.value)


def rare_branch():
    """A second layer for rows whose first number is large."""

    def forward(m, x):
        z, rare = m.a(x), (x[:, 0] > 5).nonzero()[:, 0]
        return z.index_add(0, rare, m.b(x[rare])) if len(rare) else z

    return Written(forward, a=nn.Linear(5, 3), b=nn.Linear(5, 3))


def test_a_use_that_the_data_choose_is_measured_by_rule():
    x, v = torch.randn(40, 5).clamp(max=4), torch.randn(40, 3)
    x[33, 0] = 9
    model = rare_branch()
    got = norms(model, x, v, per_parameter=True)["b.weight"]
    assert_close(got[33], x[33].double().square().sum() * v[33].double().square().sum())
    assert got.count_nonzero() == 1
    assert engine_for(model).plan.route("b.weight") == "rule"


def test_samples_that_interact_in_large_batches_alone_are_refused_before_an_audit():
    """Also where the forward pass fails if one of two inputs alone is parted."""

    def mixed(model, x, gain):
        z = model.lin(x * gain)
        return z + z.mean(0) if len(z) > 8 else z

    model = Written(mixed, lin=nn.Linear(5, 3))
    engine = Engine(model)
    with raises(fastlr.InteractionError, match="samples interact"):
        engine.run((torch.randn(32, 5), torch.rand(32, 5)), torch.ones(32, 3))
    assert engine.independence.comparisons == 1


def test_a_choice_by_the_mean_of_a_batch_is_looked_for_in_every_batch():
    model = Written(
        lambda m, x: torch.where(x.mean() > 0, m.a(x), m.b(x)), a=nn.Linear(5, 3), b=nn.Linear(5, 3)
    ).double()
    x = draw(4, 5).abs()
    norms(model, x)
    x[0] *= -0.1
    with raises(fastlr.InteractionError):
        norms(model, x, check=False)


def test_parameters_without_elements():
    def joined(m, x):
        return torch.cat([m.a(x), m.none(x), x[:, :0] @ m.empty], 1)

    parts = {"a": nn.Linear(5, 3), "none": nn.Linear(5, 0), "empty": nn.Parameter(torch.ones(0, 2))}
    model, x = Written(joined, **parts).double(), torch.randn(4, 5, dtype=torch.float64)
    v = torch.randn(4, 5, dtype=torch.float64)
    got = fastlr.per_sample_grad_sq_norms(model, x, v)
    assert_close(got, truth(model, (x,), v))


class Outputs:
    """Functions that pick an output, made at every call."""

    key = "logits"

    def method(self):
        return self.pick

    def pick(self, result):
        return result[self.key]

    def of_self(self):
        return lambda result: result[self.key]

    def of_a_text(self, key="logits"):
        return lambda result: result[key]

    def of_a_slice(self, part=(slice(None), slice(0, 2))):
        return lambda result: result["logits"][part]

    def default(self):
        return lambda result, *, key="logits": result[key]


@mark.parametrize("name", [name for name in vars(Outputs) if name[0] != "_" and name != "key"])
def test_a_function_that_picks_the_output_finds_its_engine_again(name):
    model, outputs = nn.Linear(3, 2), Outputs()
    make = getattr(outputs, name) if name != "pick" else lambda: outputs.pick
    engines = {id(engine_for(model, make())) for _ in range(3)}
    assert len(engines) == 1


def test_a_function_that_holds_nothing_yet_picks_the_output():
    def pick(result):
        return result if result is not None else later

    model, x = nn.Linear(3, 2), draw(4, 3).float()
    got = fastlr.per_sample_grad_sq_norms(model, x, torch.ones(4, 2), output=pick)
    later = None
    assert_close(got, fastlr.per_sample_grad_sq_norms(model, x, torch.ones(4, 2)))


def test_functions_that_hold_other_values_have_engines_of_their_own():
    model, outputs = nn.Linear(3, 2), Outputs()
    first, second = (engine_for(model, outputs.of_a_text(key)) for key in ("logits", "loss"))
    assert first is not second


def test_a_parameter_that_only_small_batches_use_is_refused_by_name():
    def forward(m, x):
        z = m.a(x)
        return z + (m.w - m.w.detach()) * x[:, :4] if len(x) <= 2 else z

    model = Written(forward, a=nn.Linear(6, 4), w=nn.Parameter(torch.randn(4)))
    with raises(fastlr.errors.ModelError, match="norm of w"):
        norms(model, torch.randn(7, 6), torch.randn(7, 4))
