"""The folded path: its node's gradients, what is folded or left, and the original norms."""

from contextlib import nullcontext

import models_zoo as zoo
import torch
import torch.nn.functional as F
from exact import assert_norms, assert_same_function, seeded
from folding import check, randomise
from pytest import mark, raises
from single_samples import Written
from torch import nn
from torch.testing import assert_close

import fastlr
from bench import cases
from fastlr import ops
from fastlr.ghost.api import engine_for
from fastlr.ghost.fusion import mode as fuse
from fastlr.ghost.fusion.conv_bn import BlockOptions, BlockTensors, FoldedConv
from fastlr.ops.activations import ACTIVATIONS
from fastlr.ops.geometry import ConvGeometry


def net_of(forward, **options):
    """Convolution, batch norm, and a forward pass of the test's own."""
    parts = {"conv": nn.Conv2d(4, 6, 3, padding=1, **options), "bn": nn.BatchNorm2d(6)}
    parts |= {"other": nn.Conv2d(6, 5, 1, bias=False), "bn2": nn.BatchNorm2d(5)}
    return Written(lambda net, x: forward(net, x).flatten(1), **parts)


def block(conv=None, act=None, **options):
    """A convolution of [B, 4, H, W], batch norm and activation."""
    conv = conv or nn.Conv2d(4, 6, 3)
    norm = nn.BatchNorm2d(conv.out_channels, **options)  # type: ignore[arg-type]
    return nn.Sequential(conv, norm, act or nn.ReLU(), nn.Flatten())


# -- the node
# --------------------------------------------------------------------------------------------------


@mark.parametrize("act", ACTIVATIONS)
@mark.parametrize(
    "frozen", [(), ("weight",), ("gamma", "beta"), ("x",), ("weight", "bias", "gamma", "beta")]
)
@mark.parametrize("residual", [False, True])
def test_its_gradients_are_right(act, frozen, residual):
    generator = seeded(2)
    shapes = {"x": (2, 4, 5, 6), "weight": (6, 2, 3, 2), "bias": (6,), "gamma": (6,), "beta": (6,)}
    given = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(
            name not in frozen
        )
        for name, shape in shapes.items()
    }
    mean = torch.randn(6, generator=generator, dtype=torch.float64)
    var = torch.rand(6, dtype=torch.float64) + 0.5
    options = ((2, 1), (1, 1), (1, 2), 2)
    how = BlockOptions("weight", 1e-3, act, torch.float64, ConvGeometry(*options[:3], groups=2))
    x, weight, bias, gamma, beta = given.values()
    pre = F.batch_norm(
        F.conv2d(x, weight, bias, *options), mean, var, gamma, beta, False, 0.0, 1e-3
    )
    if residual:
        given["residual"] = torch.randn(
            pre.shape, generator=generator, dtype=torch.float64
        ).requires_grad_()
    tensors = BlockTensors(**{"residual": None, **given}, mean=mean, var=var)
    got, *_ = FoldedConv.apply(how, *tensors)
    want = ACTIVATIONS[act](pre + given["residual"] if residual else pre)
    assert_same_function(got, want, [t for t in given.values() if t.requires_grad])


# -- what is folded
# --------------------------------------------------------------------------------------------------

BLOCKS = {
    "bias_and_stride": lambda: block(nn.Conv2d(4, 6, 3, 2, 1)),
    "no_affine": lambda: block(act=nn.SiLU(), affine=False),
    "depthwise": lambda: block(
        nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False), nn.Hardswish(inplace=True)
    ),
    "depthwise_5x5": lambda: block(nn.Conv2d(4, 4, 5, stride=2, padding=2, groups=4), nn.ReLU6()),
    "grouped": lambda: block(nn.Conv2d(4, 6, (3, 1), groups=2), nn.GELU()),
    "dilated": lambda: block(nn.Conv2d(4, 6, 3, dilation=2, padding=(1, 2)), nn.GELU("tanh")),
    "no_activation": lambda: block(nn.Conv2d(4, 6, 1), nn.Identity()),
    "another_activation": lambda: block(nn.Conv2d(4, 6, 1), nn.Tanh()),
    "few_positions_many_channels": lambda: nn.Sequential(
        nn.Conv2d(4, 40, 3, 3),
        nn.BatchNorm2d(40),
        nn.ReLU(),
        nn.Conv2d(40, 50, 3, padding=1),
        nn.BatchNorm2d(50),
        nn.Flatten(),
    ),
}


@mark.parametrize("name", BLOCKS)
def test_blocks_are_folded(name):
    model = BLOCKS[name]()
    check(model, sum(isinstance(m, nn.BatchNorm2d) for m in model))


@mark.parametrize("axes", [1, 3])
def test_other_dimensions(axes):
    convolution = getattr(nn, f"Conv{axes}d")
    norm = getattr(nn, f"BatchNorm{axes}d")
    x = torch.randn(3, 2, *[6, 5, 4][:axes], dtype=torch.float64)
    check(nn.Sequential(convolution(2, 5, 3, padding=1), norm(5), nn.ReLU(), nn.Flatten()), 1, x)


def test_frozen_parts():
    for frozen in ("0.weight", "1.weight", "1.bias", "0.bias"):
        model = nn.Sequential(
            nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 1), nn.Flatten()
        )
        model.get_parameter(frozen).requires_grad_(False)
        check(model, 1, why="no batch norm follows")


def test_functional_calls_and_residuals():
    def forward(net, x):
        y = torch.relu(
            F.batch_norm(
                net.conv(x), net.bn.running_mean, net.bn.running_var, net.bn.weight, net.bn.bias
            )
        )
        z = net.bn2(net.other(y))
        z += y[:, :5]
        return z.relu_()

    blocks = check(net_of(forward), 2)
    assert blocks.folded == {"conv.weight": "relu", "other.weight": "add, relu"}


def twice(x):
    """Of the shape that the convolution gives."""
    return x.repeat(1, 2, 1, 1)[:, :6]


ADDITIONS = {
    "on_the_left": lambda net, x: F.silu(net.bn(net.conv(x)) + twice(x)),
    "on_the_right": lambda net, x: F.hardswish(twice(x) + net.bn(net.conv(x))),
    "no_activation": lambda net, x: torch.add(net.bn(net.conv(x)), twice(x)),
    "two_blocks": lambda net, x: F.relu(
        net.bn(net.conv(x)).add_(twice(net.bn2(net.other(twice(x)))))
    ),
    "broadcast": lambda net, x: F.relu(net.bn(net.conv(x)) + x[:, :1]),
    "scaled": lambda net, x: F.relu(torch.add(net.bn(net.conv(x)), x[:, :1], alpha=2.0)),
    "a_number": lambda net, x: F.relu(net.bn(net.conv(x)) + 1.0),
    "itself": lambda net, x: (lambda y: y + y)(net.bn(net.conv(x)) * 1.0),
}


@mark.parametrize("name", ADDITIONS)
def test_additions(name):
    folded = {"two_blocks": 2}.get(name, 1)
    blocks = check(net_of(ADDITIONS[name]), folded)
    added = name in ("on_the_left", "on_the_right", "no_activation", "two_blocks")
    assert blocks.folded["conv.weight"].startswith("add") == added


def test_a_sum_of_two_blocks():
    def forward(m, x):
        main, short = m.a(x), m.b(x)
        main += short
        return F.relu(main).flatten(1)

    a, b = (nn.Sequential(nn.Conv2d(4, 6, 3, 2, bias=False), nn.BatchNorm2d(6)) for _ in range(2))
    assert check(Written(forward, a=a, b=b), 2).folded == {
        "a.0.weight": "add, relu",
        "b.0.weight": "none",
    }


# -- what is not
# --------------------------------------------------------------------------------------------------


def both_used(net, x):
    """The convolution's result also goes elsewhere."""
    y = net.conv(x)
    return net.bn(y) + y


def before_activation_used(net, x):
    y = net.bn(net.conv(x))
    return torch.relu(y) + y


def reused(net, x):
    return torch.cat([net.bn(net.conv(x)), net.conv(x.flip(-1))], 1)


def norm_reused(net, x):
    y = F.relu(net.bn(net.conv(x)))
    return net.bn(F.conv2d(y, net.other.weight.new_ones(6, 6, 1, 1))) + net.bn2(net.other(y)).sum(
        1, keepdim=True
    )


def input_changed(net, x):
    x = x * 2
    y = net.conv(x)
    x.mul_(0.5)
    return net.bn(y) * x[:, :1]


def residual_changed(net, x):
    other = twice(x).clone()
    y = net.bn(net.conv(x)) + other
    other.mul_(2.0)
    return y * other


def in_place_activation_seen_by_all(net, x):
    y = net.bn(net.conv(x))
    F.relu_(y)
    return net.bn2(net.other(y)).abs() + y[:, :5]


def convolution_without_gradient(net, x):
    with torch.no_grad():
        y = net.conv(x)
    return net.bn2(net.other(net.bn(y)))


def norm_outside_the_gradient(net, x):
    y = net.conv(x)
    with torch.no_grad():
        seen = net.bn(y)
    return y * seen


LEFT = {  # forward pass: (how many are folded, why not the others, what is frozen)
    both_used: (0, "something else uses", None),
    before_activation_used: (0, "something else uses", None),
    reused: (0, "more than once", None),
    norm_reused: (1, "more than once", None),
    input_changed: (
        0,
        "changed in place",
        "conv",
    ),  # with a trainable weight autograd itself refuses
    residual_changed: (0, "what is added was changed", None),
    in_place_activation_seen_by_all: (2, "", None),
    convolution_without_gradient: (1, "", "conv"),
    norm_outside_the_gradient: (0, "", "bn"),
}


@mark.parametrize("forward", LEFT)
def test_what_must_stay_is_left(forward):
    folded, why, frozen = LEFT[forward]
    net = net_of(forward)
    if frozen:
        net.get_submodule(frozen).requires_grad_(False)
    check(net, folded, why=why)


def test_a_hook_that_keeps_the_result_gets_the_result():
    kept = []
    net = net_of(lambda net, x: net.bn2(net.other(F.relu(net.bn(net.conv(x))))))
    net.conv.register_forward_hook(lambda module, inputs, result: kept.append(result))
    check(net, 2)
    x = torch.randn(3, 4, 7, 6, dtype=torch.float64)
    kept.clear()
    fastlr.per_sample_grad_sq_norms(net, x, torch.ones(3, 5 * 7 * 6, dtype=torch.float64))
    with torch.no_grad():
        assert_close(kept[0] * 1.0, F.conv2d(x, net.conv.weight, net.conv.bias, padding=1))


def test_scripted_module_gets_a_real_tensor():
    rest = torch.jit.script(nn.Sequential(nn.ReLU(), nn.Flatten()))
    model = randomise(nn.Sequential(nn.Conv2d(4, 6, 1), nn.BatchNorm2d(6), rest))
    x = torch.randn(3, 4, 5, 5, dtype=torch.float64)
    v = torch.randn(3, 150, dtype=torch.float64)
    got = fastlr.per_sample_grad_sq_norms(model, x, v, per_parameter=True)
    assert_norms(got, cases.loop_norms(cases.Case(model, x), v), 1e-10, 1e-13)


@mark.filterwarnings(
    "error", "ignore:Guards may run slower on Python 3.13.0"
)  # torch's own, from 2.15 on
def test_compiled_part_is_folded_without_a_word():
    part = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
    check(
        nn.Sequential(torch.compile(part, backend="eager"), nn.Flatten(), nn.Linear(6 * 20, 3)), 1
    )


def test_samples_of_several_images_run_unfolded():
    net = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
    video = Written(lambda m, x: m.net(x.flatten(0, 1)).mean((2, 3)).view(len(x), -1), net=net)
    check(video, 0, torch.randn(3, 4, 2, 5, 5, dtype=torch.float64), why="several images")


def test_train_mode_is_refused_then_eval_folds():
    model, x = block(), torch.randn(3, 4, 7, 6)
    with raises(fastlr.errors.InteractionError):
        fastlr.per_sample_grad_sq_norms(model, x, torch.ones(3, 120))
    check(model, 1)


@mark.parametrize("forms", [nullcontext, ops.noting_launches], ids=["as on a CPU", "as on a GPU"])
def test_a_wrong_fold_is_refuted(monkeypatch, forms):
    """A defect in the folded backward pass is found by audits, and the model runs as it is."""
    right = FoldedConv.sq_norms

    def wrong(ctx, *grads):
        at_inputs, norms = right(ctx, *grads)
        return at_inputs, norms | {"weight": norms["weight"] * 1.001}

    monkeypatch.setattr(FoldedConv, "sq_norms", wrong)
    model = nn.Sequential(
        nn.Conv2d(4, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 5, 1),
        nn.BatchNorm2d(5),
        nn.Flatten(),
    )
    with forms():
        check(model, 0, why="is off by")


def test_a_wrong_forward_is_refuted(monkeypatch):
    apply = FoldedConv.apply

    def wrong(*args):
        out, *others = apply(*args)
        return out * 1.0001, *others

    monkeypatch.setattr(FoldedConv, "apply", wrong)
    check(block(), 0, why="gives another output")


def test_autocast_and_float32_agree_with_the_unfolded_model():
    case = zoo.make("mobilenet_thin")
    model, x, v = case.model, case.x, torch.randn(4, 2)
    with fuse.unfolded():
        want = fastlr.per_sample_grad_sq_norms(model, x, v)
    assert_close(fastlr.per_sample_grad_sq_norms(model, x, v), want, rtol=1e-4, atol=0)
    assert engine_for(model).folding.blocks.folded
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = fastlr.per_sample_grad_sq_norms(model, x, v)
    assert_close(low, want, rtol=0.1, atol=0)
    assert engine_for(model).folding.blocks.folded


def test_few_positions_keep_the_unfolded_product(monkeypatch):
    """Blocks whose norms come from Gram matrices keep the forward pass's unfolded product."""
    from fastlr.ghost.fusion import conv_bn as folded

    taken = []
    plain = folded.folded_and_unfolded_convolution
    monkeypatch.setattr(
        folded,
        "folded_and_unfolded_convolution",
        lambda *args: taken.append(args[1].weight.shape) or plain(*args),
    )
    check(resnet_block(), 2, torch.randn(3, 24, 4, 4, dtype=torch.float64, generator=seeded(1)))
    assert taken
    assert set(taken) == {torch.Size((48, 24, 3, 3)), torch.Size((48, 48, 3, 3))}


def resnet_block():
    """Two convolutions on 4 x 4 positions with a residual; its own input is 24 channels."""

    def forward(m, x):
        h = m.norms[0](m.one(x)).relu()
        return (m.norms[1](m.two(h)) + h).relu().flatten(1)

    parts = {
        "one": nn.Conv2d(24, 48, 3, padding=1, bias=False),
        "two": nn.Conv2d(48, 48, 3, padding=1),
    }
    return Written(forward, **parts, norms=nn.ModuleList([nn.BatchNorm2d(48), nn.BatchNorm2d(48)]))


def test_the_weights_may_change_between_calls():
    model = block()
    x = torch.randn(3, 4, 7, 6, dtype=torch.float64)
    v = torch.randn(3, 120, dtype=torch.float64)
    for seed in range(3):
        randomise(model, seed)
        got = fastlr.per_sample_grad_sq_norms(model, x, v)
        assert_close(
            got, sum(cases.loop_norms(cases.Case(model, x), v).values()), rtol=1e-10, atol=0
        )


def test_the_report_names_what_is_folded_and_what_is_not():
    model = nn.Sequential(
        nn.Conv2d(4, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 5, 1),
        nn.ReLU(),
        nn.Flatten(),
    ).eval()
    report = fastlr.support_report(model, torch.randn(4, 4, 7, 6))
    assert report.folded == {"0.weight": "relu"}
    assert set(report.unfolded) == {"3.weight"}
    text = str(report)
    assert "1 convolutions run folded" in text
    assert "not folded (no batch norm follows): 3.weight" in text


def test_logits_near_zero_in_low_precision_do_not_forbid_folding():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 64, 3, 2),
        nn.BatchNorm2d(64),
        nn.SiLU(),
        nn.Conv2d(64, 64, 3),
        nn.BatchNorm2d(64),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 3),
    ).eval()
    x = torch.randn(1, 4, 17, 17) + 0.01 * torch.randn(8, 4, 17, 17)
    v = torch.randn(8, 3)
    with torch.no_grad():  # outputs that cancel to almost nothing
        model[-1].weight.mul_(100.0)
        model[-1].bias.copy_(model[-1].bias - model(x).mean(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        own = model(x)
        folded = fuse.Folding().run(dict(model.named_parameters()), lambda: model(x))
        assert bool(((folded - own).abs().amax(1) > 0.1 * own.abs().amax(1)).any()), (
            "the case is not one"
        )
        fastlr.per_sample_grad_sq_norms(model, x, v)
    blocks = engine_for(model).folding.blocks
    assert len(blocks.folded) == 2
    assert not blocks.disabled
