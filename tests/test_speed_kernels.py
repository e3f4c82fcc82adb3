"""The benchmark's cases: traffic counted by hand, definitions met, wrong kernels caught and not timed."""

from __future__ import annotations

import math
import sys
import types
from functools import partial

import pytest
import torch
from speed_helpers import CPU, measure_cases, text

from fastlr import ops
from fastlr.speed import cases, kernels, networks, run, tables, whole
from fastlr.speed.layers import Call, Draw, Layer


def test_every_op_with_a_kernel_has_cases_with_names_of_their_own():
    names = kernels.kernel_ops()
    assert len(names) >= 10
    assert not set(names) - set(cases.CASES), "add the op to fastlr/speed/cases.py"
    assert not set(cases.CASES) - set(ops.TABLE), "no such op"
    for name in names:
        labels = [case.label for case in cases.CASES[name]]
        assert len(set(labels)) == len(labels) > 0
        assert any(case.main for case in cases.CASES[name]) or name in (
            "shape_images",
            "shape_images_at",
            "rms_norm_sums",
        )


def test_counts_of_a_pointwise_layer_by_hand():
    draw = Draw(CPU, torch.bfloat16, batch=2)
    layer = Layer(16, 64, 1, 1, 112, "relu")
    assert layer.label == "1x1 16>64 @112 relu"
    x, out = 2 * 16 * 112 * 112, 2 * 64 * 112 * 112  # elements
    forward = cases.folded_conv(layer, draw)
    assert forward.bytes == 2 * x + 2 * out + 2 * 16 * 64 + 4 * 64
    assert forward.operations == 2 * out * 16
    backward = cases.folded_conv_backward(layer, draw)
    activations = 2 * (x + x + out + out)  # input, its gradient, output gradient, what was kept
    assert backward.bytes == activations + 2 * 16 * 64 + 4 * 16 * 64 + 4 * 64 + 2 * (8 + 2 * 4 * 64)
    assert backward.operations == 2 * forward.operations
    assert cases.conv_sq_norms(layer, draw).bytes == 2 * x + 2 * out + 2 * 8


def test_counts_of_a_depthwise_layer_by_hand():
    draw = Draw(CPU, torch.float32, batch=3)
    layer = Layer(240, 240, 3, 2, 28, "hardswish", depthwise=True)
    assert layer.label == "dw 3x3/2 240 @28 hardswish" and layer.groups == 240
    x, out = 3 * 240 * 28 * 28, 3 * 240 * 14 * 14
    forward = cases.folded_conv(layer, draw)
    assert forward.bytes == 4 * (x + 2 * out + 240 * 9 + 240)  # Hardswish keeps its input as well
    assert forward.operations == 2 * out * 9
    assert cases.folded_conv_moments(layer, draw).bytes == 4 * (x + out + 240 * 9 + 240) + 3 * (8 + 8 * 240)


def test_network_traffic_is_that_of_the_design():
    network = networks.build("mobilenet_v3_large", CPU, calibration=2)
    counted = networks.traffic(network.model, network.batch(1))
    each = [counted.bytes(stage) / 1e6 for stage in ("forward", "backward", "norms")]
    assert each == pytest.approx([17.8, 26.6, 9.0], abs=0.1) and counted.layers == 64
    assert counted.estimate_bytes() / 1e6 == pytest.approx(53.5, abs=0.1)
    assert 3 * counted.operations * 5000 == pytest.approx(6.5e12, rel=0.01)
    floor = whole.floors(
        network, counted, 10, {"copy": {"bytes_per_second": 1e9}, "matmul": {"operations_per_second": 1e20}}
    )
    pixels = 3 * 224 * 224 * 4
    assert floor["images"]["bytes"] == 10 * pixels
    assert floor["estimate"]["floor_seconds"] == pytest.approx(10 * (pixels + counted.estimate_bytes(4)) / 1e9)


def test_all_cases_agree_with_their_definitions():
    pairs = [(op, case) for op in cases.CASES for case in cases.CASES[op]]
    found = measure_cases(pairs)
    assert len(found.rows) == len(pairs) and not found.failures
    for row in found.rows:
        assert row["status"] == "ok" and row["bytes"] > 0 and row["seconds"] > 0 and row["repeats"] == 2
        assert row["bytes_per_second"] == pytest.approx(row["bytes"] / row["seconds"])
        assert row["share"] == pytest.approx(row["bytes_per_second"] / 1e10)


# --------------------------------------------------------------------------------------------------------- wrong kernels
def replace_op(monkeypatch, name: str, function) -> None:
    module = types.ModuleType("speed_test_ops")
    setattr(module, name, function)
    monkeypatch.setitem(sys.modules, "speed_test_ops", module)
    monkeypatch.setitem(ops.TABLE, name, {**ops.TABLE[name], "torch": "speed_test_ops"})
    ops.get.cache_clear()


@pytest.fixture(autouse=True)
def fresh_table():
    yield
    ops.get.cache_clear()


def off_in_the_last_sample(right, x, g):
    products, sums = right(x, g)
    products[-1] *= 1.01
    return products, sums


def leaves_something_unwritten(right, x, g):
    products, sums = right(x, g)
    return products.index_fill(0, torch.tensor([0]), torch.nan), sums


def forgets_an_output(right, x, g):
    return right(x, g)[0]


@pytest.mark.parametrize("spoil", [off_in_the_last_sample, leaves_something_unwritten, forgets_an_output])
def test_a_wrong_kernel_is_reported_and_not_timed(monkeypatch, spoil):
    replace_op(monkeypatch, "channel_sums", partial(spoil, ops.get("channel_sums", "torch")))
    pairs = [("channel_sums", cases.CASES["channel_sums"][0]), ("linear_sq_norms", cases.CASES["linear_sq_norms"][0])]
    found = measure_cases(pairs)
    wrong, right = found.rows
    assert wrong["status"] == "wrong" and "seconds" not in wrong and wrong["deviation"] > wrong["tolerance"]
    assert right["status"] == "ok" and "seconds" in right
    assert len(found.failures) == 1 and "channel_sums" in found.failures[0] and run.exit_code(found) == 1
    assert "WRONG" in text(tables.report(found))


def test_a_kernel_with_other_bits_each_time_is_wrong(monkeypatch):
    right = ops.get("channel_sums", "torch")
    replace_op(monkeypatch, "channel_sums", lambda x, g: tuple(t * (1 + 1e-6 * torch.rand(())) for t in right(x, g)))
    found = measure_cases([("channel_sums", cases.CASES["channel_sums"][0])])
    assert found.rows[0]["status"] == "wrong" and "other bits" in found.rows[0]["error"]


def test_a_kernel_that_fails_does_not_stop_the_others(monkeypatch):
    def broken(x, g):
        raise RuntimeError("illegal memory access")

    replace_op(monkeypatch, "channel_sums", broken)
    pairs = [(op, cases.CASES[op][0]) for op in ("channel_sums", "linear_sq_norms")]
    found = measure_cases(pairs)
    assert [row["status"] for row in found.rows] == ["error", "ok"]
    assert "illegal memory access" in found.failures[0] and "broken" in found.rows[0]["traceback"]


def test_what_a_kernel_does_not_cover_is_timed_in_plain_torch_and_said(monkeypatch):
    monkeypatch.setattr(kernels, "backend_for", lambda name, device: "triton")
    get = ops.get
    declined = lambda name, backend: (lambda *a, **k: NotImplemented) if backend == "triton" else get(name, backend)  # noqa: E731
    monkeypatch.setattr(ops, "get", declined)
    found = measure_cases([("channel_sums", cases.CASES["channel_sums"][0])])
    row = found.rows[0]
    assert (row["status"], row["backend"]) == ("not covered", "torch") and row["seconds"] > 0 and not found.failures


def test_deviation_is_of_each_sample():
    ref = torch.tensor([[1e6, 0.0], [1.0, 2.0]]).double()
    out = ref.clone()
    out[1, 0] += 0.1
    assert kernels.deviation(out, [0, 1], [ref]) == pytest.approx(0.1 / math.sqrt(5))
    assert kernels.deviation((out, out), [0, 1], [ref]) == math.inf
    assert kernels.deviation(torch.full_like(ref, torch.nan), [0, 1], [ref]) == math.inf
    assert kernels.deviation(torch.zeros(2, 2), [0, 1], [torch.zeros(2, 2).double()]) == 0.0


def test_spoiling_leaves_the_arguments_alone():
    x = torch.ones(3)
    out = torch.ones(3)
    kernels.spoil((out, x.view(3, 1)), Call((x,), (0,), 1, 1, 1.0))
    assert out.isnan().all() and not x.isnan().any()


def test_late_cases_are_dropped_and_named():
    found = measure_cases([("channel_sums", cases.CASES["channel_sums"][0])], limit=-1.0)
    assert found.dropped == ["kernels: channel_sums: 64 @112"] and not found.failures
