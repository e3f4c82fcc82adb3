"""Shape images: the plain definition and, bit for bit, the Triton kernel in the interpreter."""

import hashlib

import interpreter
import torch
from definitions import definition
from expected import needs_gpu, refused
from pytest import fixture, mark

from fastlr import ops
from fastlr.inputs import ShapeImages
from fastlr.ops.philox import indices, signed64
from fastlr.ops.shape_images import MAX_SIDE, draw_shapes, shape_images, shape_images_at

NORMALISED = (
    (torch.arange(256.0)[None] / 255 - 0.4) / torch.tensor([[0.2], [0.25], [0.3]])
).float()


OTHER_SIZES = {"rectangle_sides": (0.3, 0.75), "circle_radii": (0.1, 1)}


def same_bits(a, b):
    return (
        a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride() and torch.equal(a, b)
    )


def packed(rgb):
    """RGB in axis 1 to one integer."""
    red, green, blue = rgb.long().unbind(1)
    return red << 16 | green << 8 | blue


# --- the definition
# --------------------------------------------------------------------------------------------------


def painted_by_hand(index, seed, size, rectangles, circles):
    """One image, pixel by pixel, from the drawn shapes."""
    shapes = draw_shapes(
        indices(index, index + 1), size=size, rectangles=rectangles, circles=circles, seed=seed
    )
    circle, top, bottom, left, right, colours = (t[0].tolist() for t in shapes)
    image = torch.empty(size, dtype=torch.uint8)
    for y in range(size[1]):
        for x in range(size[2]):
            pixel = colours[0]
            for s in range(rectangles + circles):
                if circle[s]:
                    r = (bottom[s] - top[s] - 1) // 2
                    inside = (y - top[s] - r) ** 2 + (x - left[s] - r) ** 2 <= r * r
                else:
                    inside = top[s] <= y < bottom[s] and left[s] <= x < right[s]
                pixel = colours[1 + s] if inside else pixel
            image[:, y, x] = torch.tensor(pixel)
    return image


@mark.parametrize(
    ("size", "rectangles", "circles"),
    [
        ((3, 32, 32), 4, 3),
        ((2, 19, 45), 4, 3),
        ((4, 3, 2), 4, 3),
        ((1, 1, 1), 4, 3),
        ((3, 9, 9), 150, 150),
        ((3, 6, 6), 0, 0),
    ],
    ids=str,
)
def test_pixels_follow_the_geometry(size, rectangles, circles):
    how = {"size": size, "rectangles": rectangles, "circles": circles, "seed": 11}
    images = shape_images(5, 8, dtype=torch.uint8, **how)
    for i in range(3):
        assert torch.equal(images[i], painted_by_hand(5 + i, 11, size, rectangles, circles))


@mark.parametrize(
    ("size", "how", "heights", "widths", "diameters"),
    [
        ((3, 224, 160), {}, (28, 112), (20, 80), (21, 81)),
        ((3, 33, 47), {}, (4, 16), (5, 23), (5, 17)),
        ((3, 40, 30), OTHER_SIZES, (12, 30), (9, 22), (7, 61)),
    ],
)
def test_shapes_obey_their_ranges_and_reach_the_image(size, how, heights, widths, diameters):
    circle, top, bottom, left, right, _ = draw_shapes(
        indices(0, 4000), size=size, rectangles=5, circles=5, seed=0, **how
    )
    assert (circle.sum(1) == 5).all()
    height, width = bottom - top, right - left
    assert extremes(height[~circle]) == heights
    assert extremes(width[~circle]) == widths
    assert torch.equal(height[circle], width[circle])
    assert extremes(height[circle]) == diameters
    assert extremes(top + height // 2) == (0, size[1] - 1)
    assert extremes(left + width // 2) == (0, size[2] - 1)


def test_shape_images_take_the_sizes_of_shapes():
    images = ShapeImages((3, 40, 30), normalize=None, **OTHER_SIZES)
    raw = images.raw(0, 2)
    want = shape_images(0, 2, size=(3, 40, 30), dtype=torch.uint8, **OTHER_SIZES)
    assert torch.equal(raw, want)
    assert not torch.equal(raw, ShapeImages((3, 40, 30), normalize=None).raw(0, 2))
    record = images.to_dict()
    assert record["rectangle_sides"] == [0.3, 0.75]
    assert record["circle_radii"] == [0.1, 1]


def test_every_order_of_kinds_is_equally_likely():
    # 2 rectangles and 2 circles: 6 orders. Chi-squared with 5 degrees of freedom exceeds 20.5 with
    # probability .001.
    n = 12000
    circle = draw_shapes(indices(0, n), size=(3, 8, 8), rectangles=2, circles=2, seed=5).circle
    counts = (circle.long() * torch.tensor([8, 4, 2, 1])).sum(1).bincount(minlength=16)
    counts = counts[counts > 0].double()
    assert len(counts) == 6
    assert ((counts - n / 6).square() / (n / 6)).sum() < 20.5


def test_colours_are_uniform():
    # 256 levels of 3 channels and 11 colours: chi-squared of 255 degrees of freedom has mean 255
    # and deviation 22.6.
    colours = draw_shapes(indices(0, 4000), size=(3, 8, 8), rectangles=5, circles=5, seed=2).colours
    for channel in range(3):
        counts = colours[..., channel].flatten().bincount(minlength=256).double()
        expected = colours[..., channel].numel() / 256
        assert abs(((counts - expected).square() / expected).sum() - 255) < 4 * 22.6
    correlation = torch.corrcoef(colours.double().flatten(0, 1).T)
    assert (correlation - torch.eye(3)).abs().max() < 4 / 44000**0.5


@mark.parametrize("rectangles, circles", [(1, 0), (0, 1)])
@mark.parametrize("size", [(3, 224, 224), (3, 32, 32), (3, 7, 5)], ids=str)
def test_a_single_shape_is_always_visible(size, rectangles, circles):
    n = 50 if size[1] > 100 else 200
    images = packed(
        shape_images(
            0, n, size=size, rectangles=rectangles, circles=circles, seed=0, dtype=torch.uint8
        )
    )
    shapes = draw_shapes(indices(0, n), size=size, rectangles=rectangles, circles=circles, seed=0)
    canvas, colour = packed(shapes.colours.transpose(1, 2)).unbind(1)
    # Both colours are in every image, unless a shape covers a tiny one altogether.
    for image, below, above in zip(images, canvas.tolist(), colour.tolist(), strict=True):
        found = set(image.unique().tolist())
        assert found == {below, above} or (min(size[1:]) < 8 and found == {above})


def test_seed_and_index_use_all_their_bits():
    def one(index, seed):
        return shape_images(index, index + 1, size=(3, 16, 16), seed=seed, dtype=torch.uint8)

    variants = [
        one(i, s)
        for i in (0, 1, 1 << 32, 1 << 63, (1 << 64) - 1)
        for s in (0, 1, 1 << 32, (1 << 64) - 1)
    ]
    for i, a in enumerate(variants):
        assert all(not torch.equal(a, b) for b in variants[:i])
    for i in (1 << 32, 1 << 63):
        around = shape_images(i - 1, i + 1, size=(3, 16, 16), seed=1, dtype=torch.uint8)
        assert torch.equal(around[1:], one(i, 1))


def test_table_maps_bytes():
    raw = shape_images(0, 3, size=(3, 20, 20), dtype=torch.uint8).long()
    expected = torch.stack([NORMALISED[c][raw[:, c]] for c in range(3)], dim=1)
    assert torch.equal(shape_images(0, 3, size=(3, 20, 20), table=NORMALISED), expected)
    assert torch.equal(shape_images(0, 3, size=(3, 20, 20)), raw.float() / 255)


def test_the_images_do_not_change_between_versions():
    """Recorded runs name (seed, index): the same pixels must come back."""
    image = shape_images(
        7, 8, size=(3, 4, 4), rectangles=2, circles=2, seed=2024, dtype=torch.uint8
    )
    digest = hashlib.sha256(image.numpy()).hexdigest()
    assert digest == "bfd770244a2375b7bc3945a97ac3be98728c7ff7faca3a97c68215dbb2a925b4"


@mark.parametrize(
    "change, words",
    [
        ({"size": (3, 224)}, "size"),
        ({"size": (5, 8, 8)}, "channels"),
        ({"size": (3, 8, MAX_SIDE + 1)}, "each side"),
        ({"size": (3, 8.0, 8)}, "size"),
        ({"rectangles": -1}, "rectangles"),
        ({"circles": 1.5}, "circles"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 64}, "seed"),
        ({"start": 4}, "empty"),
        ({"start": -1}, "leaves"),
        ({"stop": (1 << 64) + 1}, "leaves"),
        ({"dtype": torch.int64}, "dtype"),
        ({"dtype": torch.uint8, "table": NORMALISED}, "raw bytes"),
        ({"rectangle_sides": (0.5, 0.25)}, "rectangle_sides must be"),
        ({"circle_radii": (-0.1, 0.5)}, "circle_radii must be"),
        ({"table": NORMALISED[:2]}, "table"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_arguments_are_named(change, words):
    arguments = {"start": 0, "stop": 4, "size": (3, 8, 8)} | change
    with refused(words):
        shape_images(arguments.pop("start"), arguments.pop("stop"), **arguments)


# --- Triton
# --------------------------------------------------------------------------------------------------

CASES = {
    "224": (4, 5, {"size": (3, 224, 224), "table": "normalised"}),
    "33x47": (0, 3, {"size": (3, 33, 47), "table": "normalised"}),
    "7x5": (0, 3, {"size": (3, 7, 5)}),
    "two-blocks-of-images": (0, 66, {"size": (1, 3, 2), "rectangles": 1, "circles": 0}),
    "1x1": (1, 2, {"size": (1, 1, 1), "seed": 1}),
    "four-channels": (0, 2, {"size": (4, 9, 40)}),
    "no-shapes": (0, 2, {"size": (3, 9, 40), "rectangles": 0, "circles": 0}),
    "other-counts": (0, 2, {"size": (3, 40, 33), "rectangles": 1, "circles": 12}),
    "other-sizes": (
        0,
        3,
        {"size": (3, 33, 47), "rectangle_sides": (0.3, 1), "circle_radii": (0.0, 0.4)},
    ),
    "one-size": (
        0,
        2,
        {"size": (3, 20, 20), "rectangle_sides": (0.5, 0.5), "circle_radii": (1 / 3, 1 / 3)},
    ),
    "bf16": (0, 2, {"size": (3, 33, 47), "table": "normalised", "dtype": "bfloat16"}),
    "bf16-channels-last": (0, 2, {"size": (3, 64, 64), "dtype": "bfloat16", "channels_last": True}),
    "fp64": (0, 2, {"size": (3, 33, 47), "table": "normalised", "dtype": "float64"}),
    "bytes": (0, 2, {"size": (3, 33, 47), "dtype": "uint8"}),
    "largest-seed": (0, 2, {"size": (3, 32, 32), "seed": (1 << 64) - 1}),
    "index-over-32-bits": ((1 << 32) - 1, (1 << 32) + 1, {"size": (3, 32, 32)}),
    "index-at-bit-31": ((1 << 31) - 1, (1 << 31) + 1, {"size": (3, 32, 32)}),
    "last-index": ((1 << 64) - 2, 1 << 64, {"size": (3, 32, 32)}),
}
SLOW = "^(224|one-size)$"  # others that are quick are alike
AT = (
    "33x47",
    "two-blocks-of-images",
    "index-at-bit-31",
    "index-over-32-bits",
    "last-index",
)  # also by an index tensor


def arguments_of(case):
    start, stop, how = CASES[case]
    how = dict(how)
    if "dtype" in how:
        how["dtype"] = getattr(torch, how["dtype"])
    if how.get("table") == "normalised":
        how["table"] = NORMALISED
    return start, stop, how


RUN_CASES = """
from fastlr.ops.philox import indices
from fastlr.kernels.shape_images import shape_images_from
shape_images_at = ops.get("shape_images_at", "triton")
results = {}
cases, by_number = given
for name, (a, b, how) in cases.items():
    results[name] = shape_images_from(indices(a, a + 1), b - a, **how)
    if name in by_number:
        results[name, "at"] = shape_images_at(indices(a, b).flip(0), **how)
"""


@fixture(scope="module")
def interpreted(request, tmp_path_factory):
    """The cases by the Triton kernel in the interpreter."""
    cases = {name: arguments_of(name) for name in interpreter.chosen(request, CASES, SLOW)}
    return interpreter.interpreted(RUN_CASES, tmp_path_factory.mktemp("interpreted"), (cases, AT))


@mark.parametrize("case", interpreter.params(CASES, SLOW))
def test_triton_has_the_same_bits(case, interpreted):
    start, stop, how = arguments_of(case)
    assert same_bits(interpreted[case], shape_images(start, stop, **how))
    if case in AT:
        backwards = definition("shape_images_at")(indices(start, stop).flip(0), **how)
        assert same_bits(interpreted[case, "at"], backwards)


@needs_gpu
@mark.parametrize("case", list(CASES))
def test_gpu_has_the_same_bits(case):
    start, stop, how = arguments_of(case)
    if how.get("table") is not None:
        how["table"] = how["table"].cuda()
    first = indices(start, start + 1, "cuda")
    for backend in ("torch", "triton"):
        made = ops.get("shape_images_from", backend)(first, stop - start, **how)
        assert same_bits(made.cpu(), shape_images(start, stop, **arguments_of(case)[2])), backend
        made = ops.get("shape_images_at", backend)(indices(start, stop, "cuda").flip(0), **how)
        assert same_bits(
            made.cpu(), shape_images_at(indices(start, stop).flip(0), **arguments_of(case)[2])
        ), backend


@mark.parametrize("how", [{}, {"channels_last": True}], ids=["", "channels-last"])
def test_at_numbers_in_any_order(how, monkeypatch):
    # Blocks of two images.
    monkeypatch.setattr("fastlr.ops.shape_images._BLOCK_PIXELS", 20 * 20 * 2)
    numbers = [5, 0, (1 << 64) - 1, 5, 1 << 40, (1 << 63) + 2, 3]
    index = torch.tensor([signed64(i) for i in numbers])
    how |= {"size": (3, 20, 20), "seed": 3, "table": NORMALISED}
    images = shape_images_at(index, **how)
    assert torch.equal(images, torch.cat([shape_images(i, i + 1, **how) for i in numbers]))
    strided = torch.stack([index, index], 1)[:, 0]
    assert same_bits(shape_images_at(strided, **how), images)


@mark.parametrize(
    "index",
    [
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(2),
        torch.zeros(1, 2, dtype=torch.int64),
        [1, 2],
    ],
    ids=repr,
)
def test_no_index_is_named(index):
    with refused(r"index must be an int64 tensor \[n\] with n of at least 1, got"):
        shape_images_at(index, size=(3, 8, 8))


def test_from_a_number_on_the_device():
    how = {"size": (3, 20, 20), "seed": 3, "table": NORMALISED}
    for start in (0, 7, (1 << 64) - 3):
        first = torch.tensor([start - (1 << 64) if start >> 63 else start])
        assert same_bits(
            definition("shape_images_from")(first, 3, **how),
            shape_images(start, start + 3, **how),
        )


def extremes(t):
    return int(t.min()), int(t.max())
