"""Models by name and their checkpoints: what loads, and what is refused with a helpful message."""

import sys
import textwrap
import zipfile

import pytest
import torch
from integration_cases import same_bits
from safetensors.torch import save_file
from torch import nn
from torchvision.models import get_model
from untouched import untouched

from fastlr.errors import FastlrWarning, InputError
from fastlr.models import load_model, load_state_dict, read_checkpoint

NAME = "squeezenet1_1"


def build(seed=0):
    torch.manual_seed(seed)
    return get_model(NAME, num_classes=2)


def test_torchvision_name_with_classes():
    model = load_model("mobilenet_v3_small", num_classes=3)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 3)
    assert load_model(NAME).num_classes == 1000


@pytest.mark.parametrize("name", ["timm/resnet10t", "resnet10t"])
def test_timm_name(name):
    pytest.importorskip("timm")
    assert load_model(name, num_classes=5).num_classes == 5


def test_kwargs_reach_the_model():
    assert load_model(NAME, num_classes=2, kwargs={"dropout": 0.125}).classifier[0].p == 0.125


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mobilenet_v3_larg", "mobilenet_v3_large"),
        ("timm/resnet10s", "timm/resnet10t"),
        ("zzzzqqq", "module:function"),
        (":f", "write package.module:function"),
        ("no_such_module_at_all:f", "no_such_module_at_all"),
        ("torch.nn:Linea", "Linear"),
        ("torch.nn:Linear", "missing 2 required"),
        ("os:getcwd", "returned str"),
    ],
)
def test_unknown_names_say_what_is_close(name, says):
    with pytest.raises(InputError, match=says.replace(".", r"\.")) as raised:
        load_model(name)
    assert "\n" not in str(raised.value)


def test_bad_arguments():
    with pytest.raises(InputError, match="nonsense"):
        load_model(NAME, kwargs={"nonsense": 1})
    with pytest.raises(InputError, match="at least 1"):
        load_model(NAME, num_classes=0)
    with pytest.raises(InputError, match="NOT_WEIGHTS"):
        load_model(NAME, weights="NOT_WEIGHTS")
    for kwargs in ({"initialisation": "wrong_"}, {"activation": "Wrong"}):
        with pytest.raises(
            InputError, match=r"='[Ww]rong_?': torch.nn(.init)? has none of that name"
        ):
            load_model("fastlr.models.mlp:MLP", kwargs=kwargs)


def test_factory_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "my_factory_for_test.py").write_text(
        textwrap.dedent("""
        from torch import nn
        def net(num_classes=7, width=4):
            return nn.Linear(width, num_classes)
        """)
    )
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    model = load_model("my_factory_for_test:net", num_classes=2, kwargs={"width": 5})
    assert model.weight.shape == (2, 5)
    assert load_model("my_factory_for_test:net").weight.shape == (7, 4)
    assert sys.path == before


@pytest.mark.parametrize("wrap", [None, "state_dict", "model", "model_state_dict"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_checkpoint_with_wrappers_and_prefixes(tmp_path, wrap, prefix):
    source = build(1)
    state = {prefix + k: v for k, v in source.state_dict().items()}
    torch.save({wrap: state, "epoch": 3} if wrap else state, tmp_path / "c.pt")
    assert not same_bits(source, build(2))
    torch.manual_seed(2)
    assert same_bits(source, load_model(NAME, num_classes=2, checkpoint=tmp_path / "c.pt"))


def test_checkpoint_of_a_run_of_fastlr(tmp_path):
    source, state = build(1), {"position": 2, "chunks": {}}
    whole = {
        "version": 1,
        "steps": 3,
        "line": "{}",
        "state": {**state, "model": source.state_dict()},
    }
    torch.save(whole, tmp_path / "last.pt")
    assert same_bits(source, load_model(NAME, num_classes=2, checkpoint=tmp_path / "last.pt"))
    torch.save({**whole, "state": state}, tmp_path / "last.pt")
    with pytest.raises(InputError, match="last.pt: .* holds no model"):
        read_checkpoint(tmp_path / "last.pt")


def test_safetensors(tmp_path):
    source = build(1)
    save_file(source.state_dict(), tmp_path / "c.safetensors")
    assert same_bits(source, load_model(NAME, num_classes=2, checkpoint=tmp_path / "c.safetensors"))


def test_checkpoint_that_does_not_fit_changes_nothing():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    zeros = {"0.weight": (4, 3), "0.bias": (5,), "1.weight": (2, 4), "head": (1,)}
    state = {k: torch.zeros(shape) for k, shape in zeros.items()}
    with untouched(model), pytest.raises(InputError) as raised:
        load_state_dict(model, state, source="c.pt")
    for part in ("c.pt", "1 missing: 1.bias", "1 unexpected: head", "0.bias (5,) for (4,)"):
        assert part in str(raised.value)


def test_wrong_number_of_classes(tmp_path):
    torch.save(build().state_dict(), tmp_path / "c.pt")
    with pytest.raises(InputError, match="of another shape: classifier.1.weight"):
        load_model(NAME, num_classes=3, checkpoint=tmp_path / "c.pt")


def test_tied_weights_stored_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    load_state_dict(model, {"embed.weight": torch.full((5, 3), 2.0)})
    assert model.head.weight.unique().tolist() == [2.0]
    untied = Tied()
    untied.head.weight = nn.Parameter(torch.zeros(5, 3))
    with pytest.raises(InputError, match="missing: head.weight"):
        load_state_dict(untied, {"embed.weight": torch.zeros(5, 3)})


def test_batchnorm_counter_may_be_missing():
    model = nn.BatchNorm1d(3)
    state = {k: v + 1 for k, v in model.state_dict().items() if k != "num_batches_tracked"}
    load_state_dict(model, state)
    assert model.running_mean.tolist() == [1.0, 1.0, 1.0]


class Evil:
    def __reduce__(self):
        return (print, ("code from a checkpoint ran",))


def test_unreadable_checkpoints(tmp_path, capsys):
    with pytest.raises(InputError, match="no such file"):
        read_checkpoint(tmp_path / "absent.pt")
    (tmp_path / "text.pt").write_text("not a checkpoint")
    (tmp_path / "text.safetensors").write_text("not a checkpoint")
    torch.save(nn.Linear(1, 1), tmp_path / "module.pt")
    torch.save(Evil(), tmp_path / "evil.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"epoch": 1}, tmp_path / "empty.pt")
    for name in ("text.pt", "text.safetensors", "module.pt", "evil.pt", "list.pt", "empty.pt"):
        with pytest.raises(InputError, match=name) as raised:
            read_checkpoint(tmp_path / name)
        assert "\n" not in str(raised.value)
        assert "weights_only" not in str(raised.value)
    assert "ran" not in capsys.readouterr().out


@pytest.mark.filterwarnings("error")
def test_one_changed_byte_is_an_error_wherever_it_is(tmp_path):
    """torch.load reads such a file without a word, and gives other weights."""
    path = tmp_path / "a.pt"
    torch.save(nn.Linear(40, 30).state_dict(), path)
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as file:
        first = next(info for info in file.infolist() if info.filename.endswith("data/0"))
    for place in (first.header_offset + 200, first.header_offset + 2000):
        data = bytearray(whole)
        data[place] ^= 1
        path.write_bytes(data)
        torch.load(path, weights_only=True)
        with pytest.raises(
            InputError, match=r"checkpoint .*a\.pt is damaged: the checksum of .*data/0 in it fails"
        ):
            read_checkpoint(path)
    path.write_bytes(whole)
    assert len(read_checkpoint(path)) == 2


@pytest.mark.parametrize("how", ["old format", "without checksums"])
def test_files_without_checksums_are_said_to_have_none(tmp_path, how):
    path, state = tmp_path / "a.pt", nn.Linear(2, 2).state_dict()
    before = torch.serialization.get_crc32_options()
    try:
        torch.serialization.set_crc32_options(how == "old format")
        torch.save(state, path, _use_new_zipfile_serialization=how != "old format")
    finally:
        torch.serialization.set_crc32_options(before)
    with pytest.warns(
        FastlrWarning, match="has no checksums: whether it is as it was saved cannot be verified"
    ):
        assert torch.equal(read_checkpoint(path)["weight"], state["weight"])


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("text.pt", b"hello\nworld\n", "torch.load can read as plain tensors: it is a text file"),
        ("page.pth", b"<!DOCTYPE html>", "it is a text file"),
        ("picture.pt", b"\x89PNG\r\n\x1a\n", "torch.load can read as plain tensors: save one"),
        ("empty.pt", b"", r"is empty \(0 bytes\)"),
        ("empty.safetensors", b"", r"is empty \(0 bytes\)"),
        ("text.safetensors", b"hello, world", "no whole safetensors file"),
        ("part.pt", b"PK\x03\x04 and no more", "damaged or incomplete"),
    ],
)
def test_files_that_are_no_checkpoints(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=says) as raised:
        read_checkpoint(tmp_path / name)
    assert raised.value.__cause__ is not None
    assert str(tmp_path / name) in str(raised.value)


def test_the_remedy_for_images_of_another_size_names_their_size():
    model = load_model("fastlr.models.convnet:ConvNet", kwargs={"size": 64})
    with pytest.raises(InputError, match=r"""--set model_kwargs='\{"size": 32\}'"""):
        model(torch.zeros(1, 3, 32, 32))
