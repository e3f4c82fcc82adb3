"""cuDNN is off for verification, and as the user has set it for the pass that is measured."""

import pytest
import torch
from convolution_problems import counted
from expected import needs_triton
from torch import nn
from torchvision import models

import fastlr
from bench.cases import calibrate
from fastlr.ghost import process_state


@pytest.mark.parametrize("of_user", [True, False])
def test_only_the_measured_pass_runs_by_cudnn(monkeypatch, of_user):
    monkeypatch.setattr(process_state, "_PLANNED_ON", ("cpu",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    seen = []
    model[0].register_forward_hook(lambda _, x, __: seen.append((len(x[0]), cudnn())))
    x, v = torch.randn(9, 3, 4, 4), torch.randn(9, 3)
    with torch.backends.cudnn.flags(enabled=of_user, allow_tf32=False):
        fastlr.per_sample_grad_sq_norms(model, x, v)
        verification = len(seen)
        fastlr.per_sample_grad_sq_norms(model, x, v)
        assert cudnn() is of_user
    assert {on for size, on in seen[:verification] if size != 9} == {False}
    assert seen[verification] == (9, of_user)


def test_cudnn_stays_on_where_the_measured_pass_uses_tf32(monkeypatch):
    """Native kernels have more digits than TF32: comparing the two would refuse sound models."""
    monkeypatch.setattr(process_state, "_PLANNED_ON", ("cpu",))
    monkeypatch.setattr(process_state, "narrow_products", lambda device: True)
    one, wide = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1).double())
    with process_state.without_cudnn(torch.device("cpu"), [one]):
        assert cudnn()
        with process_state.without_cudnn(torch.device("cpu"), [wide]):
            assert not cudnn()
        assert cudnn()


def test_cudnn_is_put_back_after_an_error(monkeypatch):
    monkeypatch.setattr(process_state, "_PLANNED_ON", ("cpu",))
    before = cudnn()
    with pytest.raises(fastlr.FastlrError):
        x = torch.full((4, 3), torch.nan)
        fastlr.per_sample_grad_sq_norms(nn.Linear(3, 2), x, torch.ones(4, 2))
    assert cudnn() is before


@needs_triton
@pytest.mark.parametrize(
    "name, planned",
    [
        pytest.param("mobilenet_v3_large", 1, id="only the first layer"),
        pytest.param("resnet18", 15, id="forward and input gradient of each shape"),
    ],
)
def test_a_first_estimate_plans_the_shapes_of_its_chunk_alone(monkeypatch, name, planned):
    """cuDNN takes 20 to 40 ms for each problem, and was given 747 by MobileNetV3-Large."""
    torch.manual_seed(0)
    model = models.get_model(name, num_classes=4).to(memory_format=torch.channels_last)
    images = fastlr.ShapeImages((3, 32, 32), channels_last=True)
    calibrate(model, images.batch(0, 8, seed=1))
    how = {"dtype": torch.bfloat16, "batch_size": 8, "progress": False}
    with counted(monkeypatch) as problems:
        found = fastlr.estimate(model, images, 16, **how)
    assert not found.notes
    assert {shape[0] for _, shape, *_ in problems.planned} == {8}, "no chunk has another size"
    assert {direction for direction, *_ in problems.planned} <= {"forward", "input"}
    assert len(problems.planned) == planned
    assert len(problems.others) > 5 * planned, "verification runs convolutions, too"


def cudnn():
    return torch._C._get_cudnn_enabled()
