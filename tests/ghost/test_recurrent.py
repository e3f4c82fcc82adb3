"""Recurrent layers by rule: every option against one backward pass a sample."""

from functools import partial
from itertools import product

import torch
from exact import assert_norms, assert_same_function, holds, seeded, truth
from expected import refused
from pytest import fixture, mark, raises
from single_samples import Written
from torch import nn
from torch.nn.utils import rnn as sequences
from torch.testing import assert_close

import fastlr
from fastlr.ghost.engine import Engine
from fastlr.ghost.fusion import mode as fuse
from fastlr.ghost.fusion import recurrent
from fastlr.ghost.graph.layouts import Ragged, Regular, Unsupported
from fastlr.ghost.graph.rows import _through
from fastlr.ghost.graph.walk import walk
from fastlr.ghost.norms.factors import Dense
from fastlr.ghost.norms.rules import RULES, Site
from fastlr.ghost.trust.ladder import Rung

B, T, IN, H = 4, 6, 3, 5
KINDS = {
    "lstm": (nn.LSTM, {}),
    "gru": (nn.GRU, {}),
    "tanh": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
}


class Layers(nn.Module):
    """A linear layer, recurrent layers, and a head that reads outputs and last states.

    Initial states may be learnt.
    """

    def __init__(self, kind, learnt=False, **options):
        super().__init__()
        cls, own = KINDS[kind]
        self.first = nn.Linear(IN, IN)
        self.rnn = cls(IN, H, **own, **options)
        depth = self.rnn.num_layers * (2 if self.rnn.bidirectional else 1)
        self.head = nn.Linear(H * (2 if self.rnn.bidirectional else 1), 2)
        self.last = nn.Linear(H * depth, 2)
        self.h0 = nn.Parameter(torch.randn(depth, 1, H)) if learnt else None
        has_cell = learnt and kind == "lstm"
        self.c0 = nn.Parameter(torch.randn(depth, 1, H)) if has_cell else None

    def states(self, count):
        if self.h0 is None:
            return None
        h0 = self.h0.expand(-1, count, -1)
        return h0 if self.c0 is None else (h0, self.c0.expand(-1, count, -1))

    def forward(self, x):
        """Samples first, whatever the layers' order."""
        y = self.first(x)
        y = y if self.rnn.batch_first else y.transpose(0, 1)
        out, ends = self.rnn(y, self.states(len(x)))
        out = out if self.rnn.batch_first else out.transpose(0, 1)
        ends = ends if isinstance(ends, tuple) else (ends,)
        cell = [ends[1].square().sum((0, 2))[:, None]] if len(ends) == 2 else []
        return torch.cat(
            [self.head(out).flatten(1), self.last(ends[0].transpose(0, 1).flatten(1)), *cell], 1
        )


def series(dtype=torch.float64, width=IN):
    return torch.randn(B, T, width, dtype=torch.float64, generator=seeded()).to(dtype)


@fixture(autouse=True)
def _same_draws():
    torch.manual_seed(0)


@mark.parametrize("kind", KINDS)
@mark.parametrize(("layers", "both"), list(product((1, 2), (False, True))))
def test_every_option_is_exact(kind, layers, both):
    options = {"num_layers": layers, "bidirectional": both, "dropout": 0.5 if layers > 1 else 0.0}
    given = layers > 1  # initial states, no biases and time first go with two layers
    model = (
        Layers(kind, learnt=given, bias=not given, batch_first=not given, **options).double().eval()
    )
    engine = holds(model, series())
    assert engine.folding.blocks.replaced == {"recurrent": 1}


@mark.parametrize("kind", KINDS)
def test_float32_goes_by_rule(kind):
    model = Layers(kind, learnt=True, num_layers=2, bidirectional=True).eval()
    engine = holds(model, series(torch.float32), rtol=1e-4)
    assert not engine.plan.rows_lost_at


def test_gates_that_hardly_open():
    model, x = Layers("lstm").eval(), series(torch.float32)
    v = torch.randn(model(x).shape)
    with torch.no_grad():
        model.rnn.bias_ih_l0[:H] = -20  # cells are far below the rounding of 1
    got = Engine(model).run(x, v).per_parameter
    want = truth(model, (x,), v).norms
    for name in filter(lambda name: "rnn" in name, want):
        assert_close(got[name], want[name], rtol=1e-4, atol=0)


@mark.parametrize("kind", KINDS)
def test_values_and_all_gradients_are_torchs(kind):
    model = (
        Layers(kind, learnt=True, num_layers=2, bidirectional=True, batch_first=True)
        .double()
        .eval()
    )
    x = series().requires_grad_()
    leaves = [x, *model.parameters()]
    got = fuse.Folding().run(dict(model.named_parameters()), lambda: model(x))
    assert_same_function(got, model(x), leaves, rtol=1e-10, atol=1e-12)


@mark.parametrize("kind", KINDS)
def test_the_way_back_overwrites_nothing_and_copies_no_gates(kind):
    rnn = KINDS[kind][0](IN, H, **KINDS[kind][1])
    x = series(torch.float32)

    def ends():
        found = rnn(x)[1]
        return found[-1] if isinstance(found, tuple) else found

    z = fuse.Folding().run(dict(rnn.named_parameters()), ends)
    v = torch.randn(z.shape)
    given = v.clone()
    first, second = (
        torch.autograd.grad(z, list(rnn.parameters()), v, retain_graph=True, allow_unused=True)
        for _ in "ab"
    )
    assert torch.equal(v, given)
    assert all(a is b or torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert "AsStridedBackward0" not in walk(z, dict(rnn.named_parameters())).names


def test_projections_are_left_to_torchs_own_steps():
    rnn = nn.LSTM(IN, H, proj_size=2, batch_first=True)
    engine = holds(Written(lambda m, x: m.rnn(x)[0].flatten(1), rnn=rnn).double(), series())
    assert not engine.folding.blocks.replaced
    assert engine.folding.blocks.unfused.calls


@mark.parametrize("kind", KINDS)
@mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_folding_the_steps_are_torchs_own(kind, dtype):
    model, x = Layers(kind).eval().to(dtype), series(dtype)
    with fuse.unfolded():
        engine = holds(model, x, rtol=1e-10 if dtype == torch.float64 else 1e-4)
    blocks = engine.folding.blocks
    assert not blocks.replaced
    assert blocks.unfused.calls


def test_after_folding_is_given_up():
    model, x = Layers("lstm").eval(), series(torch.float32)
    engine = Engine(model)
    want = engine.run(x, lambda z: torch.ones_like(z)).total
    engine.ladder.step_down(Rung.UNFOLDED, "a test")
    got = engine.run(x, lambda z: torch.ones_like(z))
    assert not engine.folding.blocks.replaced
    assert_close(got.total, want, rtol=1e-4, atol=0)
    assert set(got.routes.values()) == {"rule"}
    report = fastlr.support_report(Layers("lstm", dropout=0.0), x)
    assert report.replaced == {"recurrent": 1}
    assert "one product for all steps" in str(report)


def test_layers_that_the_first_call_does_not_reach():
    class Later(Layers):
        def forward(self, x):
            return self.first(x).flatten(1) if self.training else super().forward(x)

    model, x = Later("lstm").train(), series(torch.float32)
    engine = Engine(model)
    engine.run(x, lambda z: torch.ones_like(z))
    model.eval()
    assert set(engine.run(x, lambda z: torch.ones_like(z)).routes.values()) == {"rule"}
    assert engine.folding.blocks.replaced == {"recurrent": 1}


@mark.parametrize("kind", KINDS)
def test_packed_sequences(kind):
    class Packed(Layers):
        def forward(self, x):
            lengths = (x[:, :, 0] < 9).sum(1)
            packed = sequences.pack_padded_sequence(
                self.first(x), lengths.cpu(), batch_first=True, enforce_sorted=False
            )
            out, ends = self.rnn(packed)
            ends = ends if isinstance(ends, tuple) else (ends,)
            out, _ = sequences.pad_packed_sequence(out, batch_first=True, total_length=T)
            return torch.cat(
                [self.head(out).flatten(1), self.last(ends[0].transpose(0, 1).flatten(1))], 1
            )

    model = Packed(kind, bidirectional=True, batch_first=True).eval()
    x = series(torch.float32)
    for sample, length in enumerate((6, 3, 5, 2)):
        x[sample, length:] = 10.0
    engine = holds(model, x, rtol=1e-4)
    blocks = engine.folding.blocks
    assert not blocks.replaced
    assert blocks.unfused.calls == 1


def test_dropout_in_train_mode_is_refused():
    model = Layers("gru", num_layers=2, dropout=0.5).double()
    with raises(fastlr.errors.RandomForwardError):
        Engine(model).run(series(), lambda z: z)


def test_one_sequence_without_a_batch_axis_is_refused():
    model = nn.LSTM(IN, H).double()
    with refused("in_dim"):
        fastlr.per_sample_grad_sq_norms(
            model, torch.randn(T, IN).double(), torch.ones(1, H).double(), output=lambda o: o[1][0]
        )


def test_models_that_differentiate_their_own_forward_pass():
    def slope(m, x):
        x = x.detach().requires_grad_()
        energy = m.rnn(x)[0].square().sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0].flatten(1)

    engine = holds(Written(slope, rnn=nn.LSTM(IN, H, batch_first=True)).double(), series())
    assert engine.ladder.rung == Rung.UNFOLDED
    assert not engine.folding.blocks.replaced


def test_weights_that_are_computed_or_frozen():
    model = Layers("gru", batch_first=True).double().eval()
    torch.nn.utils.parametrizations.weight_norm(model.rnn, "weight_hh_l0")
    model.rnn.weight_ih_l0.requires_grad_(False)
    model.rnn.weight_ih_l0.grad = None
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    x, v = series(), torch.ones(B, 14, dtype=torch.float64)
    got = Engine(model).run(x, v)
    assert set(got.per_parameter) == names
    assert set(got.routes.values()) == {"rule"}
    assert_norms(got.per_parameter, truth(model, (x,), v).norms, 1e-10, 0)


def test_outputs_changed_in_place_and_layers_called_twice():
    def twice(m, x):
        x = x if m.rnn.batch_first else x.transpose(0, 1)
        out, ends = m.rnn(x)
        out, _ = m.rnn(out.relu_(), ends)
        out = m.head(out.mul_(2))
        return (out if m.rnn.batch_first else out.transpose(0, 1)).flatten(1)

    for batch_first in (False, True):
        rnn = nn.LSTM(IN, IN, batch_first=batch_first)
        engine = holds(Written(twice, rnn=rnn, head=nn.Linear(IN, 2)).double(), series())
        assert engine.folding.blocks.replaced == {"recurrent": 2}


def test_one_sample_alone():
    model, x = Layers("lstm").eval(), series(torch.float32)[:1]
    v = torch.ones(1, 15)
    got = fastlr.per_sample_grad_sq_norms(model, x, v)
    assert_close(got, truth(model, (x,), v).total, rtol=1e-5, atol=0)


@mark.parametrize("dtype", [torch.float32, torch.float64])
@mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells(cell, dtype):
    def unrolled(m, x):
        state = None
        for step in x.unbind(1):
            state = m.cell(step, state)
        return m.head(state[0] if isinstance(state, tuple) else state)

    model = Written(unrolled, cell=cell(IN, H), head=nn.Linear(H, 2)).to(dtype)
    holds(model, series(dtype), rtol=1e-10 if dtype == torch.float64 else 1e-4)


def test_low_precision():
    model = Layers("lstm", batch_first=True).eval()
    x = series(torch.float32)
    want = truth(model, (x,), torch.ones(B, 15)).total
    with torch.autocast("cpu", torch.bfloat16):
        got = fastlr.per_sample_grad_sq_norms(model, x, torch.ones(B, 15))
    assert_close(got, want, rtol=0.1, atol=0)


# -- the node and its rule
# -----------------------------------------------------------------------------------------------

FUNCTIONS = dict(zip(KINDS, (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), strict=True))


def node_inputs(kind, biases=True, count=2, hidden=3):
    """Inputs of one node by role, three steps."""
    gates = {"gru": 3, "tanh": 1, "relu": 1}.get(kind, 4) * hidden
    shapes = {"gates": (3, count, gates), "h0": (count, hidden)}
    shapes |= {"c0": (count, hidden)} if gates == 4 * hidden else {}
    shapes |= {"w_hh": (gates, hidden)} | ({"b_hh": (gates,)} if biases else {})
    generator = seeded()
    draw = {
        role: torch.randn(shape, dtype=torch.float64, generator=generator)
        for role, shape in shapes.items()
    }
    return {role: t.requires_grad_() for role, t in draw.items()}


def scan(kind, gates, *others):
    """Return the outputs of a node: torch's own layer of these gates as its inputs."""
    states, weights = others[: 2 if kind == "lstm" else 1], others[2 if kind == "lstm" else 1 :]
    w_ih = torch.eye(gates.shape[2], dtype=gates.dtype)
    weights = (
        [w_ih, *weights] if len(weights) == 1 else [w_ih, weights[0], 0 * weights[1], weights[1]]
    )
    hx = [state[None] for state in states]
    with torch.no_grad():
        results = FUNCTIONS[kind](
            gates, hx if kind == "lstm" else hx[0], weights, len(weights) == 4, 1, 0.0, *[False] * 3
        )
    return recurrent.Scan.apply(gates, *others, FUNCTIONS[kind], results)


@mark.parametrize("biases", [False, True])
@mark.parametrize("kind", KINDS)
def test_the_node_has_the_derivatives_of_its_values(kind, biases):
    inputs = node_inputs(kind, biases)
    assert torch.autograd.gradcheck(partial(scan, kind), tuple(inputs.values()))


@mark.parametrize("kind", KINDS)
def test_rows_go_through_states_but_not_through_weights(kind):
    """With as many samples as a weight has rows."""
    count = len(node_inputs(kind)["w_hh"])
    inputs = node_inputs(kind, count=count)
    out, *cell = scan(kind, *inputs.values())
    graph = walk(out, {})
    places = {"gates": Regular(1, 1, 1), "h0": Regular(0, 1, 1), "c0": Regular(0, 1, 1)}
    for output, layout in enumerate([Regular(1, 1, 1), Regular(0, 1, 1)][: 1 + len(cell)]):
        for slot, (role, t) in enumerate(inputs.items()):
            got = _through(graph, len(graph.nodes) - 1, layout, output, slot, t.shape)
            assert got == places.get(role)


@mark.parametrize("read", ["outputs", "picked", "cell", "both"])
@mark.parametrize("several", [1, 3])
def test_whichever_results_are_read_of_however_many_rows(read, several):
    """An LSTM over the rows of its inputs; a sample may have several."""

    def forward(m, x):
        out, (hidden, cell) = m.rnn(x.reshape(-1, T, IN))
        chosen = {
            "outputs": out.sum(1),
            # By index: whose rows these are is in the data.
            "picked": out[torch.arange(len(out)), (out[:, 0, 0] > 0) + 2],
            "cell": cell[1],
            "both": hidden[0] * cell[1] + cell[0],
        }[read]
        return m.head(chosen).reshape(len(x), -1)

    x = torch.randn(B, several, T, IN, dtype=torch.float64, generator=seeded())
    rnn = nn.LSTM(IN, H, 2, batch_first=True)
    engine = holds(Written(forward, rnn=rnn, head=nn.Linear(H, 2)).double(), x)
    uses = {name: uses for name, uses in engine.plan.uses.of_name.items() if name.startswith("rnn")}
    assert len(uses) == 8
    kinds = {use.kind for used in uses.values() for use in used}
    assert kinds == {"ScanBackward", "AddmmBackward0"}


def test_weights_that_serve_twice_in_one_layer_and_outside():
    def tied(m, x):
        out, (_, cell) = m.rnn(m.rnn(x)[0])
        again = nn.functional.linear(out, m.rnn.weight_ih_l0, m.rnn.bias_ih_l0)
        return again.flatten(1) + cell.sum(2).mT

    model = Written(tied, rnn=nn.LSTM(IN, IN, batch_first=True)).double()
    model.rnn.weight_hh_l0 = model.rnn.weight_ih_l0
    model.rnn.bias_hh_l0 = model.rnn.bias_ih_l0
    assert len(list(model.parameters())) == 2
    engine = holds(model, series())
    assert engine.folding.blocks.replaced == {"recurrent": 2}


@mark.parametrize("rule", ["missing", "wrong"])
def test_without_a_right_rule_another_way_serves(rule, monkeypatch):
    right = RULES[recurrent.NODE]

    def wrong(site, slots):
        return {
            slot: Dense(2 * factor.sq_norms().sqrt()[:, None])
            for slot, factor in right(site, slots).items()
        }

    monkeypatch.setitem(RULES, recurrent.NODE, wrong)
    if rule == "missing":
        monkeypatch.delitem(RULES, recurrent.NODE)
    model = Written(lambda m, x: m.rnn(x)[0].flatten(1), rnn=nn.LSTM(IN, H, batch_first=True))
    engine = holds(model.double(), series(), route=None)
    assert engine.ladder.rung == (Rung.UNFOLDED if rule == "wrong" else Rung.KERNELS)
    assert engine.plan.route("rnn.weight_hh_l0") == ("rule" if rule == "wrong" else "node")


def test_outputs_whose_samples_lie_apart_have_no_rule():
    """Scan outputs whose samples lie apart have no rule: a row's gradients are of two samples.

    The rows of the last cell states are turned round among the samples.
    """
    inputs = node_inputs("lstm")
    out, cell = scan("lstm", *inputs.values())
    ids = torch.tensor([1, 0])
    slots = [3, 4]
    shapes = {slot: list(inputs.values())[slot].shape for slot in slots}
    layouts = {0: Regular(1, 1, 1), 1: Ragged(0, ids)}
    with torch.no_grad(), refused("not the same", Unsupported):
        RULES[recurrent.NODE](Site(out.grad_fn, (out, cell), layouts, 2, shapes), slots)


def test_names_tell_recurrent_layers():
    assert recurrent.expected(name for name, _ in nn.Sequential(nn.GRU(2, 2)).named_parameters())
    assert not recurrent.expected(name for name, _ in nn.Linear(2, 2).named_parameters())
