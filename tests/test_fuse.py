"""The folded path: its node's gradients, what is folded and what is left, and the norms of the original parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from folding import check, randomise
from torch import Tensor, nn

import fastlr
from bench import cases
from fastlr.ghost import fuse
from fastlr.ghost.agreement import same_output
from fastlr.ghost.api import engine_for
from fastlr.ghost.folded import FoldedConv
from fastlr.reference.folded import ACTIVATIONS


class Net(nn.Module):
    """Convolution, batch norm, and a forward pass of the test's own."""

    def __init__(self, forward: Callable[[Net, Tensor], Tensor], **options: object) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3, padding=1, **options)  # type: ignore[arg-type]
        self.bn = nn.BatchNorm2d(6)
        self.other = nn.Conv2d(6, 5, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(5)
        self.how = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x).flatten(1)


# -- the node -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("frozen", [(), ("weight",), ("gamma", "beta"), ("x",), ("weight", "bias", "gamma", "beta")])
@pytest.mark.parametrize("residual", [False, True])
def test_its_gradients_are_right(act: str, frozen: tuple[str, ...], residual: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    shapes = {"x": (2, 4, 5, 6), "weight": (6, 2, 3, 2), "bias": (6,), "gamma": (6,), "beta": (6,)}
    given = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(name not in frozen)
        for name, shape in shapes.items()
    }
    mean, var = torch.randn(6, generator=generator, dtype=torch.float64), torch.rand(6, dtype=torch.float64) + 0.5
    options = ((2, 1), (1, 1), (1, 2), 2)
    rest = (mean, var, 1e-3, act, torch.float64, options)
    x, weight, bias, gamma, beta = given.values()
    pre = F.batch_norm(F.conv2d(x, weight, bias, *options), mean, var, gamma, beta, False, 0.0, 1e-3)
    if residual:
        given["residual"] = torch.randn(pre.shape, generator=generator, dtype=torch.float64).requires_grad_()
    got = FoldedConv.apply(*given.values(), *[None] * (not residual), *rest)
    want = ACTIVATIONS[act](pre + given["residual"] if residual else pre)
    torch.testing.assert_close(got, want)
    wanted = [t for t in given.values() if t.requires_grad]
    v = torch.randn(want.shape, generator=generator, dtype=torch.float64)
    for a, b in zip(torch.autograd.grad(got, wanted, v), torch.autograd.grad(want, wanted, v), strict=True):
        torch.testing.assert_close(a, b)


# -- what is folded -----------------------------------------------------------------------------------------------------

BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "bias_and_stride": lambda: nn.Sequential(nn.Conv2d(4, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten()),
    "no_affine": lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, affine=False), nn.SiLU(), nn.Flatten()),
    "depthwise": lambda: nn.Sequential(
        nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False), nn.BatchNorm2d(4), nn.Hardswish(inplace=True), nn.Flatten()
    ),
    "depthwise_5x5": lambda: nn.Sequential(
        nn.Conv2d(4, 4, 5, stride=2, padding=2, groups=4), nn.BatchNorm2d(4), nn.ReLU6(), nn.Flatten()
    ),
    "grouped": lambda: nn.Sequential(nn.Conv2d(4, 6, (3, 1), groups=2), nn.BatchNorm2d(6), nn.GELU(), nn.Flatten()),
    "dilated": lambda: nn.Sequential(
        nn.Conv2d(4, 6, 3, dilation=2, padding=(1, 2)), nn.BatchNorm2d(6), nn.GELU("tanh"), nn.Flatten()
    ),
    "no_activation": lambda: nn.Sequential(nn.Conv2d(4, 6, 1), nn.BatchNorm2d(6), nn.Flatten()),
    "another_activation": lambda: nn.Sequential(nn.Conv2d(4, 6, 1), nn.BatchNorm2d(6), nn.Tanh(), nn.Flatten()),
    "few_positions_many_channels": lambda: nn.Sequential(
        nn.Conv2d(4, 40, 3, 3), nn.BatchNorm2d(40), nn.ReLU(), nn.Conv2d(40, 50, 3, padding=1), nn.BatchNorm2d(50),
        nn.Flatten(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_folded(name: str) -> None:
    model = BLOCKS[name]()
    check(model, sum(isinstance(m, nn.BatchNorm2d) for m in model))


@pytest.mark.parametrize("axes", [1, 3])
def test_other_dimensions(axes: int) -> None:
    convolution, norm = getattr(nn, f"Conv{axes}d"), getattr(nn, f"BatchNorm{axes}d")
    x = torch.randn(3, 2, *[6, 5, 4][:axes], dtype=torch.float64)
    check(nn.Sequential(convolution(2, 5, 3, padding=1), norm(5), nn.ReLU(), nn.Flatten()), 1, x)


def test_frozen_parts() -> None:
    for frozen in ("0.weight", "1.weight", "1.bias", "0.bias"):
        model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 1), nn.Flatten())
        model.get_parameter(frozen).requires_grad_(False)
        check(model, 1, why="no batch norm follows")


def test_functional_calls_and_residuals() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        y = torch.relu(F.batch_norm(net.conv(x), net.bn.running_mean, net.bn.running_var, net.bn.weight, net.bn.bias))
        z = net.bn2(net.other(y))
        z += y[:, :5]
        return z.relu_()

    folding = check(Net(forward), 2)
    assert folding.folded == {"conv.weight": "relu", "other.weight": "add, relu"}


def twice(x: Tensor) -> Tensor:
    """Of the shape that the convolution gives."""
    return x.repeat(1, 2, 1, 1)[:, :6]


ADDITIONS: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "on_the_left": lambda net, x: F.silu(net.bn(net.conv(x)) + twice(x)),
    "on_the_right": lambda net, x: F.hardswish(twice(x) + net.bn(net.conv(x))),
    "no_activation": lambda net, x: torch.add(net.bn(net.conv(x)), twice(x)),
    "two_blocks": lambda net, x: F.relu(net.bn(net.conv(x)).add_(twice(net.bn2(net.other(twice(x)))))),
    "broadcast": lambda net, x: F.relu(net.bn(net.conv(x)) + x[:, :1]),
    "scaled": lambda net, x: F.relu(torch.add(net.bn(net.conv(x)), x[:, :1], alpha=2.0)),
    "a_number": lambda net, x: F.relu(net.bn(net.conv(x)) + 1.0),
    "itself": lambda net, x: (lambda y: y + y)(net.bn(net.conv(x)) * 1.0),
}


@pytest.mark.parametrize("name", ADDITIONS)
def test_additions(name: str) -> None:
    folded = {"two_blocks": 2}.get(name, 1)
    folding = check(Net(ADDITIONS[name]), folded)
    added = name in ("on_the_left", "on_the_right", "no_activation", "two_blocks")
    assert folding.folded["conv.weight"].startswith("add") == added


def test_a_sum_of_two_blocks() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Sequential(nn.Conv2d(4, 6, 3, 2, bias=False), nn.BatchNorm2d(6)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            main, short = self.a(x), self.b(x)
            main += short
            return F.relu(main).flatten(1)

    assert check(Residual(), 2).folded == {"a.0.weight": "add, relu", "b.0.weight": "none"}


def test_residual_changed_afterwards() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        other = x.repeat(1, 2, 1, 1)[:, :6].clone()
        y = net.bn(net.conv(x)) + other
        other.mul_(2.0)
        return y * other

    check(Net(forward), 0, why="what is added was changed")


# -- what is not --------------------------------------------------------------------------------------------------------


def both_used(net: Net, x: Tensor) -> Tensor:
    """The convolution's result also goes elsewhere."""
    y = net.conv(x)
    return net.bn(y) + y


def before_activation_used(net: Net, x: Tensor) -> Tensor:
    y = net.bn(net.conv(x))
    return torch.relu(y) + y


def reused(net: Net, x: Tensor) -> Tensor:
    return torch.cat([net.bn(net.conv(x)), net.conv(x.flip(-1))], 1)


def norm_reused(net: Net, x: Tensor) -> Tensor:
    y = F.relu(net.bn(net.conv(x)))
    return net.bn(F.conv2d(y, net.other.weight.new_ones(6, 6, 1, 1))) + net.bn2(net.other(y)).sum(1, keepdim=True)


def input_changed(net: Net, x: Tensor) -> Tensor:
    x = x * 2
    y = net.conv(x)
    x.mul_(0.5)
    return net.bn(y) * x[:, :1]


NOT_FOLDED = {
    "both_used": (both_used, 0, "something else uses"),
    "before_activation_used": (before_activation_used, 0, "something else uses"),
    "reused": (reused, 0, "more than once"),
    "norm_reused": (norm_reused, 2, ""),
}


@pytest.mark.parametrize("name", NOT_FOLDED)
def test_blocks_that_must_stay(name: str) -> None:
    forward, folded, why = NOT_FOLDED[name]
    check(Net(forward), folded, why=why)


def test_changed_input() -> None:
    net = Net(input_changed)
    net.conv.requires_grad_(False)  # with a trainable weight autograd itself refuses
    check(net, 0, why="changed in place")


def test_in_place_activation_is_seen_by_all() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        y = net.bn(net.conv(x))
        F.relu_(y)
        return net.bn2(net.other(y)).abs() + y[:, :5]

    check(Net(forward), 2)


def test_convolution_without_gradient_is_left() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = net.conv(x)
        return net.bn2(net.other(net.bn(y)))

    net = Net(forward)
    net.conv.requires_grad_(False)
    check(net, 1)


def test_batch_norm_outside_the_gradient_is_left() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        y = net.conv(x)
        with torch.no_grad():
            seen = net.bn(y)
        return y * seen

    net = Net(forward)
    net.bn.requires_grad_(False)
    check(net, 0, why="something else uses")


def test_a_hook_that_keeps_the_result_gets_the_result() -> None:
    kept: list[Tensor] = []
    net = Net(lambda net, x: net.bn2(net.other(F.relu(net.bn(net.conv(x))))))
    net.conv.register_forward_hook(lambda module, inputs, result: kept.append(result))
    check(net, 2)
    x = torch.randn(3, 4, 7, 6, dtype=torch.float64)
    kept.clear()
    fastlr.per_sample_grad_sq_norms(net, x, torch.ones(3, 5 * 7 * 6, dtype=torch.float64))
    with torch.no_grad():
        torch.testing.assert_close(kept[0] * 1.0, F.conv2d(x, net.conv.weight, net.conv.bias, padding=1))


def test_scripted_module_gets_a_real_tensor() -> None:
    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn = nn.Conv2d(4, 6, 1), nn.BatchNorm2d(6)
            self.rest = torch.jit.script(nn.Sequential(nn.ReLU(), nn.Flatten()))

        def forward(self, x: Tensor) -> Tensor:
            return self.rest(self.bn(self.conv(x)))

    model = Scripted()
    x = torch.randn(3, 4, 5, 5, dtype=torch.float64)
    case = cases.Case(randomise(model), x)
    v = cases.cotangent_for(case)
    truth = cases.loop_norms(case, v)
    got = fastlr.per_sample_grad_sq_norms(model, x, v, per_parameter=True)
    for name, want in truth.items():
        torch.testing.assert_close(got[name], want, rtol=1e-10, atol=1e-12)


def test_compiled_part_is_folded_without_a_word() -> None:
    part = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(nn.Sequential(torch.compile(part, backend="eager"), nn.Flatten(), nn.Linear(6 * 20, 3)), 1)


def test_samples_of_several_images_run_unfolded() -> None:
    class Video(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            frames = self.net(x.flatten(0, 1))
            return frames.mean((2, 3)).view(len(x), -1)

    check(Video(), 0, torch.randn(3, 4, 2, 5, 5, dtype=torch.float64), why="several images")


def test_train_mode_is_refused_then_eval_folds() -> None:
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten())
    x = torch.randn(3, 4, 7, 6)
    with pytest.raises(fastlr.errors.InteractionError):
        fastlr.per_sample_grad_sq_norms(model, x, torch.ones(3, 120))
    check(model, 1)


def test_a_wrong_fold_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect in the folded backward pass is found by the proof, and the model runs as it is."""
    right = FoldedConv.moments

    def wrong(ctx: object, grad: Tensor) -> tuple:
        through, gx, sq, inner, sums = right(ctx, grad)
        return through, gx, sq * 1.001, inner, sums

    monkeypatch.setattr(FoldedConv, "moments", wrong)
    model = nn.Sequential(
        nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 1), nn.BatchNorm2d(5), nn.Flatten()
    )
    check(model, 0, why="differ from the exact")


def test_a_wrong_forward_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = FoldedConv.apply
    monkeypatch.setattr(FoldedConv, "apply", lambda *args: apply(*args) * 1.0001)
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten())
    check(model, 0, why="gives another output")


def test_autocast_and_float32_agree_with_the_unfolded_model() -> None:
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.mobilenet_v3_small(num_classes=3).eval()
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.momentum = None
    model.train()(torch.randn(16, 3, 64, 64))
    model.eval()
    x, v = torch.randn(4, 3, 64, 64), torch.randn(4, 3)
    with fuse.unfolded():
        want = fastlr.per_sample_grad_sq_norms(model, x, v)
    torch.testing.assert_close(fastlr.per_sample_grad_sq_norms(model, x, v), want, rtol=1e-4, atol=0)
    assert engine_for(model, None, 0, 0).folding.folded
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = fastlr.per_sample_grad_sq_norms(model, x, v)
    torch.testing.assert_close(low, want, rtol=0.1, atol=0)
    assert engine_for(model, None, 0, 0).folding.folded


def test_few_positions_keep_the_unfolded_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks whose norms come from Gram matrices keep the unfolded product of the forward pass, and are right."""
    from fastlr.ghost import folded

    taken = []
    plain = folded.conv_and_product
    monkeypatch.setattr(folded, "conv_and_product", lambda *args: taken.append(args[1].shape) or plain(*args))
    check(resnet_block(), 2, torch.randn(3, 24, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    assert taken and set(taken) == {torch.Size((48, 24, 3, 3)), torch.Size((48, 48, 3, 3))}


def resnet_block() -> nn.Module:
    """Two convolutions on 4 x 4 positions with a residual; its own input is 24 channels."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(24, 48, 3, padding=1, bias=False), nn.Conv2d(48, 48, 3, padding=1)
            self.norms = nn.ModuleList([nn.BatchNorm2d(48), nn.BatchNorm2d(48)])

        def forward(self, x: Tensor) -> Tensor:
            h = self.norms[0](self.one(x)).relu()
            return (self.norms[1](self.two(h)) + h).relu().flatten(1)

    return Block()


def test_the_weights_may_change_between_calls() -> None:
    model = randomise(nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten()))
    x, v = torch.randn(3, 4, 7, 6, dtype=torch.float64), torch.randn(3, 120, dtype=torch.float64)
    for seed in range(3):
        randomise(model, seed)
        got = fastlr.per_sample_grad_sq_norms(model, x, v)
        truth = torch.stack(list(cases.loop_norms(cases.Case(model, x), v).values())).sum(0)
        torch.testing.assert_close(got, truth, rtol=1e-10, atol=0)


def test_the_report_names_what_is_folded_and_what_is_not() -> None:
    model = nn.Sequential(
        nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 1), nn.ReLU(), nn.Flatten()
    ).eval()
    report = fastlr.support_report(model, torch.randn(4, 4, 7, 6))
    assert report.folded == {"0.weight": "relu"} and set(report.unfolded) == {"3.weight"}
    text = str(report)
    assert "1 convolutions run folded" in text and "not folded (no batch norm follows): 3.weight" in text


def test_logits_near_zero_in_low_precision_do_not_forbid_folding() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 64, 3, 2), nn.BatchNorm2d(64), nn.SiLU(), nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64), nn.SiLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 3),
    ).eval()  # fmt: skip
    x, v = torch.randn(1, 4, 17, 17) + 0.01 * torch.randn(8, 4, 17, 17), torch.randn(8, 3)
    with torch.no_grad():  # outputs that cancel to almost nothing
        model[-1].weight.mul_(100.0)
        model[-1].bias.copy_(model[-1].bias - model(x).mean(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        own, folded = model(x), fuse.Folding().run(dict(model.named_parameters()), lambda: model(x))
        assert bool(((folded - own).abs().amax(1) > 0.1 * own.abs().amax(1)).any()), "the case is not one"
        assert same_output(model, x, folded, None) and not same_output(model, x, folded + 0.5, None)
        fastlr.per_sample_grad_sq_norms(model, x, v)
    folding = engine_for(model, None, 0, 0).folding
    assert len(folding.folded) == 2 and not folding.disabled
