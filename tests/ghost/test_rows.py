"""Every node kind said to keep rows is held to its own backward formula, sample by sample."""

import itertools
import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from unittest import mock

import torch
import torch.nn.functional as F
from pytest import mark, param
from single_samples import Written, truth
from torch import Tensor, nn

import fastlr
from fastlr.ghost.graph import marks
from fastlr.ghost.graph.formulas import call_node, dense
from fastlr.ghost.graph.layouts import possible_layouts
from fastlr.ghost.graph.marks import row_sums
from fastlr.ghost.graph.rows import KEEPS, _through
from fastlr.ghost.graph.walk import walk

SAMPLES = 2
SIZES = (1, 2, 4)  # among them as many as samples, and axes that fold them
# Of a GPU; of fastlr (test_trust.py, test_recurrent.py, test_kernels_folded.py); of functionalised
# graphs.
ELSEWHERE = {
    *(f"ScaledDotProduct{kind}AttentionBackward0" for kind in ("Flash", "Efficient", "Cudnn")),
    *("FoldedConvBackward", "FixedNormBackward", "ScanBackward", "ChannelMeansBackward"),
    "ActivatedBackward",
    *("CudnnBatchNormBackward0", "MiopenBatchNormBackward0"),
    *("FusedRmsNormBackward0", "ReshapeCopyBackward0", "UnsqueezeBackward1", "SqueezeBackward3"),
}
Op = Callable[..., Tensor | Sequence[Tensor]]
aten = torch.ops.aten


def after(function, args, options, *given):
    """Call a function with what is given, and then with its other arguments."""
    return function(*given, *args, **options)


def of(place, names, *args, **options):
    """Functions of these names in a module or class, with these arguments after their inputs."""
    return [partial(after, getattr(place, name), args, options) for name in names.split()]


methods, of_functional = partial(of, Tensor), partial(of, F)
of_fft, of_special = partial(of, torch.fft), partial(of, torch.special)
OF_MATRICES = of(torch.linalg, "cholesky det eigh inv matrix_exp pinv qr slogdet svd")


def definite(x):
    """Matrices that all of these take, of which no two singular values are equal."""
    return x @ x.mT + torch.diag(torch.arange(1.0, x.shape[-2] + 1).to(x))


def some(shape):
    """A mask of this shape."""
    return torch.rand(tuple(shape)) > 0.5


def along(dim):
    """What works along one axis."""
    picks = lambda x: torch.randint(x.shape[dim], x.shape)  # noqa: E731
    few = lambda x: torch.randint(x.shape[dim], [max(1, s // 2) for s in x.shape])  # noqa: E731
    return [
        *methods(
            "softmax log_softmax cumsum cumprod logcumsumexp cummax cummin sort logsumexp sum "
            "mean prod amax amin",
            dim,
        ),
        *methods("max min median mode var std unbind squeeze unsqueeze nansum flip", dim),
        *methods("sum mean prod amax max median logsumexp std", dim, keepdim=True),
        *methods("split tensor_split", 1, dim),
        *methods("roll kthvalue topk", 1, dim),
        *methods("norm", 2, dim),
        lambda x: torch.var_mean(x, dim),
        lambda x: torch.std_mean(x, dim, keepdim=True),
        lambda x: torch.linalg.vector_norm(x, dim=dim),
        lambda x: aten.norm.ScalarOpt_dim(x, 2, [dim]),
        lambda x: aten.norm.ScalarOpt_dim_dtype(x, 2, [dim], False, dtype=torch.float64),
        lambda x: x.sort(stable=True, dim=dim),
        lambda x: aten._safe_softmax(x, dim),
        lambda x: x.split([1, x.shape[dim] - 1], dim),
        lambda x: torch.unsafe_split(x, 1, dim),
        lambda x: torch.unsafe_split_with_sizes(x, [1, x.shape[dim] - 1], dim),
        lambda x: x.select(dim, -1),
        lambda x: x.narrow(dim, 0, 1),
        lambda x: x.unfold(dim, 1, 1),
        lambda x: x.unfold(dim, 2, 1),
        lambda x: x.gather(dim, picks(x)),
        lambda x: x.gather(dim, few(x)),
        lambda x: x.index_select(dim, torch.randint(x.shape[dim], (x.shape[dim],))),
        lambda x: x.scatter(dim, picks(x), 1.0),
        lambda x: x.scatter(dim, picks(x), x.exp()),
        lambda x: x.scatter_add(dim, picks(x), x.exp()),
        lambda x: torch.stack([x, x.exp()], dim),
        lambda x: torch.cat([x, x.exp()], dim),
        lambda x: F.glu(x, dim),
        *of_fft("fft ifft rfft ihfft", dim=dim),
        lambda x: torch.fft.irfft(torch.complex(x, x), dim=dim),
    ]


def pairs_of_axes(a, b):
    return [
        lambda x: x.transpose(a, b),
        *methods("sum mean amax var logsumexp squeeze flip", (a, b)),
        *methods("sum norm", dim=(a, b), keepdim=True),
        lambda x: x.roll((1, 1), (a, b)),
        *of_fft("fft2 rfft2", dim=(a, b)),
        lambda x: torch.fft.irfft2(torch.complex(x, x), dim=(a, b)),
    ]


UNARY = [
    *methods(
        "abs acos asin asinh atan atanh ceil cos cosh erf erfc erfinv exp exp2 expm1 floor frac "
        "lgamma log log10 log1p"
    ),
    *methods(
        "log2 neg reciprocal relu round rsqrt sigmoid sign sgn sin sinc sinh sqrt tan tanh trunc "
        "logit nan_to_num tril deg2rad rad2deg digamma i0"
    ),
    *methods("polygamma fmod", 1),
    lambda x: (x + 1.5).mvlgamma(2),
    *methods("triu clone t diag squeeze flatten sum mean max median prod"),
    *of_functional(
        "celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish silu "
        "softplus"
    ),
    *of_functional("softshrink instance_norm"),
    *of_functional("pixel_shuffle pixel_unshuffle group_norm", 2),
    *of_functional("avg_pool1d avg_pool2d avg_pool3d max_pool2d max_pool3d", 2, 1),
    *of_functional(
        "adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d", 2
    ),
    *of_functional("unfold", 2, padding=1),
    *of_functional("fold", (2, 2), 1),
    lambda x: (x + 1.5).acosh(),
    *of_special("ndtri entr erfcx i0e i1 i1e log_ndtr"),
    *(lambda x, f=f: f(definite(x)) for f in OF_MATRICES),
    lambda x: torch.channel_shuffle(x, 2),
    lambda x: aten.alias(x),
    lambda x: x.permute(*range(1, x.ndim), 0),
    lambda x: x.as_strided(x.shape, x.stride()),
    lambda x: F.adaptive_avg_pool2d(x.to(memory_format=torch.channels_last), 1),
    lambda x: x.transpose(0, -1).reshape(x.shape),
    lambda x: x.transpose(0, -1).reshape(-1),
    lambda x: x.unflatten(0, (-1, 2)),
    lambda x: x.float(),
    lambda x: x.clamp(0.2, 0.5),
    lambda x: x.clamp_max(0.5),
    lambda x: x.clamp_min(0.5),
    lambda x: x**2.5,
    lambda x: torch.view_as_real(torch.polar(x, x)),
    lambda x: torch.view_as_complex(x),
    lambda x: torch.complex(x, x).conj(),
    lambda x: torch.complex(x, x).conj_physical(),
    lambda x: torch.complex(x, x).angle(),
    lambda x: torch.complex(x, x).imag,
    lambda x: 2.0**x,
    lambda x: x - 1.5,
    lambda x: aten.sub.Scalar(x, 1.5),
    lambda x: torch.rsub(x, 1.5),
    lambda x: x * 1.5,
    lambda x: aten.mul.Scalar(x, 1.5),
    lambda x: aten.div.Scalar(x, 1.5),
    lambda x: x % 0.3,
    lambda x: F.threshold(x, 0.5, 0.0),
    lambda x: torch.native_dropout(x, 0.5, True),
    lambda x: x.masked_fill(some(x.shape), 0.0),
    lambda x: x.repeat(2, *[1] * (x.ndim - 1)),
    lambda x: x.repeat(*[1] * x.ndim, 2),
    lambda x: x.expand(2, *x.shape),
    lambda x: x.expand(*[4 if s == 1 else s for s in x.shape]),
    lambda x: x @ x.mT,
    lambda x: x.mT @ x,
    lambda x: F.batch_norm(x, None, None, training=True),
    lambda x: F.batch_norm(x, torch.zeros(x.shape[1]), torch.ones(x.shape[1])),
    *(lambda x, k=k: F.layer_norm(x, x.shape[-k:]) for k in (1, 2)),
    *(lambda x, k=k: F.rms_norm(x, x.shape[-k:]) for k in (1, 2)),
    *(
        lambda x, m=m: F.interpolate(x, scale_factor=2, mode=m)
        for m in "nearest nearest-exact linear trilinear".split()
    ),
    *(
        lambda x, m=m, a=a: F.interpolate(x, scale_factor=2, mode=m, antialias=a)
        for m in ("bilinear", "bicubic")
        for a in (False, True)
    ),
    *(
        lambda x, pad=pad, m=m: F.pad(x, pad, mode=m)
        for m in ("constant", "reflect", "replicate")
        for pad in (
            (1, 0),
            (0, 0, 1, 1),
            (1, -1),
            (0, 0, 1, -1),
            (0, 0, 0, 0, 1, 1),
            (0, 0, 0, 0, 0, 0, 1, -1),
        )
    ),
    *itertools.chain.from_iterable(along(dim) for dim in (-2, -1, 0, 1, 2)),
    *itertools.chain.from_iterable(
        pairs_of_axes(*axes) for axes in ((0, 1), (-1, 0), (1, -1), (1, 2))
    ),
]
BINARY = [
    *methods(
        "add sub mul div atan2 maximum minimum fmax fmin hypot logaddexp logaddexp2 pow copysign "
        "xlogy matmul mv remainder fmod"
    ),
    *(  # with a gradient of the second alone
        lambda a, b, f=f: f(a.detach(), b)
        for f in (torch.igamma, torch.igammac, torch.special.zeta)
    ),
    *methods("clamp clamp_max clamp_min outer"),
    lambda a, b: torch.div(a, b, rounding_mode="floor"),
    lambda a, b: torch.complex(a, b),
    lambda a, b: torch.polar(a, b),
    lambda a, b: torch.complex(a, a) * b,
    lambda a, b: torch.complex(a, a) @ torch.complex(b, a),
    *(
        lambda a, b, p=p, m=m: torch.cdist(a, b, p, f"{m}use_mm_for_euclid_dist")
        for p, m in ((1.0, "donot_"), (2.0, "donot_"), (2.0, ""))
    ),
    *(
        lambda a, b, solve=solve, left=left, more=more: solve(definite(a), b, left=left, **more)
        for solve, more in (
            (torch.linalg.solve, {}),
            (torch.linalg.solve_triangular, {"upper": True}),
        )
        for left in (True, False)
    ),
    lambda a, b: torch.linalg.solve(definite(a), b[..., 0]),  # a vector for each system
    lambda a, b: torch.rsub(a, b),
    lambda a, b: torch.where(some(torch.broadcast_tensors(a, b)[0].shape), a, b),
    lambda a, b: torch.lerp(a, b, 0.3),
    lambda a, b: torch.lerp(a, b, a),
    lambda a, b: torch.addcmul(a, a, b),
    lambda a, b: torch.addcdiv(b, a, a),
    lambda a, b: a.clone().copy_(b),
    lambda a, b: a.clone().add_(b),
    lambda a, b: a.masked_fill(some(a.shape), b.sum()),
    lambda a, b: F.prelu(a, b),
    lambda a, b: a.scatter_add(-1, torch.randint(a.shape[-1], b.shape), b),
    lambda a, b: torch.einsum("bij,bik->bjk", a, b),
    lambda a, b: torch.einsum("ijk,jil->lkj", a, b),
    lambda a, b: F.layer_norm(a, b.shape, b, b),
    lambda a, b: F.group_norm(a, 1, b, b),
    lambda a, b: F.batch_norm(a, torch.zeros_like(b), torch.ones_like(b), b, b),
    lambda a, b: F.scaled_dot_product_attention(a, b, b),
    lambda a, b: F.scaled_dot_product_attention(a, a, a, attn_mask=b),
    *of_functional("conv1d conv2d conv_transpose1d linear"),
    lambda a, b: F.conv2d(a, b, padding=1, groups=2),
]
TERNARY = [torch.addmm, torch.baddbmm, torch.addmv, torch.addbmm, F.scaled_dot_product_attention]


def shapes(ndim, step=1):
    """Shapes that differ much, most of them if there are few."""
    return list(itertools.product(SIZES, repeat=ndim))[::step]


ALONE = [(s,) for s in (*shapes(1), *shapes(2), *shapes(3, 3), *shapes(4, 17))]
LARGE = [((2, 4, 4),), ((4, 2, 2, 2, 2),), ((2, 4, 1, 2, 2),)]
TWO = [
    *itertools.product(shapes(1), shapes(1)),
    *itertools.product(shapes(2), shapes(2, 2)),
    *itertools.product(shapes(3, 2), shapes(1)),
    *itertools.product(shapes(3, 4), shapes(3, 2)),
    *itertools.product(shapes(4, 13), shapes(1)),
    *((s, s) for s in shapes(4, 10)),
    *(((2, 2, 4, 4), s) for s in ((1, 2, 4, 4), (2, 1, 4, 4), (4, 4), (4, 1, 1, 1), (4, 2, 1, 1))),
]
THREE = [
    *itertools.product(shapes(1), shapes(2, 2), [*shapes(1), *shapes(2, 2)]),
    *itertools.product(shapes(2, 2), shapes(2, 2), shapes(1)),
    *itertools.product(shapes(2, 4), shapes(2, 2), shapes(2, 2)),
    *itertools.product(shapes(3, 5), shapes(3, 5), shapes(3, 5)),
    *((s, s, s) for s in shapes(4, 10)),
]


@cache
def first_rows(layout):
    """Tell which places of its axis belong to the first sample."""
    return layout.samples(SAMPLES, torch.device("cpu")) == 0


def broken(z, seen):
    """Return the kinds of nodes below z that hand rows of one sample to another.

    ``seen`` is given the kinds that are said to keep any.
    """
    graph, found = walk(z, {}), []
    for i, node in enumerate(graph.nodes):
        name = graph.names[i]
        for _, output in graph.outputs(i) if name in KEEPS else ():
            shape = graph.shape(i, output)
            for layout, (slot, (child, number)) in itertools.product(
                possible_layouts(shape, SAMPLES), enumerate(graph.children[i])
            ):
                inner = graph.shape(child, number) if child >= 0 else torch.Size()
                kept = _through(graph, i, layout, output, slot, inner) if child >= 0 else None
                if kept is None:
                    continue
                seen.add(name)
                size = [1] * len(shape)
                size[layout.dim] = shape[layout.dim]
                own = first_rows(layout).view(size)
                given = tuple(
                    own * torch.rand(shape, dtype=graph.dtype(i, output)) if k == output else None
                    for _, k in graph.outputs(i)
                )
                below = call_node(node, given)[slot]
                if below is not None:
                    rows = dense(below).sum_to_size(inner).movedim(kept.dim, 0)
                    others = rows[~first_rows(kept)].detach()
                    if bool((others.nan_to_num() != 0).any()):
                        found.append(f"{name} {tuple(shape)} {layout} -> {tuple(inner)} {kept}")
    return found


def nodes_keep_rows(op, given, seen):
    try:  # most shapes fit few operations
        result = op(
            *((0.1 + 0.8 * torch.rand(s, dtype=torch.float64)).requires_grad_() for s in given)
        )
    except (RuntimeError, ValueError, IndexError, TypeError):
        return []
    outputs = [result] if isinstance(result, Tensor) else result
    with_graph = [z for z in outputs if z.requires_grad and z.grad_fn is not None]
    return [text for z in with_graph[:1] for text in broken(z, seen)]


@mark.filterwarnings("ignore")
@mark.parametrize("alone, pairs", [(3, 12), param(1, 1, marks=mark.long)], ids=["some", "all"])
def test_listed_nodes_keep_rows(alone, pairs):
    """Every kind is met, in the long tests at all shapes."""
    torch.manual_seed(0)
    seen = set()
    unary = ALONE[::alone] + LARGE
    for operations, inputs in ((UNARY, unary), (BINARY, TWO[::pairs]), (TERNARY, THREE)):
        for op, given in itertools.product(operations, inputs):
            assert not (wrong := nodes_keep_rows(op, given, seen)), wrong
    assert set(KEEPS) - seen == ELSEWHERE


def test_a_wrong_entry_would_be_seen(monkeypatch):
    monkeypatch.setitem(KEEPS, "FlipBackward0", lambda s: s.at(s.layout.dim))
    assert nodes_keep_rows(lambda x: x.flip(0), ((4, 2),), set())


@mark.parametrize(
    "forward, kinds, passes",
    [(torch.special.xlog1py, ("SpecialXlog1PyBackward0",), (3, 4, 5)), (torch.mul, (), (0, 0, 0))],
)
def test_kinds_without_rows_are_reported_and_cost_passes(forward, kinds, passes):
    gain = Written(lambda m, x: forward(x, m.gain), gain=torch.nn.Parameter(torch.rand(3)))
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), gain, torch.nn.Linear(3, 2))
    report = fastlr.support_report(model, torch.randn(5, 4))
    assert report.without_rows == kinds
    assert re.findall(
        "no rows known for (.*): marks find them in every batch", str(report)
    ) == list(kinds)
    for samples, wanted in zip((3, 64, 300), passes, strict=True):
        v = torch.randn(samples, 2)
        for _ in range(2):
            with mock.patch.object(marks, "_row_sums", wraps=marks._row_sums) as taken:
                fastlr.per_sample_grad_sq_norms(model, torch.randn(samples, 4), v)
        assert taken.call_count == wanted


@mark.parametrize("sparse_axes", [1, 2, 3])
def test_row_sums_of_a_sparse_gradient_are_those_of_a_dense_one(sparse_axes):
    gradient = torch.randn(3, 4, 5) * (torch.rand(3, 4, 5) < 0.5)
    for dim in range(3):
        want = row_sums(gradient, dim)
        torch.testing.assert_close(row_sums(gradient.to_sparse(sparse_axes), dim), want)
    of_rows = row_sums(gradient[0], 1)
    torch.testing.assert_close(row_sums(gradient[0].to_sparse_csr(), 1), of_rows)


@mark.filterwarnings("ignore::fastlr.FastlrWarning")  # that the loop is slow
@mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_learned_weights_of_edges_in_a_graph_of_each_sample():
    """The gradient at the sparse adjacency matrix is sparse: it ended in a traceback."""
    edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])

    def messages(net, x):
        adjacency = torch.sparse_coo_tensor(edges, net.weights, (5, 5))
        return torch.stack([torch.sparse.mm(adjacency, nodes) for nodes in net.layer(x)])

    net = Written(messages, layer=nn.Linear(3, 3), weights=nn.Parameter(torch.randn(4))).double()
    x, v = (torch.randn(4, 5, 3, dtype=torch.float64) for _ in range(2))
    torch.testing.assert_close(
        fastlr.per_sample_grad_sq_norms(net, x, v), truth(net, (x,), v), rtol=1e-11, atol=0
    )
