"""Results in notebooks: HTML that parses, the chart, and the same numbers as in the text."""

import pytest
import torch
from expected import refused
from page import Page
from torch import nn

import fastlr


def model():
    torch.manual_seed(0)
    parts = {
        "body<1>": nn.Linear(6, 5),
        "act": nn.ReLU(),
        "norm": nn.BatchNorm1d(5),
        "head": nn.Linear(5, 3),
    }
    net = nn.Sequential()
    for name, part in parts.items():
        net.add_module(name, part)
    return net.eval()


X = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))


def test_estimate_as_html():
    estimate = fastlr.estimate(model(), fastlr.TensorInputs(X), 40, dtype=torch.bfloat16)
    page = Page(estimate._repr_html_())
    assert page.rows[0][:3] == ["largest of 3 modules", "E||grad||^2", "share"]
    assert {row[0] for row in page.rows[1:]} == {"body<1>", "norm", "head"}
    assert sum(float(row[2].rstrip(" %")) for row in page.rows[1:]) == pytest.approx(100, abs=0.2)
    assert f"± {estimate.stderr:.2g}"[:4] in page.text
    assert "autocast bfloat16" in page.text
    assert "rule 6" in page.text
    one = fastlr.estimate(model(), fastlr.TensorInputs(X), 1)
    assert "(n = 1: no standard error)" in Page(one._repr_html_()).text


def test_support_report_as_html():
    net = model()
    report = fastlr.support_report(net, X)
    page = Page(report._repr_html_())
    assert page.rows[0] == ["parameter", "node", "samples along", "route", "deviation"]
    assert [row[0] for row in page.rows[1:]] == [
        "body<1>.{weight,bias}",
        "norm.{weight,bias}",
        "head.{weight,bias}",
    ]
    for line in str(report).splitlines()[-2:]:
        assert line in page.text
    assert str(report).startswith("parameter")
    assert "6 parameters: 6 by rule" in str(report)


def test_plot(tmp_path):
    estimate = fastlr.estimate(model(), fastlr.TensorInputs(X), 40)
    figure = estimate.plot(tmp_path / "layers.svg", title="Shares", most=2)
    assert "Shares" in (tmp_path / "layers.svg").read_text() or figure.get_suptitle() == "Shares"
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["body<1>", "norm", "head"]
    assert figure._repr_png_().startswith(b"\x89PNG")
    with refused("cannot write the figure"):
        estimate.plot(tmp_path / "no" / "layers.png")
