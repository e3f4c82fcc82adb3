"""Small models for the zoo: convolutions, linear layers, raw parameters, normalisation."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from zoo_registry import (
    B,
    chain,
    conv1d,
    conv2d,
    conv3d,
    each,
    lin,
    r,
    transposed1d,
    transposed2d,
    transposed3d,
    written,
    zoo,
)

from bench.cases import Case

# --------------------------------------------------------------------------------------------------
# convolution
CONVOLUTIONS = {  # name: (layer, input shape)
    "conv1d": (conv1d(4, 6, 3), (4, 9)),
    "conv1d_grouped_strided": (conv1d(4, 6, 3, stride=2, groups=2, padding=1), (4, 9)),
    "conv2d": (conv2d(4, 6, 3, padding=1), (4, 7, 6)),
    "conv2d_no_bias": (conv2d(4, 6, 3, bias=False), (4, 7, 6)),
    "conv2d_pointwise": (conv2d(4, 6, 1), (4, 5, 6)),
    "conv2d_pointwise_strided": (conv2d(4, 6, 1, stride=2), (4, 5, 6)),
    "conv2d_grouped": (conv2d(4, 6, 3, groups=2), (4, 7, 6)),
    "conv2d_depthwise": (conv2d(4, 4, 3, groups=4, padding=1), (4, 7, 6)),
    "conv2d_depthwise_multiplier": (conv2d(4, 12, 3, groups=4, stride=2), (4, 7, 6)),
    "conv2d_dilated_strided": (
        conv2d(4, 6, (3, 2), (2, 1), padding=(2, 1), dilation=(2, 1)),
        (4, 9, 8),
    ),
    "conv2d_stride_drops_rows": (conv2d(4, 6, 3, stride=3, padding=1), (4, 10, 8)),
    "conv2d_same": (conv2d(4, 6, (4, 3), padding="same"), (4, 7, 6)),
    "conv2d_same_dilated": (conv2d(4, 6, (2, 3), padding="same", dilation=3), (4, 7, 6)),
    "conv2d_circular": (conv2d(4, 6, 3, padding=1, padding_mode="circular"), (4, 7, 6)),
    "conv2d_reflect": (conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (4, 7, 6)),
    "conv2d_kernel_is_image": (conv2d(4, 6, (7, 6)), (4, 7, 6)),
    "conv3d": (conv3d(2, 4, 3, padding=1), (2, 4, 5, 4)),
    "conv3d_grouped_strided": (conv3d(2, 4, (1, 3, 2), stride=2, groups=2), (2, 4, 5, 4)),
    "transposed1d": (transposed1d(4, 6, 3, stride=2, padding=1, output_padding=1), (4, 6)),
    "transposed2d": (transposed2d(4, 6, 3, stride=2), (4, 5, 4)),
    "transposed2d_grouped_dilated": (
        transposed2d(4, 6, 3, groups=2, dilation=2, padding=1),
        (4, 5, 4),
    ),
    "transposed3d": (transposed3d(2, 4, 2, stride=2), (2, 3, 3, 2)),
}
for _name, (_layer, _shape) in CONVOLUTIONS.items():  # as the first layer, and behind another one
    chain(_name, lambda layer=_layer, c=_shape[0]: [layer(), nn.Tanh(), nn.Flatten(1)], *_shape)
    _kind = getattr(nn, f"Conv{len(_shape) - 1}d")
    chain(
        f"{_name}_inner",
        lambda layer=_layer, k=_kind, c=_shape[0]: [k(c, c, 1), nn.Tanh(), layer(), nn.Flatten(1)],
        *_shape,
    )


@zoo("channels_last")
def _channels_last():
    model = nn.Sequential(
        nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3, groups=6), nn.BatchNorm2d(6), nn.Flatten()
    )
    x = torch.randn(B, 4, 7, 8).to(memory_format=torch.channels_last)
    return Case(model.eval().to(memory_format=torch.channels_last), x)


written(
    "permuted_image_linear_then_conv",
    lambda m, x: m.conv(m.lin(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)).mean((2, 3)),
    r(B, 4, 7, 8),
    lin=lin(4, 6),
    conv=conv2d(6, 3, 3),
)

# --------------------------------------------------------------------------------------------------
# linear
chain("linear", lambda: [nn.Linear(5, 3)], 5)
chain("mlp", lambda: [nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)], 5)
chain("linear_3d", lambda: [nn.Linear(5, 6, bias=False), nn.GELU(), nn.Linear(6, 3)], 7, 5)
chain("linear_4d", lambda: [nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 3)], 2, 7, 5)
chain("linear_3d_long_gram", lambda: [nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 20)], 3, 40)
chain("prelu", lambda: [nn.Linear(5, 6), nn.PReLU(), nn.Linear(6, 4), nn.PReLU(4)], 5)
chain(
    "prelu_image",
    lambda: [nn.Conv2d(3, 4, 3), nn.PReLU(4), nn.Conv2d(4, 2, 3), nn.Flatten()],
    3,
    6,
    6,
)
chain(
    "inplace_activations",
    lambda: [
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3),
        nn.Hardswish(inplace=True),
        nn.Flatten(),
        nn.Linear(16, 3),
        nn.ELU(inplace=True),
    ],
    3,
    6,
    6,
)
written(
    "inplace_residual", lambda m, x: m.b(m.a(x).relu_()).add_(x), r(B, 5), a=lin(5, 5), b=lin(5, 5)
)
written("bilinear", lambda m, x: m.bil(x, x.tanh()), r(B, 5), bil=partial(nn.Bilinear, 5, 5, 3))
written(
    "reused_linear",
    lambda m, x: m.out(m.a(m.a(m.a(x).tanh()).tanh())),
    r(B, 5),
    a=lin(5, 5),
    out=lin(5, 2),
)
written(
    "reused_conv",
    lambda m, x: m.a(m.a(x).tanh()).mean((2, 3)),
    r(B, 4, 6, 6),
    a=conv2d(4, 4, 3, padding=1),
)
written(
    "reused_at_other_shapes", lambda m, x: m.a(x).sum(1) + m.a(x.mean(1)), r(B, 7, 5), a=lin(5, 3)
)
written(
    "linear_on_a_childs_weight",
    lambda m, x: F.linear(m.a(x).tanh(), m.a.weight.t()),
    r(B, 5),
    a=lin(5, 3),
)
written(
    "functional_calls",
    lambda m, x: F.layer_norm(
        F.linear(F.conv1d(x, m.k, m.kb, padding=1).flatten(1), m.w, m.wb), (6,), m.g
    ),
    r(B, 3, 7),
    k=(4, 3, 3),
    kb=(4,),
    w=(6, 28),
    wb=(6,),
    g=(6,),
)
written(
    "slices_of_one_parameter",
    lambda m, x: F.linear(x, m.w[:3], m.b[:3]) * F.linear(x, m.w[3:6]).tanh(),
    r(B, 5),
    w=(8, 5),
    b=(4,),
)
written(
    "chunks_of_one_parameter",
    lambda m, x: sum(F.linear(x, w).tanh() * (i + 1) for i, w in enumerate(m.w.chunk(3))),
    r(B, 7, 5),
    w=(9, 5),
)
written(
    "weight_times_constant",
    lambda m, x: F.linear(F.linear(x, m.w * 0.3).tanh(), m.v.t() / 2),
    r(B, 5),
    w=(6, 5),
    v=(6, 3),
)
written(
    "weight_masked",
    lambda m, x: F.linear(x, m.w * m.mask),
    r(B, 5),
    w=(6, 5),
    mask=lambda: (torch.rand(6, 5) > 0.5).float(),
)
written(
    "weight_function",
    lambda m, x: F.linear(x.tanh(), m.w.exp() / m.w.exp().sum(1, keepdim=True)),
    r(B, 7, 5),
    w=(6, 5),
)
written("scalar_parameters", lambda m, x: m.a(x) * m.s + m.t, r(B, 5), a=lin(5, 3), s=(), t=(1,))
written(
    "scale_and_shift", lambda m, x: m.a(x) * m.s + m.t, r(B, 6, 5), a=lin(5, 3), s=(6, 1), t=(1, 3)
)
written(
    "scale_twice_broadcast", lambda m, x: (x * m.s + m.s).tanh() * m.p, r(B, 6, 5), s=(5,), p=(6, 1)
)
written(
    "sub_and_div",
    lambda m, x: (m.t - x) / (m.d.square() + 1) + m.e / (x.square() + 1),
    r(B, 6, 5),
    t=(5,),
    d=(6, 5),
    e=(1, 5),
)
written(
    "outer_product_parameters", lambda m, x: x * (m.u * m.v).tanh(), r(B, 6, 5), u=(6, 1), v=(5,)
)
written(
    "where_and_lerp",
    lambda m, x: torch.where(x > 0, m.a, x) + torch.lerp(x, m.b, 0.3),
    r(B, 6, 5),
    a=(6, 5),
    b=(5,),
)
written("matmul_right", lambda m, x: (x @ m.w).tanh() @ m.v, r(B, 7, 5), w=(5, 6), v=(6,))
written("matmul_left", lambda m, x: m.w @ x.tanh(), r(B, 7, 5), w=(6, 7))
written("matvec", lambda m, x: x.tanh() @ m.v, r(B, 5), v=(5,))
written("einsum", lambda m, x: torch.einsum("bthd,hde->bte", x, m.w), r(B, 6, 2, 4), w=(2, 4, 5))
written(
    "einsum_bilinear",
    lambda m, x: torch.einsum("bi,oij,bj->bo", x, m.w, x.tanh()),
    r(B, 5),
    w=(3, 5, 5),
)
written(
    "bmm_heads",
    lambda m, x: torch.bmm(x.transpose(0, 1), m.w).transpose(0, 1),
    r(B, 3, 5),
    w=(3, 5, 4),
)
written(
    "baddbmm_heads",
    lambda m, x: torch.baddbmm(m.b, x.transpose(0, 1), m.w).transpose(0, 1).tanh(),
    r(B, 3, 5),
    w=(3, 5, 4),
    b=(3, 1, 4),
)
written(
    "bmm_expanded_weight",
    lambda m, x: torch.bmm(x, m.w.expand(len(x), -1, -1)),
    r(B, 7, 5),
    w=(1, 5, 4),
)
written(
    "addmm_scaled",
    lambda m, x: torch.addmm(m.b, x, m.w, beta=0.5, alpha=2.0),
    r(B, 5),
    w=(5, 3),
    b=(3,),
)
written(
    "addmv_addcmul",
    lambda m, x: torch.addcmul(m.t, x, m.s, value=0.5),
    r(B, 6, 5),
    t=(5,),
    s=(6, 5),
)
written(
    "raw_parameter_before_and_after",
    lambda m, x: (torch.cat([m.p.expand(len(x), 2, 5), x], 1) + m.t).tanh(),
    r(B, 6, 5),
    p=(2, 5),
    t=(8, 5),
)
written("output_is_a_sum_with_a_parameter", lambda m, x: m.t + x, r(B, 5), t=(5,))
written(
    "output_is_a_view", lambda m, x: m.a(x).view(len(x), 2, 3).transpose(1, 2), r(B, 5), a=lin(5, 6)
)
written(
    "multi_tensor_input",
    lambda m, x, y: m.a(x) * m.b(y),
    each(r(B, 5), r(B, 3)),
    a=lin(5, 4),
    b=lin(3, 4),
)
written(
    "output_selected",
    lambda m, x: {"aux": x.sum(), "z": [m.a(x)]},
    r(B, 5),
    kwargs={"output": lambda out: out["z"][0]},
    a=lin(5, 4),
)
written(
    "shared_input",
    lambda m, x, table: m.a(x) @ table,
    each(r(B, 5), r(6, 3)),
    a=lin(5, 6),
    shared=(1,),
)


# -------------------------------------------------------------------------------------- distances,
# and complex numbers
for _p in (1.0, 1.5, 2.0, 3.0, float("inf")):
    written(
        f"distances_{_p}",
        lambda m, x, p=_p: torch.cdist(m.a(x), m.w, p),
        r(B, 5),
        a=lin(5, 3),
        w=(6, 3),
    )
written(
    "distances_to_many",
    lambda m, x: torch.cdist(m.a(x), m.w).square(),
    r(B, 5),
    a=lin(5, 3),
    w=(30, 3),
)
written(
    "distances_from_points", lambda m, x: torch.cdist(m.w, m.a(x)).T, r(B, 5), a=lin(5, 3), w=(6, 3)
)
for _name, _rows in (("distances_of_rows", 7), ("distances_of_many_rows", 30)):
    written(
        _name, lambda m, x: torch.cdist(m.a(x), m.w).mean(1), r(B, _rows, 5), a=lin(5, 3), w=(6, 3)
    )
written(
    "distances_to_rows",
    lambda m, x: torch.cdist(m.w, m.a(x), 1.0).mean(2),
    r(B, 7, 5),
    a=lin(5, 3),
    w=(6, 3),
)
written(
    "distances_folded",
    lambda m, x: torch.cdist(m.a(x).flatten(0, 1), m.w).view(len(x), -1),
    r(B, 3, 5),
    a=lin(5, 3),
    w=(6, 3),
)
written(
    "distances_in_groups",
    lambda m, x: torch.cdist(m.a(x).transpose(0, 1), m.w, 1.0).transpose(0, 1),
    r(B, 2, 5),
    a=lin(5, 3),
    w=(2, 6, 3),
)
written(
    "distances_of_pairs",
    lambda m, x: torch.cdist(m.a(x)[:, None], m.w[None], 3.0),
    r(B, 7, 5),
    a=lin(5, 3),
    w=(2, 6, 3),
)
written(
    "spectrum_scaled",
    lambda m, x: torch.fft.irfft(torch.fft.rfft(m.a(x)) * torch.view_as_complex(m.w), n=6),
    r(B, 5),
    a=lin(5, 6),
    w=(4, 2),
)
written(
    "spectrum_of_images",
    lambda m, x: torch.fft.irfft2(
        torch.fft.rfft2(x.tanh(), dim=(1, 2)) * torch.view_as_complex(m.w), s=(4, 4), dim=(1, 2)
    ),
    r(B, 4, 4, 2),
    w=(4, 3, 2, 2),
)
written(
    "spectrum_mixed",
    lambda m, x: torch.fft.irfft(
        torch.einsum("bif,iof->bof", torch.fft.rfft(m.a(x)), torch.view_as_complex(m.w)), n=6
    ),
    r(B, 3, 5),
    a=lin(5, 6),
    w=(3, 2, 4, 2),
)
written(
    "spectrum_mixed_by_tokens",
    lambda m, x: torch.view_as_real(torch.fft.fft(x.tanh()) @ torch.view_as_complex(m.w)),
    r(B, 7, 5),
    w=(5, 3, 2),
)
written(
    "spectrum_of_parts",
    lambda m, x: torch.view_as_real(torch.fft.rfft(x) * torch.complex(m.u, m.v) + m.u),
    r(B, 6),
    u=(4,),
    v=(4,),
)
written(
    "spectrum_by_real_weights",
    lambda m, x: torch.view_as_real((torch.fft.fft(x) * m.w + m.w) / m.s),
    r(B, 5),
    w=(5,),
    s=(5,),
)
written(
    "spectrum_divided",
    lambda m, x: (torch.fft.fft(x) / torch.view_as_complex(m.w)).abs(),
    r(B, 5),
    w=(5, 2),
)
written(
    "spectrum_used_twice",
    lambda m, x: torch.view_as_real(
        torch.fft.fft(x.sin() + torch.fft.fft(x) * torch.view_as_complex(m.w))
        * torch.view_as_complex(m.w).conj()
    ),
    r(B, 5),
    w=(5, 2),
)
written(
    "rotated_by_angles",
    lambda m, x: torch.view_as_real(torch.view_as_complex(x) * torch.polar(m.s.exp(), m.t)).flatten(
        1
    ),
    r(B, 7, 3, 2),
    s=(3,),
    t=(7, 3),
)


@zoo("two_modules_one_parameter")
def _two_modules_one_parameter():
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
    model[2].weight = model[0].weight
    model[4].bias = model[0].bias
    return Case(model.eval(), torch.randn(B, 7, 5))


@zoo("partly_frozen")
def _partly_frozen():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(16, 6),
        nn.LayerNorm(6),
        nn.Linear(6, 3),
    )
    for name in ("0.weight", "1.bias", "3.bias", "4.weight", "6.weight", "7.bias", "8.bias"):
        model.get_parameter(name).requires_grad_(False)
    return Case(model.eval(), torch.randn(B, 3, 6, 6))


@zoo("only_the_head")
def _only_the_head():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 3))
    model[0].requires_grad_(False)
    return Case(model.eval(), torch.randn(B, 3, 6, 6))


@zoo("only_the_first_bias")
def _only_the_first_bias():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    ).requires_grad_(False)
    model[0].bias.requires_grad_(True)
    return Case(model.eval(), torch.randn(B, 3, 6, 6))


# --------------------------------------------------------------------------------------------------
# normalisation
chain(
    "batchnorm1d",
    lambda: [nn.Linear(5, 6), nn.BatchNorm1d(6, eps=0.1), nn.SiLU(), nn.Linear(6, 3)],
    5,
)
chain(
    "batchnorm2d_first",
    lambda: [nn.BatchNorm2d(3, eps=0.1), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten()],
    3,
    5,
    6,
)
chain("batchnorm3d", lambda: [nn.Conv3d(2, 4, 2), nn.BatchNorm3d(4), nn.Flatten()], 2, 3, 4, 3)
chain(
    "batchnorm_not_affine",
    lambda: [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False), nn.Flatten()],
    3,
    5,
    6,
)
chain("layernorm", lambda: [nn.Linear(5, 6), nn.LayerNorm(6, eps=0.1), nn.Linear(6, 3)], 7, 5)
chain("layernorm_first", lambda: [nn.LayerNorm(5), nn.Linear(5, 3)], 7, 5)
chain("layernorm_no_bias", lambda: [nn.Linear(5, 6), nn.LayerNorm(6, bias=False), nn.Tanh()], 5)
chain("layernorm_two_axes", lambda: [nn.Linear(5, 6), nn.LayerNorm((7, 6)), nn.Tanh()], 2, 7, 5)
chain("rmsnorm", lambda: [nn.Linear(5, 6), nn.RMSNorm(6, eps=0.1), nn.Linear(6, 3)], 7, 5)
chain(
    "groupnorm",
    lambda: [nn.Conv2d(3, 6, 3), nn.GroupNorm(3, 6, eps=0.1), nn.ReLU(), nn.Flatten()],
    3,
    6,
    5,
)
chain("groupnorm_2d", lambda: [nn.Linear(5, 6), nn.GroupNorm(2, 6), nn.Tanh()], 5)
chain(
    "instancenorm",
    lambda: [
        nn.Conv2d(3, 4, 3),
        nn.InstanceNorm2d(4, affine=True, eps=0.1),
        nn.Tanh(),
        nn.Flatten(),
    ],
    3,
    6,
    5,
)
chain("instancenorm1d_first", lambda: [nn.InstanceNorm1d(3, affine=True), nn.Flatten()], 3, 8)
chain(
    "instancenorm_tracked",
    lambda: [
        nn.Conv2d(3, 4, 3),
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        nn.Flatten(),
    ],
    3,
    6,
    5,
)
