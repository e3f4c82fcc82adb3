"""A user's own autograd Functions, whose arguments are tensors and anything else in any order."""

from contextlib import nullcontext

import torch
from exact import holds
from expected import warned
from pytest import mark, param
from single_samples import Written
from torch import nn
from torch.autograd.function import once_differentiable

OTHERS = {"n": None, "i": 3, "s": "text", "l": torch.arange(3), "o": object()}


def product(order, *, early, outputs=1, backward=None):
    """A Function of x, w and b (by letter, with other arguments between): x w^T + b.

    Args:
        order: letters of the arguments.
        early: its context is set up in ``forward``, not by ``setup_context``.
        outputs: 2: beside it 2 x; 3: also, first, one that has no gradient.
        backward: in place of the plain one.
    """
    at = {letter: number for number, letter in enumerate(order)}

    def result(args):
        z = args[at["x"]] @ args[at["w"]].T + args[at["b"]]
        return {1: z, 2: (z, 2 * args[at["x"]]), 3: (z.argmax(1), z, 2 * args[at["x"]])}[outputs]

    def keep(ctx, args, given):
        ctx.save_for_backward(args[at["x"]], args[at["w"]])
        if outputs == 3:
            ctx.mark_non_differentiable(given[0])

    def gradients(ctx, *gs):
        x, w = ctx.saved_tensors
        assert len(ctx.needs_input_grad) == len(order)
        g = gs[1] if outputs == 3 else gs[0]
        more = 2 * gs[-1] if outputs > 1 else torch.zeros_like(x)
        by_letter = {"x": g @ w + more, "w": g.T @ x, "b": g.sum(0)}
        return tuple(by_letter.get(letter) for letter in order)

    def forward_with_context(ctx, *args):
        given = result(args)
        keep(ctx, args, given)
        return given

    if early:
        members = {"forward": forward_with_context}
    else:
        members = {"forward": lambda *args: result(args), "setup_context": keep}
    members["backward"] = backward or gradients
    return type(
        "Product", (torch.autograd.Function,), {n: staticmethod(f) for n, f in members.items()}
    )


class Uses(nn.Module):
    """A Function between layers; without ``before`` it is the first to have parameters."""

    def __init__(self, order, function, before):
        super().__init__()
        self.before = nn.Linear(4, 4) if before else nn.Identity()
        self.w = nn.Parameter(torch.randn(5, 4))
        self.b = nn.Parameter(torch.randn(5))
        self.after = nn.Linear(5, 3)
        self.order, self.functions = order, [function]

    def forward(self, x):
        values = {"x": self.before(x), "w": self.w, "b": self.b, **OTHERS}
        given = self.functions[0].apply(*[values[letter] for letter in self.order])
        outputs = given if isinstance(given, tuple) else (given,)
        z = next(t for t in outputs if t.is_floating_point())
        return self.after(z.tanh())


def held(order, function, before, routes):
    """Require the truth of the norms, and these routes of the Function's own parameters."""
    model = Uses(order, function, before).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    plan = holds(model, x, route=None).plan
    assert {plan.route("w"), plan.route("b")} == routes


@mark.parametrize("order", ["xwb", "nxwb", "xiwb", "sbxnw", "wlxb", "oibsnwlx"])
@mark.parametrize(
    "early, before",
    [(True, True), (False, False), *(param(e, not e, marks=mark.long) for e in (True, False))],
)
def test_arguments_that_are_no_tensors_have_no_slot(order, early, before):
    for outputs in (1, 2, 3):
        held(order, product(order, early=early, outputs=outputs), before, {"node"})


@mark.parametrize("before", ["nothing", "frozen", "trained"])
@mark.parametrize("outputs", [1, 2, 3])
def test_a_function_gives_the_output(before, outputs):
    def forward(m, x):
        given = function.apply(m.first(x), m.w, m.b)
        return given if outputs == 1 else given[outputs - 2]

    function = product("xwb", early=True, outputs=outputs)
    first = nn.Identity() if before == "nothing" else nn.Linear(4, 4)
    first.requires_grad_(before == "trained")
    parts = {"w": nn.Parameter(torch.randn(5, 4)), "b": nn.Parameter(torch.randn(5))}
    model = Written(forward, first=first, **parts).double()
    holds(model, torch.randn(6, 4, dtype=torch.float64), route=None)


def test_outputs_without_a_gradient_get_zeros():
    def backward(ctx, g, more):
        x, w = ctx.saved_tensors
        assert g.shape == (len(x), 5)
        assert more.shape == x.shape
        return None, g @ w + 2 * more, g.T @ x, g.sum(0)

    held(
        "nxwb",
        product("nxwb", early=True, outputs=2, backward=once_differentiable(backward)),
        True,
        {"node"},
    )


def test_a_formula_that_fails_by_itself_leaves_the_loop():
    def backward(ctx, chosen, g, more):
        x, w = ctx.saved_tensors
        # Autograd's engine knows the shape of an output that has no gradient.
        assert chosen.shape == g.shape[:1]
        return None, g @ w + 2 * more, g.T @ x, g.sum(0)

    with warned("formula of ProductBackward fails by itself"):
        held("nxwb", product("nxwb", early=True, outputs=3, backward=backward), True, {"loop"})


class TripledInPlace(torch.autograd.Function):
    """Three times its argument; its backward pass writes to the gradient that it is given."""

    @staticmethod
    def forward(ctx, x):  # noqa: D102
        return 3 * x

    @staticmethod
    def backward(ctx, g):  # noqa: D102
        return g.mul_(3)


@mark.parametrize("first", ["written", "linear"])
def test_a_gradient_that_is_written_to_is_not_taken_for_what_it_was(first):
    """Autograd hands one tensor to both parts of a sum, whose last is first in a backward pass.

    What is kept of the linear layer until others like it have come has changed by then.
    """
    parts = {
        "written": lambda m, h: TripledInPlace.apply(m.one(h)),
        "linear": lambda m, h: m.other(h),
    }
    order = sorted(parts, key=lambda name: name != first)

    def forward(m, x):
        h = m.first(x).tanh()
        return m.last(sum(parts[name](m, h) for name in order))

    layers = {"first": (4, 8), "one": (8, 8), "other": (8, 8), "last": (8, 3)}
    model = Written(forward, **{name: nn.Linear(*sizes) for name, sizes in layers.items()}).double()
    is_changed = first == "written"
    with warned("refutes the norms") if is_changed else nullcontext():
        holds(model, torch.randn(6, 3, 4, dtype=torch.float64), route=None)


class Adjoint(torch.autograd.Function):
    """Euler steps whose gradients are those of the steps backward in time.

    torchdiffeq's ``odeint_adjoint`` takes them so.
    """

    @staticmethod
    def forward(ctx, field, steps, y, *parameters):  # noqa: D102
        ctx.field, ctx.steps = field, steps
        ys = [y]
        for _ in range(steps):
            ys.append(ys[-1] + field(ys[-1]) / steps)
        ctx.save_for_backward(*ys, *parameters)
        return ys[-1]

    @staticmethod
    def backward(ctx, g):  # noqa: D102
        ys = ctx.saved_tensors[: ctx.steps]
        parameters = ctx.saved_tensors[ctx.steps + 1 :]
        sums = [torch.zeros_like(p) for p in parameters]
        for y in reversed(ys):
            with torch.enable_grad():
                y = y.detach().requires_grad_()
                moved = ctx.field(y) / ctx.steps
            of_y, *of_parameters = torch.autograd.grad(moved, (y, *parameters), g)
            g = g + of_y
            sums = [a + b for a, b in zip(sums, of_parameters, strict=True)]
        return None, None, g, *sums


def test_an_adjoint_is_measured_without_the_loop():
    """A small neural differential equation."""
    model = Written(
        lambda m, x: m.last(Adjoint.apply(m.field, 5, m.first(x), *m.field.parameters())),
        first=nn.Linear(4, 4),
        last=nn.Linear(4, 3),
        field=nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)),
    )
    engine = holds(model.double(), torch.randn(5, 4, dtype=torch.float64), route=None)
    routes = {name: engine.plan.route(name) for name in engine.parameters}
    assert {routes[name] for name in routes if name.startswith("field")} == {"node"}
    assert {routes[name] for name in routes if not name.startswith("field")} == {"rule"}
