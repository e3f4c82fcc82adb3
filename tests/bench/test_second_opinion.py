"""What cuxray says beside our counts: where the two differ, the table says why."""

import io

from expected import needs_triton
from pytest import mark

pytestmark = needs_triton


def block(label, count, *following, stall=2):
    from bench import sass

    return sass.Block(label, [sass.Instruction("FADD", stall=stall)] * count, list(following))


def with_an_end_behind_its_loop():
    """A loop of three blocks whose last branch is followed by code that nothing jumps to."""
    from bench import sass

    blocks = [block("", 9, 1), block(".L_1", 21, 3, 2), block("", 91, 3), block(".L_0", 4, 1, 4)]
    blocks += [block("", 295, 5), block("", 2), block(".L_2", 1, 6)]
    return sass.Code(blocks, [sass.Loop(1, frozenset({1, 2, 3}))])


def test_a_trip_has_the_blocks_of_its_loop():
    from bench import second_opinion

    code = with_an_end_behind_its_loop()
    assert second_opinion.trips(code) == {".L_1": (116, 232)}
    assert second_opinion.trips_to_the_next_label(code) == {".L_1": (413, 826)}


@mark.parametrize(
    ("here", "there", "why"),
    [
        (116, 120, ""),
        (116, 413, "cuxray counts on behind the loop's last branch, to the next label"),
        (116, 300, "not known"),
        (300, 116, "not known"),
        (0, 12, "a loop to cuxray alone"),
        (12, 0, "a loop to us alone"),
        (0, 0, ""),
    ],
)
def test_counts_that_are_apart_are_explained(here, there, why):
    from bench import second_opinion

    assert second_opinion.why_apart(here, there, to_next_label=413) == why


def test_the_table_has_both_and_the_reasons():
    from rich.console import Console

    from bench import second_opinion
    from bench.second_opinion import Opinion, Trip

    code = with_an_end_behind_its_loop()
    ours = Opinion(16, second_opinion.trips(code))
    theirs = Opinion(48, {".L_1": Trip(413, 240), ".L_9": Trip(5, 9)})
    rows = list(second_opinion.rows_of("1 paint", ours, theirs, code))
    assert [(row.what, row.here, row.there) for row in rows] == [
        ("resident warps", 16, 48),
        ("instructions of .L_1", 116, 413),
        ("stalls of .L_1", 232, 240),
        ("instructions of .L_9", 0, 5),
        ("stalls of .L_9", 0, 9),
    ]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(second_opinion.table_of(rows, {"1 paint": 8}))
    printed = console.export_text().splitlines()
    assert printed[1].split() == [
        "1",
        "paint",
        "resident",
        "warps",
        "16",
        "48",
        "8",
        "not",
        "known",
    ]
    assert (
        printed[2]
        .rstrip()
        .endswith("cuxray counts on behind the loop's last branch, to the next label")
    )
    assert printed[3].split()[-2:] == ["232", "240"]
    assert printed[4].rstrip().endswith("a loop to cuxray alone")
