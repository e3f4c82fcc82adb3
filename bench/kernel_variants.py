"""The variants of the kernels that are compiled ahead of time, for `compile_kernels.py`.

They are in VARIANTS, by module of kernels/.

A variant is (label, kernel, signature, constants, options): types of the arguments, those that are
constants (constexprs, and sizes and strides of 1, which Triton makes constants of), and the options
of `compile_kernels.compile_case`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from bench.convolution_cases import geometry
from fastlr.kernels import depthwise as depthwise_module
from fastlr.kernels import embedding_norms as embedding
from fastlr.kernels import fisher_root as fisher
from fastlr.kernels import fold_weights as fold
from fastlr.kernels import folded_depthwise as forward_depthwise
from fastlr.kernels import folded_pointwise as pointwise
from fastlr.kernels import linear_norms as linear
from fastlr.kernels import moments, product_norms, strided_sums
from fastlr.kernels import row_norms as rows_module
from fastlr.kernels import shape_images as images
from fastlr.kernels.launching import DTYPES
from fastlr.ops.geometry import ConvGeometry

TORCH = {short: dtype for dtype, short in DTYPES.items()}
# Channels are contiguous (else positions), bytes of a load; "strided": nothing is contiguous.
LAYOUTS = {
    "last": (True, 16),
    "last,1": (True, 1),
    "first": (False, 16),
    "first,8": (False, 8),
    "first,1": (False, 1),
    "strided": (False, 1),
}


def variant(
    label: str,
    kernel: JITFunction,
    kinds: Mapping[str, str],
    constants: Mapping[str, Any],
    divisible: str | Iterable[str] = "pointers",
    **options: int,
) -> tuple:
    """A variant whose arguments have the types of ``kinds``, or else are int32.

    ``divisible``: names of the arguments that are multiples of 16 or aligned to 16 bytes;
    "pointers": all pointers.
    """
    signature = {name: kinds.get(name, "i32") for name in kernel.arg_names if name not in constants}
    if divisible == "pointers":
        divisible = [name for name, kind in signature.items() if kind.startswith("*")]
    return (
        label,
        kernel,
        signature,
        dict(constants),
        {**options, "divisible": [n for n in divisible if n in signature]},
    )


def with_one(case: tuple, name: str, label: str = "one") -> tuple:
    """The variant for calls in which an argument is 1."""
    what, kernel, signature, constants, options = case
    return variant(f"{what[:-1]}, {label}]", kernel, signature, {**constants, name: 1}, **options)


def fp32(names: str) -> dict[str, str]:
    """These arguments as pointers to float32."""
    return dict.fromkeys(names.split(), "*fp32")


# -- elementwise, and small sums
# ----------------------------------------------------------------------------------------


def sums(
    name: str, inputs: str, *, product: bool, plain: bool, pairs: Iterable[tuple[str, str]] = ()
) -> Iterator[tuple]:
    """Yield the variants of the sums of an op: every dtype (and pair of dtypes), tile and layout.

    Layouts are contiguous (either way), aligned or not, and any strides.

    ``product`` and ``plain`` are the wanted sums, ``inputs`` those of the optional inputs that are
    given.
    """
    kernel, tiles = strided_sums.sums_kernel, strided_sums.TILES
    layouts = {
        f"{side} contiguous{how}": tiles[side] for side in tiles for how in (", aligned", "")
    }
    layouts["any strides"] = tiles["kept"] + tiles["summed"]
    used = {"g", *inputs.split()}
    if product:
        used |= {"x", "sum_gx"}
    if plain:
        used |= {"sum_g"}
    absent = {"sum_g", "sum_gx", "g", "x", "centre", "shift", "factor"} - used
    strides = [n for n in kernel.arg_names if n.startswith(("g_", "x_", "row_", "out_"))]
    for dtype, other in [*((d, d) for d in DTYPES.values()), *pairs]:
        kinds = fp32(" ".join(used)) | {"g": f"*{dtype}", "x": f"*{other}"}
        for layout in layouts:
            constants: dict[str, Any] = dict.fromkeys(absent)
            if layout != "any strides":
                side = layout.split()[0]
                constants |= {f"g_{side}": 1, "out_kept": 1} | ({f"x_{side}": 1} if product else {})
            divisible = [*used, *([*strides, "kept", "summed"] if "aligned" in layout else [])]
            for kept, summed in layouts[layout]:
                of = f"{dtype} x {other}" if other != dtype else dtype
                label = f"{name}[{of}, {layout}, {kept}x{summed}]"
                blocks = {**constants, "KEPT": kept, "SUMMED": summed}
                case = variant(
                    label, kernel, kinds, blocks, divisible, num_warps=strided_sums.WARPS
                )
                yield case
    for size in ("kept", "summed"):  # one number a sample, or nothing to sum (vectors)
        yield with_one(case, size, f"one {size}")


def broadcast_sums() -> Iterator[tuple]:
    """Sums of g, and of g times another factor."""
    yield from sums("broadcast_sums", "", product=False, plain=True)
    mixed = [("bf16", "fp32"), ("fp16", "fp32")]
    yield from sums("broadcast_sums with a factor", "", product=True, plain=False, pairs=mixed)


def channel_sums() -> Iterator[tuple]:
    """Both sums, of what is centred and of what is not."""
    yield from sums("channel_sums", "", product=True, plain=True)
    yield from sums("channel_sums of what is centred", "centre", product=True, plain=True)


def layer_norm_sums() -> Iterator[tuple]:
    """Layer norm and RMS norm."""
    yield from sums("layer_norm_sums", "shift factor", product=True, plain=True)
    yield from sums("rms_norm_sums", "factor", product=True, plain=False)


def embedding_norms() -> Iterator[tuple]:
    """Dtypes, tiles, and rows that are contiguous and aligned or not."""
    kernel = embedding.embedding_kernel
    numbers = [n for n in kernel.arg_names if n not in ("out", "ids", "g", "rows", "ROWS", "WIDTH")]
    for dtype, ids, rows, contiguous in product(
        DTYPES.values(), embedding.IDS.values(), embedding.ROWS, (True, False)
    ):
        label = (
            f"embedding_sq_norms[{dtype}, ids {ids}, {rows}{', contiguous' if contiguous else ''}]"
        )
        constants = {"ROWS": rows, "WIDTH": embedding.WIDTH} | (
            {"ids_row": 1, "g_column": 1} if contiguous else {}
        )
        kinds = {"out": "*fp64", "ids": f"*{ids}", "g": f"*{dtype}"}
        divisible = [*kinds, *(numbers if contiguous else [])]
        case = variant(label, kernel, kinds, constants, divisible, num_warps=embedding.WARPS)
        yield case
    yield with_one(case, "width", "one column")


def fisher_root() -> Iterator[tuple]:
    """Dtypes, blocks, contiguous and aligned or any strides."""
    for dtype, (block, warps), contiguous in product(
        fisher.DTYPES.values(), fisher.BLOCKS.items(), (True, False)
    ):
        label = (
            f"categorical_root_cotangent[{dtype}, {block}{', contiguous' if contiguous else ''}]"
        )
        constants = {"BLOCK": block} | ({"z_class": 1, "index_stride": 1} if contiguous else {})
        kinds = {"out": "*fp64", "z": f"*{dtype}", "index": "*i64"}
        divisible = [*kinds, "z_sample", "z_position"] if contiguous else ()
        yield variant(
            label, fisher.fisher_root_kernel, kinds, constants, divisible, num_warps=warps
        )


def fold_weights() -> Iterator[tuple]:
    """Every dtype of the activations, with bias and affine batch norm and without."""
    for dtype, bare in product(DTYPES.values(), (False, True)):
        kinds = {"folded": f"*{dtype}", "numbers": "*fp32", "weight": "*fp32", "eps": "fp32"}
        kinds |= dict.fromkeys(("bias", "gamma", "beta", "mean", "var"), "*fp32")
        flags = {"BLOCK": fold.BLOCK}
        if bare:
            flags |= dict.fromkeys(("bias", "gamma", "beta"))
        label = f"fold[{dtype}{', bare' if bare else ''}]"
        yield variant(label, fold.fold_weights_kernel, kinds, flags, (), num_warps=fold.WARPS)


def row_norms() -> Iterator[tuple]:
    """Every dtype, one side, two, and two with the norms of the second; contiguous or not."""
    sides = {", alone": ("g", "norms_of_g"), "": ("norms_of_g",), ", with a bias": ()}
    for dtype, side, contiguous in product(DTYPES.values(), sides, (True, False)):
        kinds = dict.fromkeys(("a", "g"), f"*{dtype}")
        kinds |= dict.fromkeys(("norms", "norms_of_g"), "*fp64")
        constants = {"BLOCK": rows_module.BLOCK} | dict.fromkeys(sides[side])
        constants |= {"a_column": 1, "g_column": 1} if contiguous else {}
        label = f"row_norms[{dtype}{side}{', contiguous' if contiguous else ''}]"
        yield variant(
            label, rows_module.row_norms_kernel, kinds, constants, num_warps=rows_module.WARPS
        )


def shape_images() -> Iterator[tuple]:
    """Both kernels, every dtype and memory format."""
    counts = {"RECTANGLES": 5, "COUNT": 10, "BLOCK": images.IMAGES_PER_PROGRAM}
    for each, label in ((False, "draw_shapes"), (True, "draw_shapes[each]")):
        kinds = {"shapes": "*i32", "index": "*i32"}
        yield variant(label, images.draw_shapes_kernel, kinds, {**counts, "EACH": each}, ())
    tile = {"COUNT": 10, "CHANNELS": 3, "ROWS": images.TILE_ROWS, "COLUMNS": images.TILE_COLUMNS}
    for dtype, last in product(("fp32", "bf16", "fp16", "u8"), (False, True)):
        kinds = {"out": f"*{dtype}", "shapes": "*i32", "table": f"*{dtype}"}
        label = f"paint[{dtype}{',channels_last' if last else ''}]"
        yield variant(label, images.paint_kernel, kinds, {**tile, "CHANNELS_LAST": last}, ())
    yield variant(
        "paint[1x1]",
        images.paint_kernel,
        kinds,
        {**tile, "CHANNELS_LAST": False, "height": 1, "width": 1},
        (),
    )


# -- norms of products
# --------------------------------------------------------------------------------------------------


def products(*, window: bool, folded: bool) -> Iterator[tuple]:
    """Every tile in every layout, the same for both operands; fp16, which is as bf16, in one."""
    widths = (16, 32, 64, 128)  # every tile is chosen for one of these on each side
    for (dtype, short), (layout, (last, size)) in product(DTYPES.items(), LAYOUTS.items()):
        if (short == "fp16" and layout != "last") or (size == 8 and (window or short == "fp32")):
            continue
        align = max(1, size // dtype.itemsize)
        ones = contiguous("x g", "channel" if last else "column")
        if layout == "strided":
            ones = {}
        kinds = fp32("weight scale squares inner sums") | {"x": f"*{short}", "g": f"*{short}"}
        for packed in (False, True)[: 1 + window]:
            vector = align > 1 and (not window or last) and not packed
            tiles = {
                product_norms.choose_tile(
                    dtype, outputs, columns, vector=vector, packed=packed, folded=folded
                )
                for outputs, columns in product(widths, widths)
            }
            form = "window" if window else "plain"
            if packed:
                form = "packed"
            for tile in sorted(tiles):
                outputs, columns, rows, num_warps, num_stages = tile
                constants = ones | {
                    "X_PLAIN": not window,
                    "G_PLAIN": not window or bool(ones),
                    "X_LAST": last,
                    "G_LAST": last,
                    "PACKED": packed,
                    "FOLDED": folded,
                    "ALIGN": align,
                    "OUTPUTS": outputs,
                    "COLUMNS": columns,
                    "ROWS": rows,
                }
                label = f"{form}{'_folded' if folded else ''}[{short},{layout},{outputs}x{columns}]"
                how = {"num_warps": num_warps, "num_stages": num_stages}
                how["maxnreg"] = product_norms.most_registers(tile, folded)
                yield variant(label, product_norms.product_norms_kernel, kinds, constants, **how)


def contiguous(tensors: str, axis: str) -> dict[str, int]:
    """The strides of tensors that are contiguous along an axis."""
    return {f"{tensor}_{axis}": 1 for tensor in tensors.split()}


def conv_norms() -> Iterator[tuple]:
    """With windows, and the folded form with and without."""
    for window, folded in ((False, True), (True, False), (True, True)):
        yield from products(window=window, folded=folded)


def linear_norms() -> Iterator[tuple]:
    """Products without windows, and Gram matrices in every layout."""
    yield from products(window=False, folded=False)
    for (dtype, centred), (layout, (last, size)) in product(
        linear.CENTRED.items(), LAYOUTS.items()
    ):
        short = DTYPES[dtype]
        if size == 8 and short == "fp32":
            continue
        align = max(1, size // dtype.itemsize)
        ones = contiguous("a g", "column" if last else "row")
        if layout == "strided":
            ones = {}
        kinds = fp32("a_mean g_mean squares") | {"a": f"*{short}", "g": f"*{short}"}
        for block, chunk, num_warps, num_stages in sorted(
            {linear.gram_block(dtype, rows, align) for rows in (64, 65)}
        ):
            flags = {
                "A_LAST": last,
                "G_LAST": last,
                "ALIGN": align,
                "CENTRED": centred,
                "BLOCK": block,
                "CHUNK": chunk,
            }
            label, how = (
                f"gram[{short},{layout},{block}]",
                {"num_warps": num_warps, "num_stages": num_stages},
            )
            yield variant(label, linear.gram_norms_kernel, kinds, ones | flags, **how)


# -- folded convolutions
# ------------------------------------------------------------------------------------------------

MOMENTS = "weight scale squares inner sums parts"


def folded() -> Iterator[tuple]:
    """What both kinds of convolution launch at their end."""
    blocks = {"CHANNELS": moments.CHANNELS_A_PROGRAM, "WEIGHTS": moments.WEIGHTS_A_STEP}
    for dtype in ("fp32", "bf16"):
        kinds = fp32("parts scale squares inner parts_sums sums") | {"weight": f"*{dtype}"}
        yield variant(f"finish[{dtype}]", moments.finish_moments_kernel, kinds, blocks, num_warps=4)
    kinds = fp32("squares inner sums statistics") | {"norms": "*fp64"}
    constants = {"BLOCK": moments.NORMS_BLOCK}
    warps = moments.NORMS_WARPS
    yield variant("norms", moments.finish_norms_kernel, kinds, constants, num_warps=warps)


def depthwise_layers() -> Iterator[
    tuple[str, str, bool, int, int, int, tuple[int, int], ConvGeometry]
]:
    """Yield the layers of MobileNetV3-Large, and a few odd ones.

    Each is (name, dtype, channels_last, vector, channels, columns, kernel, geometry).
    """
    for channels, columns, kernel, stride in (
        (16, 112, 3, 1),
        (64, 112, 3, 2),
        (72, 56, 3, 1),
        (72, 56, 5, 2),
        (120, 28, 5, 1),
        (240, 28, 3, 2),
        (200, 14, 3, 1),
        (672, 14, 5, 2),
        (960, 7, 5, 1),
        (512, 16, 7, 1),
        (5, 7, 3, 1),
        (3, 9, 2, 2),
    ):
        kinds = [("bf16", True)]
        kinds += [("bf16", False), ("fp32", True)] if channels in (5, 64, 120, 512) else []
        kinds += [("fp16", True)] if channels in (72, 672) else []
        for dtype, last in kinds:
            align = 16 // TORCH[dtype].itemsize if last and channels % 8 == 0 else 1
            form = ",channels_last" if last else ""
            name = f"{dtype},{kernel}x{kernel}/{stride},{channels}x{columns}{form}"
            yield (
                name,
                dtype,
                last,
                align,
                channels,
                columns,
                (kernel, kernel),
                geometry(2, stride, kernel // 2),
            )


def depthwise() -> Iterator[tuple]:
    """The backward pass: every layer, a few with other activations and for norms alone."""
    for name, dtype, last, align, channels, columns, kernel, how in depthwise_layers():
        others = [("gelu", True)] if channels in (64, 120, 960) else []
        if channels in (64, 120, 960, 512):
            others.append(("none", False))  # 512: as ConvNeXt's 7x7
        for act, want in [("hardswish", True), *others]:
            places = triton.cdiv(columns, how.stride[1])
            tile = depthwise_module.backward_tile(
                TORCH[dtype], kernel, how, places, channels, want, last
            )
            constants = depthwise_constants(kernel, how, tile, "x gx grad kept", last, channels)
            constants |= depthwise_module.reaches(kernel, how, tile.run)
            constants |= {
                "ACT": act,
                "WANT_INPUT": want,
                "SPLIT": channels == 16,
                "LAST": last,
                "ALIGN": align,
                "WHOLE": tile.columns == places,
                "BEFORE": "hardswish",
                "GRADIENT_AT_OUTPUT": False,
                "MORE": want,
                "MEAN": act != "none",
            }
            pointers = ("x", "grad", "kept", "folded", "gx", "more", "of_mean")
            kinds = fp32(MOMENTS) | dict.fromkeys(pointers, f"*{dtype}")
            label = f"backward-{act}[{name},{tile.places}x{tile.run}x{tile.channels}]"
            run = depthwise_module.depthwise_backward_kernel
            options = {"num_warps": tile.num_warps}
            options["maxnreg"] = depthwise_module.most_registers(how, last)
            yield variant(label, run, kinds, constants, **options)


def depthwise_constants(
    kernel: tuple[int, int],
    how: ConvGeometry,
    tile: depthwise_module.DepthwiseTile,
    tensors: str,
    last: bool,
    channels: int,
) -> dict[str, Any]:
    """What both passes know of their geometry, their tile and the strides of their tensors."""
    constants: dict[str, Any] = dict(depthwise_module.constants(kernel, how))
    for tensor in tensors.split():
        constants[f"{tensor.upper()}_COLUMN"] = channels if last else 1
    if last:
        constants |= contiguous(tensors, "channel")
    return constants | {"COLUMNS": tile.columns, "CHANNELS": tile.channels}


def folded_depthwise() -> Iterator[tuple]:
    """The forward pass: every layer."""
    for name, dtype, last, align, channels, columns, kernel, how in depthwise_layers():
        places = triton.cdiv(columns, how.stride[1])
        tile = forward_depthwise.forward_tile(TORCH[dtype], kernel, how, places, channels, last)
        constants = depthwise_constants(kernel, how, tile, "x out", last, channels)
        constants |= {
            "ACT": "gelu",
            "LAST": last,
            "ALIGN": align,
            "WINDOW": depthwise_module.window_rows(kernel, how),
            "WHOLE": tile.columns == places,
            "RUN": tile.run,
        }
        kinds = dict.fromkeys(("x", "weight", "residual", "out", "kept"), f"*{dtype}")
        kinds |= fp32("bias means")
        forms = [("forward", False, kinds), ("forward-mean", True, kinds)]
        if dtype != "fp32":
            forms.append(("forward-mean-whole", True, kinds | {"means": f"*{dtype}"}))
        for label, mean, types in forms:
            flags = {
                "BEFORE": "hardswish",
                "OF_RESIDUAL": "none" if mean else "hardswish",
                "MEAN": mean,
            }
            flags |= {"KEEP": not mean, "ADD": not mean}
            yield variant(
                f"{label}[{name},{tile.places}x{tile.run}x{tile.channels}]",
                forward_depthwise.folded_depthwise_kernel,
                types,
                {**constants, **flags},
                num_warps=tile.num_warps,
                maxnreg=depthwise_module.most_registers(how, last),
            )


def one_pointwise(
    name: str,
    dtype: str,
    tile: pointwise.PointwiseTile,
    last: bool,
    *,
    backward: bool,
    **flags: Any,
) -> tuple:
    """Return a variant of a pointwise convolution, forward or backward, in one memory format."""
    kinds = fp32(MOMENTS + " bias")
    pointers = ("x", "gx", "grad", "kept", "out", "residual", "folded", "gate", "more", "of_gate")
    kinds |= dict.fromkeys(pointers, f"*{dtype}")
    if backward:
        layout = {
            "FEW": False,
            "BEFORE": "none",
            "GRADIENT_AT_OUTPUT": False,
            "GATE": False,
            "MORE": False,
        }
        flags = layout | flags
        kernel, layout = (
            pointwise.folded_pointwise_backward_kernel,
            {"X_LAST": last, "G_LAST": last},
        )
        ones = contiguous("x gx grad kept", "channel" if last else "column")
    else:
        kernel, layout, kinds["weight"] = (
            pointwise.folded_pointwise_kernel,
            {"LAST": last},
            f"*{dtype}",
        )
        ones = contiguous("x out", "channel") if last else {"x_column": 1, "out_position": 1}
        flags |= {"ACT": "gelu", "KEEP": True, "ADD": True, "OF_RESIDUAL": "hardswish"}
        flags = {"BEFORE": "hardswish", "GATE": True} | flags
    ones |= {"stride_h": 1, "stride_w": 1} if flags["PLAIN"] else {}
    blocks = {"POSITIONS": tile.positions, "OUTPUTS": tile.outputs, "INPUTS": tile.inputs}
    form = ",channels_last" if last else ""
    label = f"{name}[{dtype},{tile.positions}x{tile.outputs}x{tile.inputs}{form}]"
    how = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    if backward:
        changed = flags["MORE"] or flags["BEFORE"] != "none"
        how["maxnreg"] = pointwise.most_registers(tile, flags["FEW"], flags["PLAIN"], changed)
    return variant(label, kernel, kinds, {**ones, **layout, **blocks, **flags}, **how)


def folded_pointwise() -> list[tuple]:
    """Return variants of every tile, with the activations that take most registers.

    Each tile of the backward pass has the first activation that takes it; those of bf16 with
    channels last have Hardswish as well.
    """
    cases: dict[str, tuple] = {}
    seen = set()

    def add(*args: Any, **flags: Any) -> None:
        case = one_pointwise(*args, **flags)
        cases.setdefault(case[0], case)

    for dtype, sizes in (
        ("bf16", (16, 32, 64, 128, 256)),
        ("fp16", (64, 256)),
        ("fp32", (16, 32, 64, 128)),
    ):
        wide = 16 // TORCH[dtype].itemsize
        for outputs, inputs, align, last in product(sizes, sizes, (wide, 1), (True, False)):
            odd = "-odd" if align == 1 else ""
            how = {"PLAIN": True, "ALIGN": align}
            tile = pointwise.forward_tile(TORCH[dtype], outputs, inputs, align, changed=True)
            add(f"forward{odd}", dtype, tile, last, backward=False, **how)
            tile = pointwise.forward_tile(TORCH[dtype], outputs, inputs, align)
            add(
                f"forward-plain{odd}",
                dtype,
                tile,
                last,
                backward=False,
                **how,
                BEFORE="none",
                GATE=False,
            )
            for act in ("gelu", "hardswish", "relu"):
                tile = pointwise.backward_tile(TORCH[dtype], outputs, inputs, act, last, align)
                key = (dtype, tile, last, odd)
                main = act == "hardswish" and dtype == "bf16" and last and not odd
                if tile is not None and (main or key not in seen):
                    seen.add(key)
                    flags = how | {"ACT": act, "WANT_INPUT": True, "SPLIT": False}
                    add(f"backward-{act}{odd}", dtype, tile, last, backward=True, **flags)
                    if act == "hardswish":  # the activation is that of the inputs
                        flags |= {"ACT": "none", "BEFORE": act, "GATE": True, "MORE": True}
                        changed = pointwise.backward_tile(
                            TORCH[dtype], outputs, inputs, act, last, align, more=True, gated=True
                        )
                        if changed is not None:
                            add(
                                f"backward-before{odd}",
                                dtype,
                                changed,
                                last,
                                backward=True,
                                **flags,
                            )
            for positions in (16, 32, 64, 128, 256) if outputs == inputs == 64 else ():
                tile = pointwise.few_tile(TORCH[dtype], positions, align)
                if tile is None:
                    continue
                for act, before in (
                    ("hardswish", "none"),
                    ("relu", "relu"),
                    ("none", "hardswish"),
                    ("none", "relu"),
                ):
                    if act != "none" and positions > 64:
                        continue
                    flags = how | {
                        "ACT": act,
                        "WANT_INPUT": True,
                        "SPLIT": False,
                        "FEW": True,
                        "BEFORE": before,
                    }
                    flags |= {"GATE": act == "none", "MORE": before != "hardswish"}
                    add(
                        f"backward-few-{act}-{before}{odd}",
                        dtype,
                        tile,
                        last,
                        backward=True,
                        **flags,
                    )
    for outputs, inputs in ((64, 16), (32, 128), (128, 64), (256, 32)):
        tile = pointwise.backward_tile(torch.bfloat16, outputs, inputs, "hardswish", True, 8)
        how = {"ACT": "hardswish", "WANT_INPUT": True, "SPLIT": True, "PLAIN": True, "ALIGN": 8}
        for kind, other in (
            ("split", {}),
            ("strided", {"PLAIN": False}),
            ("norms", {"WANT_INPUT": False}),
        ):
            add(f"backward-{kind}", "bf16", tile, True, backward=True, **(how | other))
    tile = pointwise.forward_tile(torch.bfloat16, 128, 64, 8)
    add("forward-strided", "bf16", tile, True, backward=False, PLAIN=False, ALIGN=8)
    return list(cases.values())


VARIANTS: dict[str, Callable[[], Iterable[tuple]]] = {
    make.__name__: make
    for make in (
        broadcast_sums,
        channel_sums,
        conv_norms,
        depthwise,
        embedding_norms,
        fisher_root,
        fold_weights,
        folded,
        folded_depthwise,
        folded_pointwise,
        layer_norm_sums,
        linear_norms,
        row_norms,
        shape_images,
    )
}
