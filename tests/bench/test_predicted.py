"""Instructions are counted in the disassembly of what is launched, loops by their trips."""

import json
from pathlib import Path

import torch
from expected import needs_triton
from pytest import approx, fixture, mark, raises

from bench import execution, gpu_model, noting, predicted, sass, traffic, trips
from bench.sass import Instruction
from fastlr import ops

pytestmark = needs_triton
H100 = gpu_model.GPUS["h100"]
ROOT = Path(__file__).parents[2]
HEADLINE = "mobilenet_v3_large"


def recorded(gpu="h100"):
    return json.loads((ROOT / f"bench/results/compile/{HEADLINE}-{gpu}.json").read_text())["ms"]


@fixture(scope="module")
def launched():
    """Squared norms of three rows of 4,096 and of 8,192 numbers: a warp's four and eight trips."""
    found = traffic.Traffic()
    with noting.noted(found.add_kernel):
        for width in (4096, 8192):
            ops.run("dense_sq_norms", torch.ones(3, width))
    return found.made, predicted.compiled_variant(found.made[0].case, H100.architecture)


def test_a_warp_does_as_much_as_its_loops_have_trips(launched):
    made, variant = launched
    short, long = (predicted.counted(launch, variant) for launch in made)
    assert (short.loaded, long.loaded) == (4096 * 4 / 128, 8192 * 4 / 128)
    (inner,) = (loop for loop in variant.code.loops if len(loop.blocks) == 1)
    body = variant.code.blocks[inner.head].instructions
    assert long.instructions - short.instructions == 4 * len(body)


def test_a_launch_takes_the_longest_of_its_times(launched):
    made, variant = launched
    row = predicted.row_of(made[0], variant, H100)
    assert (row.programs, row.warps, row.touched) == (3, 4, 3 * 4096 * 4 + 3 * 8)
    assert row.terms.bound == "latency" and row.terms.seconds > row.terms.issue
    kernel = predicted.summary([row, row], 5000, 1000, "h100")["kernels"][0]
    assert kernel["ms"] == approx(2 * 5e3 * row.terms.seconds)


def test_a_loop_that_is_not_known_is_refused():
    with raises(KeyError, match="paint_kernel has a loop over row: enter its trips"):
        trips.trips("paint_kernel", ["row"], {"COUNT": 10})


def test_a_loop_is_named_by_its_comparison_where_the_branch_has_another_line():
    file = "shape_images.py"
    header = (ROOT / "kernels" / file).read_text().partition("for step in")[0].count("\n") + 1
    compare = Instruction("UISETP", "UP0, UR4", line=(file, header))
    block = sass.Block("", [compare, Instruction("BRA", "UP0, `(.L)", line=(file, 1))], [0], [0])
    assert trips.loop_names(sass.Code([block], [sass.Loop(0, {0})])) == ["step"]


def test_loads_before_the_first_wait_are_in_flight():
    loads = [Instruction("LDG.E.128", sets=0), Instruction("LDG.E.64", sets=1)]
    block = sass.Block("", [*loads, Instruction("FADD", waits=(0,)), Instruction("EXIT")])
    assert execution.alone(sass.Code([block], []), [], 500) == (500 + 2, 16 + 8)


def test_copies_of_a_loop_share_its_trips():
    """Ten trips: two of the one that the assembler made of four, two of the rest."""
    wide, rest = ([Instruction("LDG.E")] * count for count in (4, 1))
    blocks = [sass.Block("", wide, [0, 1], [0]), sass.Block("", rest, [1], [1])]
    code = sass.Code(blocks, [sass.Loop(number, frozenset([number])) for number in (0, 1)])
    assert execution.unrolled(code, ["i", "i"], [10, 10]) == [2, 2]


def test_what_cudnn_does_beside_a_convolution_is_counted():
    x = torch.ones(2, 3, 4, 4, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    counted = traffic.Traffic()
    with traffic._Operations(counted):
        torch.nn.Conv2d(3, 8, 1, dtype=torch.bfloat16)(x)
    assert counted.bytes["padding of channels"] == 2 * (2 * 8 * 16) * 2
    assert counted.bytes["add_ of a bias"] == 2 * (2 * 8 * 16) * 2 + 8 * 2


def test_the_page_says_what_is_recorded():
    page = (ROOT / "docs/speed.md").read_text()
    assert f"**Predicted, not measured: {recorded():.0f} ms**" in page
    assert f"for an A100 gives {recorded('a100'):.0f} ms" in page


@mark.long
@mark.timeout(3600)
def test_the_headline_is_predicted_as_recorded():
    rows = predicted.predicted(traffic.of_network(HEADLINE).made, H100)
    found = predicted.summary(rows, 5000, 1000, "h100")
    assert found["ms"] == approx(recorded(), rel=0.1)
