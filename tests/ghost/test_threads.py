"""Several threads measure models, or run one while another is measured."""

import copy
import os
import threading
import time
import warnings
from functools import partial

import torch
import torch.nn.functional as F
from pytest import mark
from threads import meanwhile, small_models, together
from torch import nn
from untouched import untouched

import fastlr
from fastlr.integrations import Monitor
from fastlr.ops.model_lock import locked, unlocked

MODELS = list(small_models())


def samples(shape, count=8):
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(1))


def redundancy(model, inputs):
    return fastlr.estimate(model, inputs, 8).value


# -- one model
# --------------------------------------------------------------------------------------------------


def three_threads(tries, chosen):
    """Three threads estimate one model.

    Each gets what one thread gets alone, and the model is as before.
    """
    for name in chosen:
        model, shape = small_models()[name]
        inputs = fastlr.TensorInputs(samples(shape))
        model(samples(shape)).sum().backward()
        alone = redundancy(copy.deepcopy(model), inputs)
        for _ in range(tries):
            fresh = copy.deepcopy(model)
            with untouched(fresh):
                assert together(*[partial(redundancy, fresh, inputs)] * 3) == [alone] * 3, name


def test_three_threads_measure_one_model():
    three_threads(10, ["mlp"])


@mark.long
def test_three_threads_measure_one_model_often():
    three_threads(40, MODELS)


def test_kinds_of_measures_of_one_model():
    model, shape = small_models()["mlp"]
    x = samples(shape)
    y = torch.arange(8) % 3
    start = small_models()["mlp"][0]
    measured = {
        "estimate": lambda m: redundancy(m, fastlr.TensorInputs(x)),
        "norms": lambda m: (
            fastlr.per_sample_grad_sq_norms(m.eval(), x, torch.ones(8, 3)).sum().item()
        ),
        "report": lambda m: fastlr.support_report(m.eval(), x).routes,
        "loss": lambda m: fastlr.redundancy_loss(m, x, seed=0).item(),
        "gradients": lambda m: float(fastlr.metrics.train_grad_norm(m, x, y, F.cross_entropy)),
        "noise": lambda m: float(fastlr.gradient_noise_scale(m, x, y, F.cross_entropy, groups=2)),
        "activations": lambda m: float(fastlr.metrics.dormant_ratio(m, x)),
        "weights": lambda m: float(fastlr.metrics.weight_norm(m)),
        "distance": lambda m: float(fastlr.metrics.distance_from_init(m, start)),
        "curvature": lambda m: float(fastlr.metrics.curvature_rank(m, x)),
        "kernel": lambda m: float(fastlr.metrics.ntk_rank(m, x)),
        "trainability": lambda m: float(fastlr.metrics.trainability(m, x, steps=3, repeats=2)),
    }
    model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = {name: measure(copy.deepcopy(model)) for name, measure in measured.items()}
        fresh = copy.deepcopy(model)
        with untouched(fresh):
            got = together(*[partial(measure, fresh) for measure in measured.values()])
    assert dict(zip(measured, got, strict=True)) == alone


def test_monitors_of_one_model():
    model, shape = small_models()["mlp"]
    inputs = fastlr.TensorInputs(samples(shape))

    def value(of, seed):
        monitor = Monitor(of, inputs, 8, seed=seed, keep_best=lambda reading: None)
        return monitor.measure().value

    alone = [value(copy.deepcopy(model), seed) for seed in (0, 1)]
    with untouched(model):
        assert together(*[partial(value, model, seed) for seed in (0, 1)] * 2) == alone * 2


def test_a_wrapper_and_its_module():
    model, shape = small_models()["mlp"]
    inputs = fastlr.TensorInputs(samples(shape))
    alone = redundancy(copy.deepcopy(model), inputs)
    wrapped = nn.DataParallel(model)
    compiled = torch.compile(model, backend="eager")
    with untouched(model):
        got = together(*[partial(redundancy, one, inputs) for one in (model, wrapped, compiled)])
    assert got == [alone] * 3


def test_models_that_share_a_module():
    shared = nn.Linear(4, 5)
    models = [nn.Sequential(shared, nn.Tanh(), nn.Linear(5, 2)) for _ in range(3)]
    inputs = fastlr.TensorInputs(samples((4,)))
    alone = [redundancy(copy.deepcopy(model), inputs) for model in models]
    for _ in range(3):
        fresh = copy.deepcopy(models)
        assert fresh[0][0] is fresh[2][0]
        with untouched(fresh[0]), untouched(fresh[1]), untouched(fresh[2]):
            assert together(*[partial(redundancy, model, inputs) for model in fresh]) == alone


# -- several models
# --------------------------------------------------------------------------------------------------


def test_models_of_their_own_in_threads():
    models = small_models()
    work, alone = [], []
    for model, shape in models.values():
        inputs = fastlr.TensorInputs(samples(shape))
        alone.append(redundancy(copy.deepcopy(model), inputs))
        work.append(partial(redundancy, model, inputs))
    assert together(*work) == alone


def test_random_labels_do_not_depend_on_other_threads():
    """Dropout and labels are drawn from the generator of the process.

    Others seed it and put it back.
    """
    model, shape = small_models()["mlp"]
    x = samples(shape)

    def learned(seed):
        return float(
            fastlr.metrics.trainability(copy.deepcopy(model), x, steps=5, repeats=2, seed=seed)
        )

    alone = [learned(seed) for seed in range(3)]
    other = small_models()["convolution"][0]
    inputs = fastlr.TensorInputs(samples((3, 6, 6)))
    before = torch.get_rng_state()
    got = together(
        *[partial(learned, seed) for seed in range(3)], *[partial(redundancy, other, inputs)] * 2
    )
    assert got[:3] == alone
    assert torch.equal(torch.get_rng_state(), before)


# -- the lock
# --------------------------------------------------------------------------------------------------


def test_a_thread_enters_again():
    model = nn.Sequential(nn.Linear(2, 2))
    with locked(model), locked(model), locked(model[0]), locked(nn.Linear(2, 2)), unlocked():
        pass

    def free():
        with locked(model):
            return True

    assert together(free) == [True]


def test_threads_take_turns():
    one_is_in = threading.Lock()

    def enter():
        with locked(nn.Linear(2, 2)):
            assert one_is_in.acquire(blocking=False)
            time.sleep(0.01)
            one_is_in.release()

    together(*[enter] * 3)


def test_while_a_thread_waits_for_other_ranks_other_models_are_measured():
    shared = nn.Linear(2, 2)
    waits, may_end = threading.Event(), threading.Event()
    order = []

    def wait():
        with locked(nn.Sequential(shared)):
            with unlocked():
                waits.set()
                assert may_end.wait(30)
            order.append("one that waited")

    def measure(model, name):
        assert waits.wait(30)
        with locked(model):
            order.append(name)

    def measure_another():
        time.sleep(0.2)  # the thread with the shared module has come by then
        measure(nn.Linear(2, 2), "another")
        may_end.set()

    together(wait, partial(measure, nn.Sequential(shared), "one that shares"), measure_another)
    assert order == ["another", "one that waited", "one that shares"]


needs_fork = mark.skipif(not hasattr(os, "fork"), reason="there is no fork")


def enters_in_a_fork(model):
    """Whether a forked process enters, leaves for a while and comes back."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks of processes with threads
        child = os.fork()
    if child == 0:
        try:
            with locked(model), unlocked():
                pass
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@needs_fork
def test_a_forked_process_waits_for_no_thread_of_its_parent():
    model = nn.Linear(2, 2)
    held, done = threading.Event(), threading.Event()

    def hold():
        with locked(model):
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    assert enters_in_a_fork(model)
    done.set()
    thread.join()


@needs_fork
def test_a_process_forked_within_a_measurement_goes_on():
    model = nn.Linear(2, 2)
    with locked(model):
        assert enters_in_a_fork(model)


# -- forward passes meanwhile
# ------------------------------------------------------------------------------------------


@mark.parametrize("name", MODELS)
def test_a_forward_pass_meanwhile(name):
    """It meets the model's own parameters, in eval mode."""
    model, shape = small_models()[name]
    model.eval()
    x = samples(shape)
    want = model(x).detach()
    differing = []

    def run():
        got = model(x).detach()
        if got.dtype != want.dtype or not torch.allclose(got, want, atol=1e-5):
            differing.append(got)

    alone = redundancy(copy.deepcopy(model), fastlr.TensorInputs(x))
    with untouched(model), meanwhile(run) as errors:
        for _ in range(3):
            estimator = fastlr.LocalRedundancy(model, fastlr.TensorInputs(x), 8)
            estimator.engine.forget_plans()
            assert estimator.measure().value == alone
    assert not errors
    assert not differing


def test_activations_of_a_forward_pass_meanwhile_are_not_counted():
    model, shape = small_models()["convolution"]
    model.eval()
    alone = float(fastlr.metrics.dormant_ratio(model, samples(shape)))
    other = samples(shape, 3) * 100
    with meanwhile(lambda: model(other)) as errors:
        for _ in range(10):
            measured = fastlr.metrics.dormant_ratio(model, samples(shape), threshold=0.0)
            assert (float(measured), measured.details["units"]) == (alone, 6)
    assert not errors
