"""Counted launches and bytes are those that can be worked out by hand."""

import sys

import pytest
import torch
from torch import nn

import fastlr
from bench import noting, traffic
from fastlr import ops

pytest.importorskip("triton")


def test_operations_and_views():
    counted = traffic.Traffic()
    x, row = torch.ones(4, 6), torch.ones(6).expand(4, 6)
    with traffic._Operations(counted):
        x.view(24).t()  # views: nothing
        torch.empty(3)
        (x + row).sum()
        x.add_(1.0)
    assert dict(counted.launches) == {"add": 1, "sum": 1, "add_": 1}
    assert counted.bytes["add"] == 4 * (24 + 6 + 24)
    assert counted.bytes["sum"] == 4 * 25
    assert counted.bytes["add_"] == 4 * 24


def test_a_chunk_of_a_small_network():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 2)
    ).eval()
    counted = traffic.chunk_traffic(model, fastlr.ShapeImages((3, 8, 8)), 4, torch.bfloat16)
    assert counted.launches["fold_weights_kernel"] == 1
    assert counted.launches["paint_kernel"] == 1
    assert counted.launches["row_norms_kernel"] == 1  # weight and bias of the last layer
    # read x [4, 3, 64] and the folded weight and bias, write the output [4, 8, 64]
    assert 0 <= counted.bytes["folded_pointwise_kernel"] - 2 * (4 * 3 * 64 + 4 * 8 * 64 + 24) < 200
    assert torch.equal(torch.empty(2).fill_(1.0), torch.ones(2)), "all is as before"


def test_launches_are_noted_instead_of_made():
    counted = traffic.Traffic()
    with noting.noted(counted.add_kernel):
        norms = ops.run("dense_sq_norms", torch.ones(3, 4096))
    assert torch.equal(norms, torch.zeros_like(norms))
    assert [launch.touched for launch in counted.made] == [3 * 4096 * 4 + 3 * norms.element_size()]


def test_what_cudnn_does_beside_a_convolution_is_counted():
    x = torch.ones(2, 3, 4, 4, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    counted = traffic.Traffic()
    with traffic._Operations(counted):
        torch.nn.Conv2d(3, 8, 1, dtype=torch.bfloat16)(x)
    assert counted.bytes["padding of channels"] == 2 * (2 * 8 * 16) * 2
    assert counted.bytes["add_ of a bias"] == 2 * (2 * 8 * 16) * 2 + 8 * 2


def test_the_command(monkeypatch, capsys):
    command = "traffic shufflenet_v2_x0_5 --size 32 --dtype fp32 --chunk 2".split()
    monkeypatch.setattr(sys, "argv", command)
    traffic.main()
    out = capsys.readouterr().out
    assert "fold_weights_kernel" in out
    assert max(map(len, out.splitlines())) <= 80
