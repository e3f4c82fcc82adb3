"""Models that cast to a dtype themselves.

They are right, not refused by chance, and interactions in them are found.
"""

from contextlib import suppress

import torch
import torch.nn.functional as F
import trust_cases as cases
from exact import seeded, sq_norms_in_batch, truth
from pytest import fixture, importorskip, mark, raises
from single_samples import Written
from torch import nn
from torch.testing import assert_close

import fastlr
from fastlr.ghost.api import engine_for

norms = fastlr.per_sample_grad_sq_norms


@fixture(autouse=True)
def _single():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


class Cast(nn.Module):
    """Casts its floating-point inputs to float32 before a model sees them.

    A float64 copy of it does not run.
    """

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.eval()

    def forward(self, *xs):
        return self.inner(
            *[x.float() if x.is_floating_point() or x.dtype == torch.uint8 else x for x in xs]
        )


class Within(nn.Module):
    """Two layers in a dtype of their own, whatever the parameters'.

    A float64 copy runs, and is none within.
    """

    def __init__(self, dtype, outputs=1000, mix=None):
        super().__init__()
        self.a, self.c = nn.Linear(64, 256), nn.Linear(256, outputs)
        self.dtype, self.mix = dtype, mix
        self.eval()

    def layer(self, layer, x):
        return F.linear(x, layer.weight.to(self.dtype), layer.bias.to(self.dtype))

    def forward(self, x):
        z = self.layer(self.c, self.layer(self.a, x.to(self.dtype)).tanh()).to(x.dtype)
        return z if self.mix is None else self.mix(z)


def mlp(width=64, outputs=1000):
    hidden = [nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(256, outputs))


# -- nothing is refused by chance
# --------------------------------------------------------------------------------------


@mark.parametrize("seed", [1, 9, 13])
def test_a_model_that_casts_its_inputs_is_right(seed):
    """Logits near zero are off by more than a thousandth of themselves.

    These seeds were refused.
    """
    torch.manual_seed(seed)
    inner = mlp()
    x = torch.randn(16, 64)
    v = torch.randn(16, 1000)
    assert_close(norms(Cast(inner), x, v), truth(inner, (x,), v).total, rtol=1e-4, atol=0)


@mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@mark.parametrize("outer", [torch.float32, torch.float64])
@mark.filterwarnings("error::fastlr.FastlrWarning")
def test_a_model_that_works_in_fewer_digits_within_is_right(outer, dtype):
    """Each was refused in float32, and in float64 audits sent it to the loop.

    Its float64 copy is off by more than 1e-9. In float16 all were: its gradients follow no
    cotangent of 2^-20.
    """
    torch.manual_seed(0)
    torch.set_default_dtype(outer)
    model = Within(dtype)
    for count in (16, 3, 24):
        x = torch.randn(count, 64)
        v = torch.randn(count, 1000)
        got = norms(model, x, v)
        exact = sq_norms_in_batch(model, model(x), v)
        assert_close(got, exact, rtol=1e-4 if dtype == torch.float32 else 0.05, atol=0)
    assert set(fastlr.support_report(model, x).routes.values()) == {"rule"}


def clipped(z):
    z.register_hook(lambda g: g.clamp(-0.5, 0.5))
    return z * 1


def test_a_hook_that_clips_is_refused_where_a_model_works_in_float16_within():
    torch.manual_seed(0)
    model, x = Within(torch.float16, 10, clipped), torch.randn(6, 64)
    with raises(fastlr.errors.NonlinearBackwardError):
        norms(model, x, torch.randn(6, 10))


def many_batches(models, batches):
    """Every batch is audited."""
    for seed in range(models):
        torch.manual_seed(seed)
        by_bytes = seed % 2 == 1
        model = Cast(mlp())
        for batch in range(batches):
            count = (16, 2, 33, 3)[batch % 4]
            x = (
                torch.randint(0, 256, (count, 64)).to(torch.uint8)
                if by_bytes
                else torch.randn(count, 64)
            )
            norms(model, x, torch.randn(count, 1000), check=True)
        engine = engine_for(model)
        assert engine.audits.failed == 0
        assert engine.audits.passed == 3 + 2 + 3 + 3 + batches - 4, "three where a size is new"
        assert engine.independence.comparisons == 4, "of each size once"


def test_no_batch_of_a_kept_engine_is_refused():
    many_batches(2, 12)


@mark.long
def test_none_of_two_thousand_batches_is_refused():
    many_batches(40, 50)


def test_a_column_of_nothing_but_rounding_is_no_interaction():
    """Two equal sums in another order; float64 cannot tell how far they are off."""
    torch.manual_seed(0)
    wrapped = None
    for call in cases.LARGE["cancellation_noise"]():
        wrapped = wrapped or Cast(call.model)
        norms(wrapped, call.xs, torch.randn(len(call.xs[0]), 6))


# -- interactions in such models are found
# -----------------------------------------------------------------------------


def less_mean(part):
    return lambda z: z - part * z.detach().mean(0)


def one_masked(z):
    """One logit of -1e9, and a thousandth of the mean in the others."""
    return less_mean(1e-3)(z).masked_fill(torch.arange(z.shape[1]) == 3, -1e9)


def half_masked(z):
    return less_mean(1e-3)(z).masked_fill(
        torch.arange(z.shape[1]) % 2 == 0, torch.finfo(torch.float32).min
    )


def masked_by_sample(z):
    return less_mean(1e-3)(z).masked_fill(z > z.median(1, keepdim=True).values, -1e9)


def constant_column(z):
    return less_mean(1e-3)(z).masked_fill(torch.arange(z.shape[1]) == 1, 7.0)


def one_column(z):
    return z - 0.01 * z.detach().mean(0) * (torch.arange(z.shape[1]) == 2)


def tiny_column(z):
    """A column of a 100-millionth of the others, which interacts within itself."""
    tiny = torch.arange(z.shape[1]) == 0
    return (z - 0.03 * z.detach().mean(0) * tiny) * torch.where(tiny, 1e-8, 1.0).to(z)


def largest_columns(z):
    """All columns but one are of 1e6; the one interacts."""
    return torch.cat([less_mean(0.03)(z[:, :1]), 1e6 * z[:, 1:]], 1)


def one_output(z):
    return less_mean(1e-3)(z[:, :1])


def by_rank(z):
    place = z.detach()[:, :1].argsort(0).argsort(0).to(z)
    return z * (1 + 1e-2 * place)


FAINT = (
    less_mean(1e-3),
    one_masked,
    half_masked,
    masked_by_sample,
    constant_column,
    one_column,
    tiny_column,
    largest_columns,
    one_output,
    by_rank,
)


@mark.parametrize("mix", FAINT, ids=lambda mix: mix.__name__)
@mark.parametrize("outputs", [4, 1000])
def test_faint_interactions_are_found_where_the_inputs_are_cast(mix, outputs):
    torch.manual_seed(0)
    net = Written(
        lambda m, x: mix(m.c(m.a(x).tanh())), a=nn.Linear(64, 128), c=nn.Linear(128, outputs)
    )
    x = torch.randn(16, 64)
    with raises(fastlr.InteractionError):
        norms(Cast(net), x, torch.randn_like(net(x)))


@mark.parametrize("mix", FAINT, ids=lambda mix: mix.__name__)
@mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_faint_interactions_are_found_in_fewer_digits_within(mix, dtype):
    torch.manual_seed(0)
    model = Within(dtype, 10, mix)
    x = torch.randn(16, 64)
    with raises(fastlr.InteractionError):
        norms(model, x, torch.randn_like(model(x)))


LATER = (
    "scaled_by_the_largest_of_the_batch",
    "chosen_by_the_mean_of_the_batch",
    "dropped_for_lack_of_places",
    "capacity_that_overflows_later",
    "exchanged_from_eight_on",
    "switched_by_data",
)
MASKS = [name for name in cases.LARGE if name.endswith(("interacting", "later"))]


@mark.parametrize("name", [*(n for n in LATER if n in cases.CASES), *MASKS])
@mark.filterwarnings("ignore::fastlr.FastlrWarning")
def test_interactions_that_trust_tests_know_are_found(name):
    """Interactions without a gradient that begin in a later batch are found.

    Such models were tried under no other conditions, and passed.
    """
    torch.manual_seed(0)
    wrapped = {}
    for call in (cases.CASES | cases.LARGE)[name]():
        model = wrapped.setdefault(call.model, Cast(call.model))
        v = torch.randn(len(call.xs[0]), 4)
        if call.refused:
            with raises(fastlr.InteractionError):
                norms(model, call.xs, v, check=True)
        elif call.crowd:
            with suppress(fastlr.InteractionError):
                norms(model, call.xs, v)
        else:
            norms(model, call.xs, v)


class OnAGrid(nn.Module):
    """Hidden numbers on a grid of 2^-10, the rounding of float32 at 1e4; samples mix by ``mix``."""

    def __init__(self, mix=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.c, self.mix = nn.Linear(8, 2), nn.Linear(2, 5), mix
        self.eval()

    def hidden(self, x):
        h = self.a(x.float())
        h = h + self.mix * h.detach().mean(0)
        return (h + 1e4) - 1e4

    def forward(self, x):
        return self.c(self.hidden(x))


@mark.parametrize("mix", [0.1, 1e-2, 1e-3])
def test_interactions_above_a_grid_are_found(mix):
    for seed in range(3):
        x = torch.randn(9, 8, generator=seeded(seed))
        with raises(fastlr.errors.InteractionError):
            norms(OnAGrid(mix), x, torch.ones(9, 5))


@mark.parametrize("size", [0.1, 0.01])
def test_a_random_model_is_not_taken_for_rounding(size):
    torch.manual_seed(0)
    model = Cast(Written(lambda m, x: m.a(x) + size * torch.rand(len(x), 4), a=nn.Linear(5, 4)))
    x = torch.randn(6, 5)
    with raises(fastlr.RandomForwardError):
        norms(model, x, torch.randn(6, 4))


# -- float64 copies that alone are not finite
# --------------------------------------------------------------------------


class Masked(nn.Module):
    """A float32 mask times the least value of the parameters' dtype, as in CANINE.

    In float64 it overflows.
    """

    def __init__(self, mix=0.0, scale=1.0):
        super().__init__()
        self.a, self.c = nn.Linear(5, 6), nn.Linear(6, 4)
        self.mix, self.scale = mix, scale
        self.eval()

    def forward(self, x, mask):
        h = self.a(x).tanh()
        bias = (1.0 - mask.float()) * torch.finfo(self.a.weight.dtype).min
        scores = (h @ h.transpose(1, 2)).float() + bias[:, None]
        z = self.c((scores.softmax(-1).to(h.dtype) @ h).mean(1)) * self.scale
        return z - self.mix * z.detach().mean(0)


def masked_batch():
    torch.manual_seed(0)
    return torch.randn(6, 7, 5), torch.arange(7) < torch.tensor([[7], [3], [5], [7], [1], [6]])


def test_a_copy_that_alone_is_not_finite_is_not_used():
    model, xs, v = Masked(), masked_batch(), torch.randn(6, 4)
    assert not Masked().double()(xs[0].double(), xs[1]).isfinite().all()
    got = norms(model, xs, v)
    exact = sq_norms_in_batch(model, model(*xs), v)
    assert_close(got, exact, rtol=1e-4, atol=0)
    assert fastlr.support_report(model, xs).subject == "float32 copy"


def test_interactions_are_found_where_the_copy_is_not_finite():
    with raises(fastlr.InteractionError):
        norms(Masked(mix=0.01), masked_batch(), torch.randn(6, 4))


def test_a_model_that_is_not_finite_itself_is_refused_as_such():
    with raises(fastlr.errors.NonFiniteError):
        norms(Masked(scale=float("inf")), masked_batch(), torch.randn(6, 4))


def test_canine():
    transformers = importorskip("transformers")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    others = {
        "downsampling_rate": 4,
        "local_transformer_stride": 8,
        "num_hash_buckets": 16,
        "num_hash_functions": 2,
    }
    config = transformers.CanineConfig(**sizes, **others, max_position_embeddings=16)
    model = transformers.CanineModel(config).eval()
    mask = torch.ones(3, 16, dtype=torch.long)
    mask[1, 9:] = 0
    x = {"input_ids": torch.randint(1, 5000, (3, 16)), "attention_mask": mask}
    v = torch.randn(3, 16)
    got = norms(model, x, v, output="pooler_output")
    exact = sq_norms_in_batch(model, model(**x).pooler_output, v)
    assert_close(got, exact, rtol=1e-4, atol=0)
