"""Inputs that all samples share or a pass changes, and outputs that are of all samples."""

import copy
import threading
import warnings
from types import SimpleNamespace

import torch
from expected import refused, warned
from pytest import mark
from single_samples import Written, truth
from torch import nn

import fastlr
from fastlr.errors import InteractionError

X, Y, FEW = torch.randn(8, 4), torch.randn(8, 6), torch.randn(5, 6)


def towers(forward):
    return Written(forward, f=nn.Linear(4, 3), g=nn.Linear(6, 3)).eval()


def notes(forward, x, **options):
    return fastlr.support_report(towers(forward), x, **options).notes


def context(m, x, y):
    return m.f(x) + m.g(y).mean(0)


def logits(m, x, y):
    return m.f(x) @ m.g(y).T


def clip(m, x, y):
    z = logits(m, x, y)
    return {"logits_per_image": z, "logits_per_text": z.T}


@mark.parametrize("forward", [context, logits])
def test_an_input_of_another_size_is_shared(forward):
    said = ("input 1 [5, 6] is shared by all samples; values hold for this one alone",)
    assert notes(forward, (X, FEW)) == said
    named = notes(forward, {"x": X, "y": FEW})
    assert named == (said[0].replace("input 1", "input y"),)


@mark.parametrize("forward", [context, logits])
@mark.parametrize("n", [2, 8])
def test_an_input_of_as_many_rows_is_shared_where_each_output_is_of_all_of_them(forward, n):
    model, x = towers(forward), (X[:n], Y[:n])
    for _ in range(2):  # checked, and known
        (note,) = fastlr.support_report(model, x).notes
        assert note.startswith(f"input 1 [{n}, 6] is shared by all samples, though it has as many")
        assert "CLIP's logits_per_image" in note


@mark.parametrize(
    ("output", "shared"), [("logits_per_image", "input y"), ("logits_per_text", "input x")]
)
def test_of_clip_it_is_the_other_kind_of_input(output, shared):
    (note,) = notes(clip, {"x": X, "y": Y}, output=output)
    assert note.startswith(shared)


def test_inputs_that_carry_samples_have_no_note():
    assert notes(lambda m, x, y: m.f(x) + m.g(y), (X, Y)) == ()
    assert notes(lambda m, x: m.g(m.f(x).repeat(1, 2)), X) == ()


def test_products_of_each_sample_with_every_other_are_named():
    with refused(r"of whom it has an output each, as in f\(x\) @ g\(x\)\.T", InteractionError):
        notes(lambda m, x: m.f(x) @ m.f(x.flip(1)).T, X)
    with refused("on the others. Make", InteractionError):
        notes(lambda m, x: m.f(x) - m.f(x).mean(0), X)


def memory(m, x, y):
    return torch.softmax(m.f(x) @ m.g(y).T, 1) @ m.g(y)


@mark.parametrize(
    "measure",
    [
        lambda model: fastlr.per_sample_grad_sq_norms(model, (X, Y), torch.ones(8, 3)),
        lambda model: fastlr.estimate(model, fastlr.TensorInputs((X, Y)), 8),
    ],
)
def test_what_warns_of_it_names_the_line_that_has_measured(measure):
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        measure(towers(memory))
    lines = [w.filename for w in record if "taken as shared" in str(w.message)]
    assert lines == [__file__]


def test_an_estimate_over_rows_that_all_samples_use_warns():
    """Its value depends on the size of the chunks, in which each has other columns."""
    inputs = fastlr.TensorInputs((torch.randn(16, 4), torch.randn(16, 6)))
    with warned("every sample uses all 8 rows of input 1 .* depends on batch_size"):
        fastlr.estimate(towers(logits), inputs, 16, batch_size=8)
    apart = Written(lambda m, x, y: m.f(x) + m.g(y), f=nn.Linear(4, 3), g=nn.Linear(6, 3)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fastlr.estimate(apart, inputs, 16, batch_size=8)


# -- objects among the inputs
# --------------------------------------------------------------------------------------------------


class Held:
    """An object that is neither a tensor nor a container."""

    def __init__(self, rows=None):
        self.rows, self.calls, self.function = rows, 0, lambda: 0


def cached(held, h):
    """As a key-value cache does."""
    held.rows = h.detach() if held.rows is None else torch.cat([held.rows, h.detach()])
    return held.rows[: len(h)]


def counted(held, h):
    held.calls += 1
    return held.calls


def kept(held, h):
    held.lock = threading.Lock()
    return vars(held).setdefault("total", held.rows.sum())


def written(held, h):
    return held.rows.add_(1)


def given(held, h):
    return next(held)


def drawn(held, h):
    return torch.rand((), generator=held)


def with_object(factor):
    return towers(lambda m, x, held: m.f(x) * factor(held, m.f(x)))


ROWS = torch.ones(8, 3)
GENERATOR = torch.Generator().manual_seed(0)


@mark.parametrize(
    ("factor", "held"),
    [
        (cached, Held()),
        (counted, Held()),
        (cached, Held(ROWS)),
        (kept, Held(ROWS)),
        (written, Held(ROWS[:1])),
        (given, iter([3.0, 5.0])),
        (drawn, GENERATOR),
    ],
)
def test_each_pass_has_an_object_among_the_inputs_to_itself(factor, held):
    model, v = with_object(factor), torch.randn(8, 3)
    found = fastlr.per_sample_grad_sq_norms(model, (X, held), v)
    alone = [truth(model, (X[i : i + 1], copy.deepcopy(held)), v[i : i + 1]) for i in range(8)]
    torch.testing.assert_close(found, torch.cat(alone), rtol=1e-5, atol=0)


@mark.parametrize(
    ("factor", "held", "message"),
    [
        (written, Held(ROWS), "fails on parts of the 8 samples"),
        (given, (1.0 for _ in X), r"uses up input held \(generator\): pass a list"),
    ],
)
def test_an_object_that_cannot_be_given_to_each_sample_is_refused(factor, held, message):
    with refused(message):
        fastlr.per_sample_grad_sq_norms(with_object(factor), {"x": X, "held": held}, ROWS)
    assert next(held) if factor is given else held.rows.equal(torch.ones(8, 3))


@mark.parametrize("parts", [{}, {"lock": threading.Lock()}], ids=["copied", "not copied deeply"])
@mark.parametrize("of_module", [True, False])
def test_an_object_among_the_inputs_may_hold_parts_of_the_model(of_module, parts):
    """The parameters are used in the model, too."""

    def forward(m, x, held):
        h = m.f(x).tanh()
        return h + (held.part(x) if of_module else nn.functional.linear(x, held.part))

    model = towers(forward).double()
    held = SimpleNamespace(part=model.f if of_module else model.f.weight, **parts)
    x, v = X.double(), torch.randn(8, 3).double()
    want = []
    for i in range(8):
        z = model(x[i : i + 1], held)
        gradients = torch.autograd.grad(z, list(model.f.parameters()), v[i : i + 1])
        want.append(sum(g.square().sum() for g in gradients))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = fastlr.per_sample_grad_sq_norms(model, (x, held), v)
    torch.testing.assert_close(found, torch.stack(want), rtol=1e-12, atol=0)


def test_an_object_that_cannot_be_copied_deeply_is_left_as_it_was():
    model, v = with_object(counted), torch.randn(8, 3)
    locked, plain = Held(), Held()
    locked.lock = threading.Lock()
    found, want = (fastlr.per_sample_grad_sq_norms(model, (X, held), v) for held in (locked, plain))
    torch.testing.assert_close(found, want)
    assert locked.calls == plain.calls == 0
