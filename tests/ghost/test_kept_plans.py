"""What was found for one batch is kept for the next only where it holds for that one too.

The model stays as it was.
"""

from warnings import catch_warnings

import torch
from expected import warned
from pytest import mark, raises
from single_samples import Written, truth
from torch import nn
from torch.testing import assert_close
from untouched import untouched

import fastlr
from fastlr.ghost.api import engine_for

norms = fastlr.per_sample_grad_sq_norms
pytestmark = mark.usefixtures("double")


def right(model, xs, v):
    want = truth(model, xs, v)
    given = tuple(t.clone() if torch.is_tensor(t) else t for t in xs)
    assert_close(norms(model, given, v), want, rtol=1e-11, atol=0)


def layer_used(how):
    """A linear layer, used as ``how(m, layer, *inputs)`` says."""
    return Written(lambda m, *xs: how(m, m.layer, *xs), layer=nn.Linear(5, 4)).eval()


# -- rows of samples in another order
# ----------------------------------------------------------------------------------


def test_rows_that_are_rolled():
    model = layer_used(lambda _, layer, x, shift: layer(x.roll(shift, 0)).tanh().roll(-shift, 0))
    for shift in (0, 1, 3):
        x, v = torch.randn(4, 5), torch.randn(4, 4)
        assert_close(norms(model, (x, shift), v), truth(model, (x, 0), v), rtol=1e-11, atol=0)


def test_rows_of_a_tiny_gradient_belong_to_their_sample():
    def sorted_cubes(_, layer, x):
        order = x[:, 0].argsort()
        rows = layer(x[order]) - layer.bias
        return torch.zeros_like(rows).index_copy(0, order, rows) ** 3

    x, v = torch.randn(6, 5), torch.randn(6, 4)
    x[3] *= 1e-7
    model = layer_used(sorted_cubes)
    model.layer.bias.requires_grad_(False)
    right(model, (x,), v)


# -- other programs
# --------------------------------------------------------------------------------------------------


def test_views_of_a_parameter_that_begin_to_overlap():
    """Two slices of one table; whether they overlap is an input."""

    def forward(self, x, offset):
        size = x.shape[1]
        return (
            self.layer(x + self.table[:size]).tanh() + self.table[offset : offset + size]
        ).flatten(1)

    model = Written(forward, table=nn.Parameter(torch.randn(20, 4)), layer=nn.Linear(4, 4)).eval()
    for offset in (5, 2, 0, 10, 4):
        right(model, (torch.randn(4, 5, 4), offset), torch.randn(4, 20))


@mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hooks_of_parameters_count_and_are_audited_in_every_batch(dtype):
    model = nn.Linear(5, 4).to(dtype)
    x = torch.randn(6, 5, dtype=dtype)
    v = torch.randn(6, 4, dtype=dtype)
    model.weight.register_hook(lambda g: None)
    for passed in (3, 4, 5):
        norms(model, x, v, check=False)
        assert engine_for(model).audits.passed == passed
    model.weight.register_hook(lambda g: g * torch.arange(5).to(g.dtype))
    with warned("loop over samples"):
        got = norms(model, x, v)
    assert_close(got, truth(model, (x,), v), rtol=1e-5, atol=0)


def test_what_a_float64_copy_does_not_reach_is_no_rounding():
    scale = nn.Parameter(torch.randn(5).float())
    x = torch.randn(6, 5).float()
    v = torch.randn(6, 5).float()
    model = Written(lambda m, x: (x * m.held[0]).tanh(), scale=scale, held=[scale])
    scale.register_hook(lambda g: 3 * g)
    with warned("loop over samples"):
        assert_close(norms(model, x, v), truth(model, (x,), v), rtol=1e-5, atol=0)


def test_hooks_that_come_and_go():
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).eval()
    x, v = torch.randn(6, 5), torch.randn(6, 3)
    right(model, (x,), v)
    handle = model[0].weight.register_hook(lambda g: g * 2)
    with warned("loop over samples"):
        right(model, (x,), v)
    handle.remove()
    right(model, (x,), v)
    clip = model[0].register_forward_hook(
        lambda m, i, out: (out.register_hook(lambda g: g / g.norm()), None)[1]
    )
    for given in ((x,), x):  # a new plan, and the one before
        with catch_warnings(action="ignore"), raises(fastlr.NonlinearBackwardError):
            norms(model, given, v, check=True)
    clip.remove()
    right(model, (x,), v)


@mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
@mark.parametrize("where", [0, 1])
@mark.parametrize("later", [False, True])
def test_backward_hooks_of_what_would_be_folded(kind, where, later):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()).eval()
    x, v = torch.randn(4, 3, 4, 4), torch.randn(4, 16)
    if later:
        right(model, (x,), v)
    getattr(model[where], kind)(lambda *_: None)
    right(model, (x,), v)


def test_ids_that_are_counted_over_the_batch():
    table = nn.Embedding(50, 4, scale_grad_by_freq=True)
    model = Written(lambda m, ids: m.table(ids).sum(1), table=table).eval()
    ids = torch.arange(12).view(4, 3)
    ids[3] = torch.tensor([0, 0, 1])
    with warned("scale_grad_by_freq"):
        right(model, (ids,), torch.randn(4, 4))


# -- what is not to change
# ---------------------------------------------------------------------------------------------


def shared_twice():
    layer = nn.Linear(5, 5)
    return nn.Sequential(layer, nn.Tanh(), layer)


def aliased():
    model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
    model.names = nn.ModuleList(model.children())
    model.forward = lambda x: model[1](model[0](x))
    return model


@mark.parametrize("build", [shared_twice, aliased])
@mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_module_with_two_names_keeps_its_tensors(build, dtype):
    model = build().to(dtype).eval()
    x = torch.randn(4, 5, dtype=dtype)
    v = torch.randn(4, 5, dtype=dtype)
    want = truth(model, (x,), v)
    for _ in range(2):
        with untouched(model):
            got = norms(model, x, v)
        assert_close(got, want.double(), rtol=1e-10 if dtype == torch.float64 else 1e-4, atol=0)


@mark.parametrize("batch", [1, 2, 4])
def test_inputs_that_the_model_writes_to(batch):
    parts = {"conv": nn.Conv1d(2, 2, 3), "norm": nn.BatchNorm1d(2)}
    model = Written(lambda m, x: m.norm(m.conv(x.mul_(2))).flatten(1), **parts).eval()
    x, v = torch.randn(batch, 2, 5), torch.randn(batch, 6)
    want, before = truth(model, (x,), v), x.clone()
    for _ in range(2):
        assert_close(norms(model, x, v), want, rtol=1e-11, atol=0)
        assert torch.equal(x, before)


@mark.parametrize("replaced", [False, True])
@mark.parametrize("train", [False, True])
def test_counters_of_forward_passes(replaced, train):
    def counting(self, layer, x):
        if replaced:
            self.calls = self.calls + 1
        else:
            self.calls += 1
        return layer(x)

    model = layer_used(counting).train(train)
    model.register_buffer("calls", torch.zeros(()))
    for _ in range(2):
        x, v = torch.randn(6, 5), torch.randn(6, 4)
        with untouched(model):
            norms(model, x, v)


def test_embeddings_that_are_shortened_as_they_are_read():
    model = Written(
        lambda m, ids: m.table(ids).tanh().sum(1), table=nn.Embedding(9, 4, max_norm=0.5)
    ).eval()
    ids, v = torch.randint(0, 9, (4, 3)), torch.randn(4, 4)
    with untouched(model):
        got = norms(model, ids, v)
    assert_close(got, truth(model, (ids,), v), rtol=1e-11, atol=0)


# -- models that have norms
# --------------------------------------------------------------------------------------------


def test_a_loop_over_samples_within_the_model():
    model = layer_used(lambda _, layer, x: torch.stack([layer(row).tanh() for row in x]))
    with warned("another structure"):
        right(model, (torch.randn(6, 5),), torch.randn(6, 4))
    right(model, (torch.randn(5, 5),), torch.randn(5, 4))


@mark.parametrize("batch", [2, 3, 4, 7])
def test_models_that_differentiate_in_their_forward_pass(batch):
    def force(_, layer, x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(layer(x).tanh().sum(), x, create_graph=True)[0]

    right(layer_used(force), (torch.randn(batch, 5),), torch.randn(batch, 5))


@mark.parametrize("batch, shared", [(2, 2), (3, 3), (4, 4), (4, 3)])
def test_a_shared_input_as_long_as_the_batch(batch, shared):
    model = layer_used(lambda _, layer, x, keys: layer(x) @ layer(keys).T)
    x = torch.randn(batch, 5)
    keys = torch.randn(shared, 5)
    v = torch.randn(batch, shared)
    want = truth(model, (x, keys), v, shared=(1,))
    assert_close(norms(model, (x, keys), v), want, rtol=1e-11, atol=0)


# -- what need not be found again
# --------------------------------------------------------------------------------------


def test_a_position_table_cut_to_many_lengths_is_checked_once(checks):
    parts = {"table": nn.Parameter(torch.randn(90, 4)), "layer": nn.Linear(4, 3)}
    model = Written(lambda m, x: m.layer((x + m.table[: x.shape[1]]).tanh()).sum(1), **parts).eval()
    for length in range(3, 80, 7):
        right(model, (torch.randn(5, length, 4),), torch.randn(5, 3))
    assert len(checks) == 1


def test_a_hook_put_on_at_every_call_is_checked_once(checks):
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).eval()
    x, v = torch.randn(6, 5), torch.randn(6, 3)

    def put_on(factor):
        return model[0].register_forward_hook(lambda module, given, out: out * factor)

    for factor in (1.0, 1.0, 1.0, 2.0):
        handle = put_on(factor)
        right(model, (x,), v)
        handle.remove()
    # The code is the same: another factor means new layouts and a sample that is looked at.
    assert len(checks) == 1


def test_one_sample_is_checked_once(checks):
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).eval()
    for _ in range(3):
        right(model, (torch.randn(1, 5),), torch.randn(1, 3))
    assert len(checks) == 1


@mark.filterwarnings("ignore::fastlr.FastlrWarning")
def test_a_change_that_few_digits_hide():
    """Interaction that one batch's outputs hardly show is found in the next batch."""

    def forward(m, x):
        h = m.first(x).tanh()
        return m.last((h - m.share * h.mean(0).detach()).tanh())

    model = Written(forward, first=nn.Linear(4, 5), last=nn.Linear(5, 3)).eval().float()
    model.share = 0.0
    saturated = 1 + torch.rand(4, 4).float() * 1e-6
    v = torch.randn(4, 3).float()
    norms(model, saturated, v)
    model.share = 1.0
    with raises(fastlr.errors.InteractionError):
        norms(model, saturated, v, check=True)
        norms(model, torch.randn(4, 4).float(), v, check=True)


# -- what belongs together
# ---------------------------------------------------------------------------------------------


def test_a_shared_input_that_the_model_writes_to():
    parts = {"layer": nn.Linear(5, 4), "words": nn.Embedding(7, 5, scale_grad_by_freq=True)}
    model = Written(
        lambda m, x, ids, factors: m.layer(x * m.words(ids) * factors.mul_(2)), **parts
    ).eval()
    x = torch.randn(4, 5)
    ids = torch.tensor([0, 1, 2, 0])
    v = torch.randn(4, 4)
    factors = torch.rand(5) + 0.5
    before = factors.clone()
    want = truth(model, (x, ids, factors), v, shared=(2,))
    for _ in range(2):
        assert_close(norms(model, (x, ids, factors), v), want, rtol=1e-11, atol=0)
        assert torch.equal(factors, before)


def test_a_model_that_begins_to_write_to_its_inputs():
    model = layer_used(lambda self, layer, x: layer(x.clamp_(-1, 1) if self.layer.clamps else x))
    model.layer.clamps = False
    norms(model, torch.randn(4, 5), torch.randn(4, 4))
    model.layer.clamps = True
    x = 2 * torch.randn(4, 5)
    right(model, (x,), torch.randn(4, 4))
    assert x.abs().max() > 1


def test_a_table_that_grows_stays_with_its_length():
    def forward(m, x):
        if x.shape[1] > m.longest:
            m.longest = x.shape[1]
            m.register_buffer("table", torch.linspace(0, 1, m.longest)[:, None], persistent=False)
        return m.layer((x + m.table[: x.shape[1]]).tanh()).sum(1)

    table = nn.Buffer(torch.linspace(0, 1, 2)[:, None], persistent=False)
    model = Written(forward, layer=nn.Linear(4, 3), longest=2, table=table).eval()
    norms(model, torch.randn(5, 9, 4), torch.randn(5, 3))
    assert len(model.table) == model.longest == 2  # as they were
    right(model, (torch.randn(5, 9, 4),), torch.randn(5, 3))
    assert len(model.table) == model.longest == 9  # grown by the model's own forward pass
    norms(model, torch.randn(5, 7, 4), torch.randn(5, 3))
    assert len(model.table) == model.longest == 9
    model(torch.randn(5, 9, 4))


@mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_with_buffers():
    model = nn.Sequential(
        nn.Linear(5, 4), torch.jit.script(nn.Sequential(nn.BatchNorm1d(4), nn.Tanh()))
    ).eval()
    right(model, (torch.randn(6, 5),), torch.randn(6, 4))


def test_samples_one_by_one_are_checked_once_together(checks):
    """One sample runs unfolded, in another graph than the folded one."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten()).eval()
    x = torch.randn(4, 2, 3, 3)
    for samples in (x, *x.split(1)):
        right(model, (samples,), torch.ones(len(samples), 3))
    assert len(checks) == 2
