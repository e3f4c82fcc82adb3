"""Parts of a model that torch.compile has compiled are measured as they were written."""

import subprocess
import sys
from copy import deepcopy
from threading import Event, Thread

import pytest
import torch
import torch.nn.functional as F
from exact import assert_norms, truth
from single_samples import Written
from torch import nn
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

import fastlr
from fastlr.errors import HiddenParameterError
from fastlr.ghost.engine import Engine
from fastlr.ops.compiled_parts import uncompiled

BACKEND = "aot_eager"  # a compiled part is one node of the graph, without a compiler of C++


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch._dynamo.reset()  # a function that was compiled too often is compiled no more
    yield
    torch._dynamo.reset()


def layers():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


class Decorated(nn.Module):
    """Its forward is compiled."""

    def __init__(self):
        super().__init__()
        self.net = layers()

    @torch.compile(backend=BACKEND)
    def forward(self, x):
        return x + self.net(x).tanh()


@torch.compile(backend=BACKEND)
def bounded(weight):
    return weight.tanh() * weight.norm()


def of_a_weight():
    """A compiled function of its weight alone."""
    return Written(
        lambda m, x: (x @ bounded(m.weight).T).tanh(), weight=nn.Parameter(torch.randn(4, 4))
    )


def in_place():
    net = layers()
    net.compile(backend=BACKEND)
    return net


MODELS = {
    "submodule": lambda: torch.compile(layers(), backend=BACKEND),
    "decorated": Decorated,
    "of a weight": of_a_weight,
    "in place": in_place,
}


@pytest.mark.parametrize("part", MODELS.values(), ids=MODELS)
def test_compiled_parts_go_by_rule(part):
    held(nn.Sequential(nn.Linear(4, 4), part(), nn.Linear(4, 3)))


def test_they_do_so_where_they_have_run_compiled():
    model = nn.Sequential(nn.Linear(4, 4), of_a_weight(), nn.Linear(4, 3))
    model(torch.randn(5, 4)).sum().backward()
    held(model)


@pytest.mark.filterwarnings("ignore::fastlr.FastlrWarning")
def test_checkpoints_run_them_again_as_they_were_written():
    """Their backward pass was met by other tensors than had been saved."""
    model = Written(
        lambda m, x: checkpoint(m.part, x.tanh(), use_reentrant=False),
        part=torch.compile(layers(), backend=BACKEND),
    )
    x, y = torch.randn(4, 4), torch.arange(4)
    plain = nn.Sequential(nn.Tanh(), deepcopy(model.part._orig_mod))
    inputs = fastlr.TensorInputs(x)
    for measure in (
        lambda model: fastlr.estimate(model, inputs, 4, probe="batch", batch_size=4).value,
        lambda model: float(fastlr.metrics.train_grad_norm(model, x, y, F.cross_entropy)),
        lambda model: fastlr.redundancy_loss(model, x, seed=0).item(),
    ):
        assert measure(model) == pytest.approx(measure(plain), rel=1e-5)


def held(model):
    """Require the truth of the norms, by rule, with rows that the graph tells."""
    model, x = model.double(), torch.randn(5, 4, dtype=torch.float64)
    v = torch.randn(5, 3, dtype=torch.float64)
    with torch.compiler.set_stance("force_eager"):
        want = truth(model, (x,), v).norms
    engine = Engine(model)
    got = engine.run(x, v)
    assert_norms(got.per_parameter, want, 1e-10, 1e-13)
    assert set(got.routes.values()) == {"rule"}


def node(part):
    """The kind of the node that the part ends in."""
    return type(part(torch.randn(5, 4)).grad_fn).__name__


def test_afterwards_they_run_compiled_again():
    part = torch.compile(layers(), backend=BACKEND)
    with uncompiled(), uncompiled():
        assert node(part) == "AddmmBackward0"
    assert "Compiled" in node(part)


def test_threads_that_overlap_leave_the_stance_unchanged():
    """The first to enter is the first to leave.

    Putting back what each has found would leave all functions uncompiled.
    """
    first_is_in, both_are_in, first_is_out = Event(), Event(), Event()
    part = torch.compile(layers(), backend=BACKEND)

    def first():
        with uncompiled():
            first_is_in.set()
            both_are_in.wait()
        first_is_out.set()

    thread = Thread(target=first)
    thread.start()
    first_is_in.wait()
    with uncompiled():
        both_are_in.set()
        first_is_out.wait()
        assert node(part) == "AddmmBackward0"
    thread.join()
    assert "Compiled" in node(part)


def branch(model, x):
    """One of two layers by torch.cond, which is given neither of them."""
    return torch.cond(model.switch, lambda t: model.a(t), lambda t: model.b(t), (x,))


def branches(function):
    layers = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "c": nn.Linear(4, 4)}
    return Written(function, switch=torch.tensor(True), **layers)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: branch(m, x) + m.a(x.tanh()) + m.b(x.sin()),
        lambda m, x: branch(m, m.c(x)),
        branch,
    ],
    ids=["also used outside", "after a layer", "alone"],
)
def test_what_a_branch_uses_without_being_given_it_is_refused(function):
    """Where nothing is compiled autograd does not see it.

    The norms of a layer that is used outside, too, lacked the branch without a word.
    """
    torch.compile(layers(), backend=BACKEND)  # so that the compiler is imported
    with pytest.raises(HiddenParameterError, match=r"cond.*parameter a.weight.*plain Python"):
        fastlr.per_sample_grad_sq_norms(branches(function), torch.randn(5, 4), torch.ones(5, 4))


def one_by_one(function, x):
    return torch_map(function, x)


def repeated(function, x):
    zero = torch.zeros((), dtype=torch.long)
    return while_loop(lambda i, t: i < 2, lambda i, t: (i + 1, function(t)), (zero, x))[1]


def chosen(function, x):
    return torch.cond(torch.tensor(True), lambda t: (function(t),), lambda t: (t.cos(),), (x,))[0]


@pytest.mark.parametrize(
    ("outer", "inner"), [(one_by_one, chosen), (repeated, one_by_one), (chosen, repeated)]
)
def test_what_an_operator_within_another_uses_without_being_given_it_is_refused(outer, inner):
    """It was left out without a word: an operator's own functions alone were looked at."""
    model = branches(lambda m, x: outer(lambda t: inner(m.a, t), x) + m.a(x))
    with pytest.raises(HiddenParameterError, match=r"parameter a.weight.*plain Python"):
        fastlr.per_sample_grad_sq_norms(model, torch.randn(5, 4), torch.ones(5, 4))


def test_what_is_used_again_below_an_operand_is_hidden_nevertheless():
    """Autograd sees the layer before the operator, and not that within.

    The rows that the operator hands the function are no tensors from outside.
    """
    model = branches(lambda m, x: torch.stack(tuple(torch_map(m.a, m.a(x)))))
    with pytest.raises(HiddenParameterError, match=r"map.*parameter a.weight"):
        fastlr.per_sample_grad_sq_norms(model, torch.randn(5, 4), torch.ones(5, 4))


def within_vmap(m, x):
    def one(t):
        return torch.cond(t.sum() > 0, lambda s: (m.a(s),), lambda s: (m.b(s).sin(),), (t,))[0]

    return torch.vmap(one)(m.c(x)) + m.a(x)


def test_a_branch_for_each_sample_within_vmap_is_measured():
    """There torch runs both and selects, which autograd sees."""
    model = branches(within_vmap).double()
    x, v = torch.randn(2, 5, 4, dtype=torch.float64)

    def both(m, x):
        h = m.c(x)
        return torch.where(h.sum(1, keepdim=True) > 0, m.a(h), m.b(h).sin()) + m.a(x)

    plain = Written(both, a=model.a, b=model.b, c=model.c)
    got = fastlr.per_sample_grad_sq_norms(model, x, v, per_parameter=True)
    assert_norms(got, truth(plain, (x,), v).norms, 1e-10, 1e-13)


def test_a_branch_that_uses_no_parameter_is_measured():
    model = branches(
        lambda m, x: m.a(torch.cond(m.switch, lambda t: t.sin(), lambda t: t.cos(), (x,)))
    )
    x, v = torch.randn(5, 4), torch.randn(5, 4)
    plain = Written(lambda m, x: m.a(x.sin()), a=model.a, b=model.b, c=model.c)
    got = fastlr.per_sample_grad_sq_norms(model, x, v, per_parameter=True)
    assert_norms(got, truth(plain, (x,), v).norms, 1e-5, 1e-6)


BRANCH_OF_A_NEW_PROCESS = """
import sys
import torch
import fastlr

class Branch(torch.nn.Linear):
    def forward(self, x):
        z = torch.cond(torch.tensor(True), lambda t: t.sin(), lambda t: t.cos(), (x,))
        return super().forward(z)

assert "torch._dynamo" not in sys.modules
print(fastlr.per_sample_grad_sq_norms(Branch(4, 3), torch.randn(5, 4), torch.ones(5, 3)))
"""


def test_a_branch_is_measured_where_nothing_was_compiled_before():
    """torch imports its compiler within the first forward pass; it failed on fastlr's modes."""
    command = [sys.executable, "-c", BRANCH_OF_A_NEW_PROCESS]
    subprocess.run(command, check=True, timeout=300)
