"""Replayed chunks: the same numbers as without, weights that change, programs that change, values that go wrong.

CUDA graphs need a GPU. Here a recorder that runs the captured function again, into the memory of the first run, stands in
for one: what is tested is everything around it. With a GPU the same tests run on real graphs too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorders import DEVICES, Again
from torch import Tensor, nn

import fastlr
from fastlr.replay import CudaRecorder, Replay, Replays, fingerprint

HIDDEN = {"factor": 1.0}


def hidden_factor() -> float:
    """A number that a forward pass reads where a fingerprint does not look."""
    return HIDDEN["factor"]


class Net(nn.Module):
    """Convolution, batch norm, ReLU, linear, and numbers that the forward pass reads."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(8 * 7 * 7, 3)
        self.state = {"factor": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x)) * self.state["factor"] * hidden_factor()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def estimator(
    model: nn.Module, n: int = 40, graphs: bool = True, inputs: Any = None, **how: Any
) -> fastlr.LocalRedundancy:
    inputs = inputs or fastlr.ShapeImages((3, 16, 16))
    made = fastlr.LocalRedundancy(model, inputs, n, batch_size=8, **how)
    if not graphs:
        made._replays = Replays(None, made.engine)
    elif made.device.type == "cpu":
        made._recorder = Again
        made._replays = Replays(made._replay, made.engine)
    return made


def net(device: str) -> Net:
    torch.manual_seed(0)
    return Net().to(device)


def agree(a: fastlr.Estimate, b: fastlr.Estimate) -> None:
    torch.testing.assert_close(a.per_sample, b.per_sample, rtol=1e-6, atol=0)
    for name, value in a.per_parameter.items():
        assert value == pytest.approx(b.per_parameter[name], rel=1e-6)


@pytest.mark.parametrize("n", [40, 44])
def test_same_numbers(device: str, n: int) -> None:
    model = net(device)
    with_graphs, without = estimator(model, n), estimator(model, n, graphs=False)
    for _ in range(2):
        agree(with_graphs.measure(), without.measure())
    assert set(with_graphs._replays.held) == ({8, 4} if n == 44 else {8})
    assert torch.equal(with_graphs.measure().per_sample, with_graphs.measure().per_sample)


def test_weights_may_change_in_between(device: str) -> None:
    model = net(device)
    graphs, plain = estimator(model), estimator(model, graphs=False)
    graphs.measure()
    replay = graphs._replays.held[8]
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model.train()
        model(torch.randn(16, 3, 16, 16, device=device)).square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()
        agree(graphs.measure(), plain.measure())
    assert graphs._replays.held[8] is replay and not graphs._replays.note


def test_weights_that_moved_are_captured_anew(device: str) -> None:
    model = net(device)
    graphs, plain = estimator(model), estimator(model, graphs=False)
    graphs.measure()
    replay = graphs._replays.held[8]
    model.head.weight.data = torch.randn_like(model.head.weight)
    agree(graphs.measure(), plain.measure())
    assert graphs._replays.held[8] is not replay


@pytest.mark.parametrize("change", ["hook", "number", "in a dict", "frozen", "module"])
def test_program_that_changed_is_seen(device: str, change: str) -> None:
    model = net(device)
    graphs = estimator(model)
    graphs.measure()
    if change == "hook":
        model.head.register_forward_hook(lambda module, inputs, result: result * 2)
    elif change == "number":
        model.features[1].eps = 0.5
    elif change == "in a dict":
        model.state["factor"] = 3.0
    elif change == "frozen":
        model.head.bias.requires_grad_(False)
    else:
        model.features[2] = nn.Softplus()
    agree(graphs.measure(), estimator(model, graphs=False).measure())


def test_the_program_is_compared_once_a_measurement(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net(device)
    graphs = estimator(model)
    graphs.measure()
    asked: list[nn.Module] = []
    monkeypatch.setattr("fastlr.replay.fingerprint", lambda model: asked.append(model) or fingerprint(model))
    graphs.measure()
    assert len(asked) == 1  # of five chunks
    monkeypatch.setattr(Replay, "run", lambda self, start: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        graphs.measure()
    monkeypatch.undo()
    model.features[1].eps = 0.5  # while no measurement was under way
    agree(graphs.measure(), estimator(model, graphs=False).measure())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_after_a_capture_that_failed_all_is_as_before() -> None:
    device, x = torch.device("cuda", torch.cuda.current_device()), torch.ones(3, device="cuda")
    before = torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        CudaRecorder(device).capture(lambda: x.sum().item())
    assert torch.cuda.current_stream() == before
    recorder = CudaRecorder(device)
    result = recorder.capture(lambda: x * 2)
    x.fill_(4)
    recorder.replay()
    torch.cuda.synchronize()
    assert result.tolist() == [8.0] * 3


def test_hidden_state_is_seen_in_the_output(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net(device)
    graphs = estimator(model)
    before = graphs.measure()
    if device == "cpu":  # the stand-in runs the program: keep it from noticing
        graphs._replays.held[8].recorder.replay = lambda: None
    monkeypatch.setitem(HIDDEN, "factor", 3.0)
    after = graphs.measure()
    agree(after, estimator(model, graphs=False).measure())
    assert after.value != before.value and any("dropped" in note for note in after.notes)


def test_values_that_are_not_finite_raise_as_without(device: str) -> None:
    model = net(device)
    graphs = estimator(model)
    graphs.measure()
    with torch.no_grad():
        model.head.weight[0, 0] = float("nan")
    with pytest.raises(fastlr.errors.NonFiniteError):
        graphs.measure()
    with torch.no_grad():
        model.head.weight[0, 0] = 0.0
    agree(graphs.measure(), estimator(model, graphs=False).measure())


def test_inputs_without_a_kernel_are_copied(device: str) -> None:
    model = net(device)
    inputs = fastlr.TensorInputs(torch.randn(40, 3, 16, 16))
    agree(estimator(model, inputs=inputs).measure(), estimator(model, graphs=False, inputs=inputs).measure())


def test_autocast(device: str) -> None:
    model = net(device)
    low = {"dtype": torch.bfloat16}
    a, b = estimator(model, **low).measure(), estimator(model, graphs=False, **low).measure()
    torch.testing.assert_close(a.per_sample, b.per_sample, rtol=1e-2, atol=0)


def test_a_loop_is_not_captured(device: str) -> None:
    class Looped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(4, 4))
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = x.flatten(1)[:, :4]
            return self.head(torch.linalg.matrix_exp(self.a * x[:, :1, None])[:, 0])

    graphs = estimator(Looped().to(device))
    graphs.measure()
    replayed = graphs._replays.held
    if any(route != "rule" for route in graphs._routes.values()):
        assert not replayed


def test_failed_capture_is_told_once_and_measured_without(device: str) -> None:
    class Broken(Again if device == "cpu" else CudaRecorder):  # type: ignore[misc]
        def capture(self, function: Callable[[], Any]) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

    model = net(device)
    graphs = estimator(model)
    graphs._recorder = Broken
    result = graphs.measure()
    agree(result, estimator(model, graphs=False).measure())
    assert any("not permitted" in note for note in result.notes)


def test_fingerprint_knows_the_model() -> None:
    model = Net()
    before = fingerprint(model)
    assert before == fingerprint(model)
    with torch.no_grad():
        model.head.weight.add_(1.0)
    assert before == fingerprint(model), "values may change"


def test_graphs_go_with_the_estimator() -> None:
    import gc
    import weakref

    graphs = estimator(Net())
    graphs.measure()
    held = weakref.ref(graphs._replays.held[8])
    assert isinstance(held(), Replay)
    del graphs
    gc.collect()
    assert held() is None
