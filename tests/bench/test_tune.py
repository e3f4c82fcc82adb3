"""Tuning tries and takes block sizes by a stand-in clock; kernels launch with the table's."""

import json
from contextlib import contextmanager
from functools import partial

import torch
from expected import needs_triton
from pytest import raises

from bench import noting, tune
from bench.convolution_cases import geometry
from fastlr import ops
from fastlr.ops import dispatch, gram, tuning
from fastlr.ops.block import Block, Loaded

pytestmark = needs_triton


def asked(**shape):
    """What the forward kernel of a pointwise convolution asks."""
    from fastlr.kernels.folded_pointwise import forward_tile

    with tune.noting() as found:
        forward_tile(torch.bfloat16, **{"outputs": 64, "inputs": 32, "align": 8} | shape)
    ((key, what),) = found.items()
    return key, what


def test_the_fastest_that_is_right_is_taken_where_it_saves_enough():
    (a, of_a) = asked()
    (b, of_b) = asked(outputs=128)
    (c, of_c) = asked(inputs=64)
    warps = of_a.tile.num_warps

    def clock(key, fields):
        if key == c:
            # Without the rule's own there is nothing to compare with.
            return None if not fields else 0.1
        if fields == {"positions": of_a.tile.positions // 2}:
            return None  # wrong results, however fast
        gain = {a: 0.5, b: 0.96}[key]
        return (
            gain
            if fields == {"num_warps": warps * 2 if key == a else of_b.tile.num_warps // 2}
            else 1.0
        )

    found = tune.choose({a: of_a, b: of_b, c: of_c}, clock)
    assert found == {a: {"num_warps": warps * 2}}


def test_eight_configurations_are_tried_that_the_kernel_may_have():
    _, what = asked()
    tried = tune.candidates(what)
    assert tried[0] == {}
    assert len(tried) == len({str(fields) for fields in tried}) == tune.CONFIGURATIONS
    assert all(set(fields) <= set(what.free) for fields in tried)
    for fields in tried[1:]:
        assert what.tile._replace(**fields) != what.tile
        assert all(value >= 16 for field, value in fields.items() if not field.startswith("num_"))
    fixed = tune.candidates(what._replace(free=("num_warps",)))
    assert {tuple(fields) for fields in fixed} == {(), ("num_warps",)}


def test_a_flag_is_switched():
    with tune.noting() as found:
        few = gram.norms_form(torch.bfloat16, 512, 512, 9, 81, 49)
    (what,) = found.values()
    assert few.gram
    assert tune.candidates(what) == [{}, {"gram": False}]


def test_calls_that_kernels_decline_are_recorded_and_timed_by_plain_torch(monkeypatch):
    from fastlr.kernels import launching

    monkeypatch.setattr(gram, "LEAST_WEIGHTS", 1 << 16)
    x = torch.ones(2, 256, 3, 4, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    weight = torch.ones(256, 256, 1, 1)
    block = Block(weight, weight.bfloat16(), torch.ones(4, 256), "none", geometry(2))
    with tune.noting() as found, launching.noting(lambda *launch: None):
        assert ops.get("folded_conv_sq_norms", "triton")(x, x, block) is NotImplemented
    (key,) = found
    monkeypatch.setattr(dispatch, "_by_kernel", lambda *call: NotImplemented)
    recorded, calls = {}, {}
    with ops.using("triton"), tune.recording(recorded, calls):
        ops.run("folded_conv_sq_norms", x, x, block)
    assert set(recorded) == {key}
    assert [name for name, _ in calls[key]] == ["folded_conv_sq_norms"]
    of_weight, *_ = tune.results("folded_conv_sq_norms", (x, x, block))
    torch.testing.assert_close(of_weight, torch.full((2,), 256.0**2 * 12**2, dtype=torch.float64))
    launched = []
    with (
        tune.forcing(key, {"gram": False}),
        launching.noting(lambda *launch: launched.append(launch)),
    ):
        assert ops.get("folded_conv_sq_norms", "triton")(x, x, block) is not NotImplemented
    assert found, "the other form is a kernel's"


def test_all_that_is_timed_is_compiled_before(monkeypatch):
    noted = []

    def note(*launch):
        noted.append(launch)

    monkeypatch.setattr(tune, "side_by_side", lambda run, device: run(note))
    x = torch.ones(2, 32, 3, 4, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    weight = torch.ones(64, 32, 1, 1, dtype=torch.bfloat16)
    call = Loaded(x), Block(weight, weight, torch.ones(4, 64), "none", geometry(2))
    with tune.noting() as found, noting.noted(lambda *launch: None):
        ops.run("folded_conv", *call)
    ((key, what),) = found.items()
    tune.compile_all({key: what}, {key: [("folded_conv", call)]})
    assert len({str(constants) for _, _, constants in noted}) == tune.CONFIGURATIONS


def launched():
    """The positions and warps with which a small pointwise convolution is launched."""
    x = torch.ones(2, 32, 3, 4, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    weight = torch.ones(64, 32, 1, 1, dtype=torch.bfloat16)
    given = Loaded(x), Block(weight, weight, torch.ones(4, 64), "none", geometry(2))
    found = []
    with noting.noted(lambda kernel, args, options, programs: found.append(options)):
        ops.run("folded_conv", *given)
    return found[0]["POSITIONS"], found[0]["num_warps"]


def test_kernels_are_launched_with_the_block_sizes_of_the_table(monkeypatch):
    with tune.noting() as found:
        before = launched()
    (key,) = found
    monkeypatch.setattr(tuning, "table", lambda: {"9.0": {key: {"positions": 16}}})
    for architecture, positions in (("8.0", before[0]), ("9.0", 16)):
        monkeypatch.setattr(tuning, "architecture", lambda name=architecture: name)
        assert launched() == (positions, before[1])
    with tune.forcing(key, {"num_warps": 2}):
        assert launched() == (before[0], 2), "what is tried is tried alone"


def test_block_sizes_are_those_of_the_device_of_the_tensors(monkeypatch):
    """Not those of the current device, which is the first of two here."""
    from fastlr.kernels import folded

    current = [0]

    @contextmanager
    def on_the_second(tensor):
        current[0] = 1
        yield
        current[0] = 0

    with tune.noting() as found:
        launched()
    (key,) = found
    of_each = {"8.0": {key: {"positions": 32}}, "9.0": {key: {"positions": 16}}}
    monkeypatch.setattr(tuning, "table", lambda: of_each)
    monkeypatch.setattr(tuning, "_capability", ["8.0", "9.0"].__getitem__)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    assert launched()[0] == 32
    monkeypatch.setattr(folded, "on_device", on_the_second)
    assert launched()[0] == 16


def test_another_architecture_may_be_assumed():
    from fastlr.kernels.folded_pointwise import few_tile, most_registers

    tile = few_tile(torch.bfloat16, 196, 8)
    found = {}
    for arch in (80, 90, 100):
        with tuning.assuming(arch):
            found[tuning.architecture()] = most_registers(tile, True, True, False)
    assert found == {"8.0": 224, "9.0": 128, "10.0": 128}
    assert tuning.architecture() == ""


def test_the_table_has_fields_that_their_kernels_may_have():
    from fastlr.kernels import depthwise, folded_depthwise, folded_pointwise

    modules = {
        m.__name__.rpartition(".")[2]: m
        for m in (depthwise, folded_depthwise, folded_pointwise, gram)
    }
    assert tuning.TABLE.exists()
    for entries in tuning.table().values():
        for key, fields in entries.items():
            module, _, rule = key.partition("(")[0].partition(".")
            assert fields
            assert set(fields) <= set(getattr(modules[module], rule).free)


def test_a_run_that_is_killed_keeps_what_it_has_found(tmp_path):
    """Entries of an earlier run stay until their shape is measured again."""
    asked_of = dict(asked(outputs=outputs) for outputs in (16, 32, 64))
    first, second, third = sorted(asked_of)
    table = tmp_path / "tuned.json"
    earlier = {key: {"num_warps": 1} for key in (second, third)}
    table.write_text(json.dumps({"8.0": {"a": {}}, "9.0": earlier}))

    def clock(key, fields):
        if key == third:
            raise KeyboardInterrupt
        return 0.5 if fields and key == first else 1.0

    with raises(KeyboardInterrupt):
        tune.choose(asked_of, clock, partial(tune.write_entry, table, "9.0"))
    tried = tune.candidates(asked_of[first])[1]
    assert json.loads(table.read_text()) == {
        "8.0": {"a": {}},
        "9.0": {first: tried, third: {"num_warps": 1}},
    }
    assert [path.name for path in tmp_path.iterdir()] == ["tuned.json"]
    tune.write_entry(tmp_path / "new.json", "9.0", first, {})
    assert json.loads((tmp_path / "new.json").read_text()) == tuning.table() | {"9.0": {}}
