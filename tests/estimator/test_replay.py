"""Replayed chunks give the numbers of launched ones, as weights, programs and values change.

CUDA graphs need a GPU. Here a recorder stands in for one: it runs the captured function again, into
the memory of the first run. With a GPU, real graphs are tested too.
"""

import copy
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest import mock

import torch
from expected import failing, needs_gpu, warned
from pytest import approx, fixture, mark, raises
from recorders import DEVICES, MeasureAgain, Tape, Waits
from single_samples import Written
from torch import nn

import fastlr
from fastlr.estimator.capture import CudaRecorder, graph_key
from fastlr.estimator.cuda_graph import Replay
from fastlr.ghost.model.writes import _Held
from fastlr.ghost.trust import agreement
from fastlr.integrations import Monitor

HIDDEN = {"factor": 1.0}


def hidden_factor():
    """A number that a forward pass reads outside of the model."""
    return HIDDEN["factor"]


class Captured(nn.Module):
    """Convolution, batch norm, ReLU, linear, and numbers that the forward pass reads."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()
        )
        self.head = nn.Linear(8 * 7 * 7, 3)
        self.state = {"factor": 1.0}

    def forward(self, x):
        return self.head(self.features(x)) * self.state["factor"] * hidden_factor()


class Made(fastlr.ShapeImages):
    """Made within the capture, as by the kernel."""

    def identity(self, used, seed):
        return f"made:{used} of seed {seed}"

    def from_device(self, n, *, seed, device, dtype):
        return lambda first: self.at(
            first + torch.arange(n, device=device), seed=seed, dtype=dtype or torch.float32
        )


@fixture(params=DEVICES)
def device(request):
    return request.param


def estimator(model, n=40, graphs=True, inputs=None, **how):
    inputs = inputs or fastlr.ShapeImages((3, 16, 16))
    made = fastlr.LocalRedundancy(model, inputs, n, batch_size=8, **how)
    if not graphs:
        made.chunks.replays.recorder = None
    elif made.view.device.type == "cpu":
        made.chunks.replays.recorder = MeasureAgain
    return made


def captured_net(device):
    torch.manual_seed(0)
    return Captured().to(device)


def agree(a, b):
    torch.testing.assert_close(a.per_sample, b.per_sample, rtol=1e-6, atol=0)
    for name, value in a.per_parameter.items():
        assert value == approx(b.per_parameter[name], rel=1e-6)


@mark.parametrize("n", [40, 44])
def test_same_numbers(device, n):
    model = captured_net(device)
    with_graphs = estimator(model, n)
    without = estimator(model, n, graphs=False)
    for _ in range(2):
        agree(with_graphs.measure(), without.measure())
    # A shorter last chunk has no graph of its own.
    assert set(with_graphs.chunks.replays.held) == {8}
    assert torch.equal(with_graphs.measure().per_sample, with_graphs.measure().per_sample)


def test_a_shorter_last_chunk_is_the_end_of_a_whole_one(device):
    """It is filled up with earlier inputs, which values, sums and checks leave out."""
    asked = []

    class Asked(fastlr.TensorInputs):
        def batch(self, start, stop, **how):
            asked.append((start, stop))
            return super().batch(start, stop, **how)

    torch.manual_seed(1)
    inputs, model = Asked(torch.randn(21, 3, 16, 16)), captured_net(device)
    graphs = estimator(model, 21, inputs=inputs)
    first = graphs.measure()
    asked.clear()
    again = graphs.measure()
    assert [span for span in asked if span[1] - span[0] == 8] == [(0, 8), (8, 16), (13, 21)]
    plain = estimator(model, 21, graphs=False, inputs=inputs).measure()
    for result in (first, again):
        agree(result, plain)
        assert result.n == 21
        assert sum(result.per_parameter.values()) == approx(result.value)


def test_a_measurement_reads_from_the_device_once_all_is_launched(monkeypatch):
    """It reads flags, values and sums after all launches and audits."""
    graphs = estimator(captured_net("cpu"), inputs=Made((3, 16, 16)))
    graphs.measure()
    # As on a GPU, where neither is asked.
    monkeypatch.setattr(_Held, "needs_put_back", True)
    monkeypatch.setattr(agreement, "_are_close", lambda *_: False)
    events = []
    waits = Waits(events)
    recorder = graphs.chunks.replays.held[8].recorder
    kept = recorder.replay

    def replay():
        waits.quiet = True  # a graph would run nothing of Python
        kept()
        waits.quiet = False
        events.append("launch")

    monkeypatch.setattr(recorder, "replay", replay)
    monkeypatch.setattr(
        "fastlr.estimator.cuda_graph.graph_key",
        lambda model: events.append("program") or graph_key(model),
    )
    with waits.noting(monkeypatch):
        assert graphs.measure().audits == 5
    assert events == ["program"] + ["launch"] * 5 + ["copied"] * 3


@mark.parametrize("read", ["item", "__bool__", "tolist", "nonzero", "cpu"])
def test_a_wait_would_be_seen(read, monkeypatch):
    events = []
    x = torch.ones(1)
    with Waits(events).noting(monkeypatch):
        getattr(x * 2, read)()
        before = len(events)
        y = x.cpu() + 1
        assert bool(y > 0)
        assert float(y) == 2.0
        assert y.tolist() == [2.0]
    assert before == 1 and events[1:] == ["copied"], "what was copied is read on the host"


def test_outputs_that_need_a_closer_look_are_flagged(monkeypatch):
    """For whatever would not pass by the size of the difference alone."""
    monkeypatch.setattr(agreement, "_are_close", lambda *_: False)  # asked on a CPU only
    x = torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    masked = torch.where(torch.arange(30) == 3, -1e9, x)

    def flagged(own, got):
        return bool(agreement.outputs_need_full_check(own, got, 1e-3, 0))

    assert not flagged(x, x)
    assert not flagged(x, x * (1 + 1e-5))
    assert not flagged(masked, masked)
    assert flagged(x, x + 0.1)
    assert flagged(masked, masked + 0.1 * (masked > -1))
    assert flagged(x, torch.where(x == x[2, 7], torch.nan, x))


def test_memory_that_a_graph_reads_outlives_what_held_it():
    """A graph must not read memory that was given back."""

    class Shifted(Captured):
        def __init__(self):
            super().__init__()
            self.table = {"shift": torch.ones(40, 3)}

        def forward(self, x):
            return super().forward(x) * self.table["shift"][0]

    torch.manual_seed(0)
    model = Shifted()
    graphs = estimator(model)
    graphs.measure()
    held = graphs.chunks.replays.held[8].captured._held
    assert model.table["shift"].data_ptr() in {t.data_ptr() for t in held}
    model.table["shift"] = torch.full((40, 3), 2.0)
    agree(graphs.measure(), estimator(model, graphs=False).measure())


def test_weights_may_change_in_between(device):
    model = captured_net(device)
    graphs, plain = estimator(model), estimator(model, graphs=False)
    graphs.measure()
    replay = graphs.chunks.replays.held[8]
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model.train()
        model(torch.randn(16, 3, 16, 16, device=device)).square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()
        agree(graphs.measure(), plain.measure())
    assert graphs.chunks.replays.held[8] is replay
    assert not graphs.chunks.replays.note


def test_weights_that_moved_are_captured_anew(device):
    model = captured_net(device)
    graphs, plain = estimator(model), estimator(model, graphs=False)
    graphs.measure()
    replay = graphs.chunks.replays.held[8]
    model.head.weight.data = torch.randn_like(model.head.weight)
    agree(graphs.measure(), plain.measure())
    assert graphs.chunks.replays.held[8] is not replay


@mark.parametrize("change", ["hook", "number", "in a dict", "frozen", "module"])
def test_program_that_changed_is_seen(device, change):
    model = captured_net(device)
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


def test_a_model_that_changed_before_its_first_capture_is_planned_again(device):
    """A chunk that was run but not captured yet leaves a plan, of another structure then."""
    model = captured_net(device)
    graphs = estimator(model, 8)
    graphs.measure()
    model.head.bias.requires_grad_(False)
    for _ in range(3):
        agree(graphs.measure(), estimator(model, 8, graphs=False).measure())
    assert graphs.chunks.replays.held and not graphs.chunks.replays.note


def test_the_program_is_compared_once_a_measurement(device, monkeypatch):
    model = captured_net(device)
    graphs = estimator(model)
    graphs.measure()
    asked = []
    monkeypatch.setattr(
        "fastlr.estimator.cuda_graph.graph_key",
        lambda model: asked.append(model) or graph_key(model),
    )
    graphs.measure()
    assert len(asked) == 1  # of five chunks
    monkeypatch.setattr(Replay, "run", failing(KeyboardInterrupt))
    with raises(KeyboardInterrupt):
        graphs.measure()
    monkeypatch.undo()
    model.features[1].eps = 0.5  # while no measurement was under way
    agree(graphs.measure(), estimator(model, graphs=False).measure())


@needs_gpu
def test_after_a_capture_that_failed_all_is_as_before():
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.ones(3, device="cuda")
    before = torch.cuda.current_stream()
    with raises(RuntimeError):
        CudaRecorder(device).capture(lambda: x.sum().item())
    assert torch.cuda.current_stream() == before
    recorder = CudaRecorder(device)
    result = recorder.capture(lambda: x * 2)
    x.fill_(4)
    recorder.replay()
    torch.cuda.synchronize()
    assert result.tolist() == [8.0] * 3


class ScaledByConfig(nn.Module):
    """Reads a number of an object that it holds, which a graph keeps as a constant."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(3 * 16 * 16, 8), nn.Linear(8, 3)
        self.config = SimpleNamespace(scale=1.0)

    def forward(self, x):
        return self.head(self.layer(x.flatten(1)).tanh() * self.config.scale)


def test_a_change_that_only_audits_see_is_measured_again_once(recwarn):
    torch.manual_seed(0)
    model = ScaledByConfig()
    graphs = estimator(model)
    graphs.chunks.replays.recorder = Tape
    graphs.measure()
    model.config.scale = 1.5
    result = graphs.measure()
    agree(result, estimator(model, graphs=False).measure())
    assert result.audits == 5
    assert graphs.chunks.replays.recorder is None
    assert not recwarn.list


def test_hidden_state_is_seen_in_the_output(device, monkeypatch):
    model = captured_net(device)
    graphs = estimator(model)
    before = graphs.measure()
    if device == "cpu":  # the stand-in runs the program: keep it from noticing
        graphs.chunks.replays.held[8].recorder.replay = lambda: None
    monkeypatch.setitem(HIDDEN, "factor", 3.0)
    after = graphs.measure()
    agree(after, estimator(model, graphs=False).measure())
    assert after.value != before.value
    assert any("dropped" in note for note in after.notes)


def test_values_that_are_not_finite_raise_as_without(device):
    model = captured_net(device)
    graphs = estimator(model)
    graphs.measure()
    with torch.no_grad():
        model.head.weight[0, 0] = float("nan")
    with raises(fastlr.errors.NonFiniteError):
        graphs.measure()
    with torch.no_grad():
        model.head.weight[0, 0] = 0.0
    agree(graphs.measure(), estimator(model, graphs=False).measure())


def test_replayed_samples_are_audited(device):
    graphs = estimator(captured_net(device), 44)
    assert [graphs.measure().audits for _ in range(3)] == [5, 5, 5]
    assert graphs.chunks.replays.held and not graphs.chunks.replays.note


WRONG = {
    "norms of the first chunk": lambda replay: replay.table.mul_(
        torch.where(replay.first == 0, 1.05, 1.0)
    ),
    "norms of the last sample": lambda replay: replay.table[:, -1].mul_(2),
    "outputs": lambda replay: replay.output.add_(0.5 * replay.output.abs().amax()),
    "one parameter": lambda replay: replay.table[0].mul_(1.1),
}


@mark.parametrize("dtype", [None, torch.bfloat16])
@mark.parametrize("what", WRONG)
def test_a_wrong_replay_is_dropped(device, what, dtype):
    model = captured_net(device)
    graphs = estimator(model, dtype=dtype)
    graphs.measure()
    replay = graphs.chunks.replays.held[8]
    right = replay.recorder.replay

    def wrong():
        right()
        WRONG[what](replay)

    replay.recorder.replay = wrong
    within_rounding = dtype is not None and what in ("norms of the first chunk", "one parameter")
    result = graphs.measure()
    assert bool(graphs.chunks.replays.note) == (not within_rounding)
    if not within_rounding:
        want = estimator(model, graphs=False, dtype=dtype).measure()
        torch.testing.assert_close(
            result.per_sample, want.per_sample, rtol=1e-6 if dtype is None else 1e-2, atol=0
        )


def test_after_a_failed_audit_nothing_is_replayed():
    graphs = estimator(captured_net("cpu"))
    graphs.measure()
    recorder = graphs.chunks.replays.held[8].recorder
    before = recorder.replays
    graphs.engine.audits.failed = 1
    result = graphs.measure()
    assert recorder.replays == before and result.audits == 8, "every batch is audited"


def test_other_threads_draw_random_numbers_during_a_capture(monkeypatch):
    """With a stand-in of torch's generators.

    The one that a capture makes its own is not the device's.
    """

    class Generator:
        def __init__(self, device=None, state=None):
            self.device = device
            self.state = {"capturing": False} if state is None else state

        def graphsafe_get_state(self):
            return Generator(self.device, self.state)

        def graphsafe_set_state(self, other):
            self.state = other.state

        def draw(self):
            if self.state["capturing"]:
                raise RuntimeError(
                    "Offset increment outside graph capture encountered unexpectedly."
                )

    class Graph:
        def capture_begin(self, *given, **how):
            self.state = default.state
            self.state["capturing"] = True

        def capture_end(self):
            self.state["capturing"] = False

    class Capture:
        def __init__(self, graph, **how):
            self.graph = graph

        def __enter__(self):
            self.graph.capture_begin()

        def __exit__(self, *error):
            self.graph.capture_end()

    @contextmanager
    def on(place):
        yield

    default = Generator("cuda:0")
    before = default.state
    stream = type(
        "Stream",
        (),
        {"__init__": lambda self, *given: None, "wait_stream": lambda self, other: None},
    )
    fakes = {
        "Stream": stream,
        "current_stream": stream,
        "device": on,
        "stream": on,
        "graph": Capture,
        "CUDAGraph": Graph,
    }
    fakes |= {
        "graph_pool_handle": lambda: (0, 1),
        "current_device": lambda: 0,
        "default_generators": (default,),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch, "Generator", Generator)
    recorder = CudaRecorder(torch.device("cuda", 0))
    recorder.capture(default.draw)  # as another thread would, meanwhile
    assert default.state is before
    assert not before["capturing"]
    assert recorder.graph.state is not before


def test_inputs_without_a_kernel_are_copied(device):
    model = captured_net(device)
    inputs = fastlr.TensorInputs(torch.randn(40, 3, 16, 16))
    agree(
        estimator(model, inputs=inputs).measure(),
        estimator(model, graphs=False, inputs=inputs).measure(),
    )


class Differing(fastlr.TensorInputs):
    """Some batches have another number, or another name."""

    def __init__(self, x, name):
        super().__init__(x)
        self.name = name

    def batch(self, start, stop, **how):
        x = super().batch(start, stop, **how)
        inside = 8 <= start < 32
        if self.name == "number":
            return {"x": x, "scale": 2.0 if inside else 1.0}
        return {"x": x, "other" if inside else "scale": x.new_ones(len(x), 1)}


@mark.parametrize("name", ["number", "name"])
def test_batches_that_differ_in_more_than_shapes_are_not_replayed(name):
    def scaled(m, x, scale=1.0, other=3.0):
        return m.layer(x.flatten(1)) * scale * other

    torch.manual_seed(0)
    model = Written(scaled, layer=nn.Linear(3 * 16 * 16, 3))
    inputs = Differing(torch.randn(40, 3, 16, 16), name)
    graphs = estimator(model, inputs=inputs)
    for _ in range(2):
        agree(graphs.measure(), estimator(model, graphs=False, inputs=inputs).measure())


@mark.parametrize("region", [None, "disabled", "enabled"])
def test_autocast(device, region):
    """A region of the caller keeps no cast weights from before they changed."""
    model = captured_net(device)
    low = {"dtype": torch.bfloat16}
    graphs = estimator(model, **low)
    enabled = region == "enabled"
    with torch.autocast(device, torch.bfloat16, enabled) if region else nullcontext():
        for _ in range(3):
            a = graphs.measure()
            b = estimator(copy.deepcopy(model), graphs=False, **low).measure()
            torch.testing.assert_close(a.per_sample, b.per_sample, rtol=1e-2, atol=0)
            torch._foreach_mul_([p.detach() for p in model.parameters()], 1.5)


def test_a_loop_is_not_captured(device):
    def looped(m, x):
        x = x.flatten(1)[:, :4]
        return m.head(torch.linalg.matrix_exp(m.a * x[:, :1, None])[:, 0])

    graphs = estimator(
        Written(looped, a=nn.Parameter(torch.randn(4, 4)), head=nn.Linear(4, 3)).to(device)
    )
    result = graphs.measure()
    if any(route != "rule" for route in result.routes.values()):
        assert not graphs.chunks.replays.held


def test_failed_capture_is_told_once_and_measured_without(device):
    class Broken(MeasureAgain if device == "cpu" else CudaRecorder):  # type: ignore[misc]
        def capture(self, function):
            raise RuntimeError("operation not permitted when stream is capturing")

    model = captured_net(device)
    graphs = estimator(model)
    graphs.chunks.replays.recorder = Broken
    result = graphs.measure()
    agree(result, estimator(model, graphs=False).measure())
    assert any("not permitted" in note for note in result.notes)


def test_a_replay_that_writes_nothing_is_seen(device):
    """A replay that writes nothing is noticed, though its stale inputs, outputs and norms agree.

    A graph captured on another device's stream does that.
    """

    class Empty(MeasureAgain if device == "cpu" else CudaRecorder):  # type: ignore[misc]
        def replay(self):
            pass

    graphs = estimator(captured_net(device), inputs=Made((3, 16, 16)))
    graphs.chunks.replays.recorder = Empty
    result = graphs.measure()
    agree(result, estimator(captured_net(device), graphs=False).measure())
    assert any("CUDA graph dropped" in note for note in result.notes)


def test_each_device_captures_and_replays_on_a_stream_of_its_own(monkeypatch):
    """With a stand-in of torch.cuda that records devices and streams."""
    current, captured, replayed = [0], [], []

    class Stream:
        def __init__(self, device=None):
            self.device = current[-1] if device is None else device.index

        def wait_stream(self, other):
            assert other.device == self.device

    @contextmanager
    def on(place):
        current.append(place.device if isinstance(place, Stream) else place.index)
        yield
        current.pop()

    @contextmanager
    def graph(held, pool, stream, capture_error_mode):
        captured.append((current[-1], stream.device))
        yield

    held = type("Graph", (), {"replay": lambda self: replayed.append(current[-1])})
    fakes = {"Stream": Stream, "device": on, "stream": on, "graph": graph, "CUDAGraph": held}
    for name, fake in {
        **fakes,
        "current_stream": Stream,
        "graph_pool_handle": lambda: (0, 1),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    for index in (0, 1):
        recorder = CudaRecorder(torch.device("cuda", index))
        assert recorder.capture(lambda: current[-1]) == index
        recorder.replay()
    assert captured == [(0, 0), (1, 1)]
    assert replayed == [0, 1]


def test_a_graphs_key_is_the_models():
    model = Captured()
    before = graph_key(model)
    assert before == graph_key(model)
    with torch.no_grad():
        model.head.weight.add_(1.0)
    assert before == graph_key(model), "values may change"


def test_graphs_go_with_the_estimator():
    import gc
    import weakref

    graphs = estimator(Captured())
    graphs.measure()
    held = weakref.ref(graphs.chunks.replays.held[8])
    assert isinstance(held(), Replay)
    del graphs
    gc.collect()
    assert held() is None


def test_a_capture_without_memory_goes_on_with_smaller_chunks():
    """What runs as it is but not beside its own graph is halved, and captured at that size."""

    class Small(MeasureAgain):
        def capture(self, function):
            result = function()
            if len(result[0][0]) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().capture(function)

    model = captured_net("cpu")
    graphs = estimator(model)
    graphs.chunks.replays.recorder = Small
    with warned("out of memory with 8 inputs in a chunk .*: going on with 4"):
        result = graphs.measure()
    assert set(graphs.chunks.replays.held) == {4}
    agree(result, estimator(model, graphs=False).measure())


def test_released_graphs_are_captured_anew():
    graphs = estimator(captured_net("cpu"))
    first = graphs.measure()
    assert graphs.chunks.replays.held
    graphs.release()
    assert not graphs.chunks.replays.held
    agree(graphs.measure(), first)
    assert graphs.chunks.replays.held and not graphs.chunks.replays.note


def test_a_monitor_holds_no_graph_before_the_first_step():
    model = captured_net("cpu")
    monitor = Monitor(model, fastlr.ShapeImages((3, 16, 16)), n=40, every_n_steps=1, batch_size=8)
    monitor.meter._estimator_of(model, None).chunks.replays.recorder = MeasureAgain
    first = monitor.measure()
    replays = monitor.meter._estimator.chunks.replays
    assert not replays.held
    second = monitor.step()
    assert replays.held
    agree(second.estimate, first.estimate)


def test_what_released_graphs_served_is_audited():
    class Third(MeasureAgain):
        def replay(self):
            super().replay()
            if self.replays == 3:
                raise torch.OutOfMemoryError("CUDA out of memory")

    graphs = estimator(captured_net("cpu"))
    graphs.measure()
    recorder = graphs.chunks.replays.held[8].recorder
    recorder.__class__, recorder.replays = Third, 0
    with warned("out of memory with 8 inputs"):
        result = graphs.measure()
    assert result.audits == 8, "three of a replay; three and two of chunks of half the size"
    agree(result, estimator(captured_net("cpu"), graphs=False).measure())


class Unrestored(Tape):
    """Puts nothing back within what it captures, as on a GPU."""

    def capture(self, function):
        with mock.patch.object(_Held, "needs_put_back", False):
            return super().capture(function)


def test_what_a_replay_writes_is_put_back_before_the_next():
    def counting(net, x):
        net.passes += 1
        return net.layer(x.flatten(1)) * net.passes

    torch.manual_seed(0)
    model = Written(counting, layer=nn.Linear(3 * 16 * 16, 3), passes=nn.Buffer(torch.zeros(())))
    want = estimator(model, graphs=False).measure()
    made = estimator(model)
    made.chunks.replays.recorder = Unrestored
    for _ in range(2):
        assert made.measure().per_sample.tolist() == approx(want.per_sample.tolist())
        assert made.chunks.replays.held, made.chunks.replays.note
        assert float(model.passes) == 0
