"""Models by name and their checkpoints: what loads, and what is refused with a helpful message."""

import argparse
import json
import os
import pickle
import sys
import textwrap
import zipfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from expected import refused, warned
from integration_cases import same_bits
from pytest import approx, importorskip, mark, raises
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torchvision.models import get_model
from untouched import untouched

import fastlr
from fastlr.errors import InputError
from fastlr.models import load_model, load_state_dict, loading, read_checkpoint

NAME = "squeezenet1_1"


def build(seed=0):
    torch.manual_seed(seed)
    return get_model(NAME, num_classes=2)


def test_torchvision_name_with_classes():
    model = load_model("mobilenet_v3_small", num_classes=3)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 3)
    assert load_model(NAME).num_classes == 1000


@mark.parametrize("name", ["timm/resnet10t", "timm:resnet10t", "resnet10t"])
def test_timm_name(name):
    importorskip("timm")
    assert load_model(name, num_classes=5).num_classes == 5


def test_kwargs_reach_the_model():
    assert load_model(NAME, num_classes=2, kwargs={"dropout": 0.125}).classifier[0].p == 0.125


@mark.parametrize(
    ("name", "says"),
    [
        ("mobilenet_v3_larg", "mobilenet_v3_large"),
        ("timm/resnet10s", "timm/resnet10t"),
        ("torchvision:resnet1", "resnet18"),
        ("hf:no/where", "no such folder, nor all of it in the cache: hf download no/where"),
        ("zzzzqqq", "module:function"),
        (":f", "write package.module:function"),
        ("no_such_module_at_all:f", "no_such_module_at_all"),
        ("torch.nn:Linea", "Linear"),
        ("torch.nn:Linear", "missing 2 required"),
        ("os:getcwd", "returned str"),
    ],
)
def test_unknown_names_say_what_is_close(name, says):
    with refused(says.replace(".", r"\.")) as raised:
        load_model(name)
    assert "\n" not in str(raised.value)


def test_bad_arguments():
    with refused("nonsense"):
        load_model(NAME, kwargs={"nonsense": 1})
    with refused("at least 1"):
        load_model(NAME, num_classes=0)
    with refused("NOT_WEIGHTS"):
        load_model(NAME, weights="NOT_WEIGHTS")
    for kwargs in ({"initialisation": "wrong_"}, {"activation": "Wrong"}):
        with refused(r"='[Ww]rong_?': torch.nn(.init)? has none of that name"):
            load_model("fastlr.models.mlp:MLP", kwargs=kwargs)


def test_hugging_face_models_by_name(tmp_path, monkeypatch, cli):
    transformers = importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=11, n_positions=6, n_embd=8, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config).bfloat16()
    model.save_pretrained(tmp_path)
    line = f"estimate hf:{tmp_path} --inputs tokens -n 3 --json -"
    tokens = fastlr.TokenInputs(11, 6, attention_mask=True)
    expected = fastlr.estimate(model.float(), tokens, 3, predictive=fastlr.Categorical())
    assert json.loads(cli(line).out)["value"] == approx(expected.value, rel=1e-5)
    whole = model.state_dict()
    part = {name: t for name, t in whole.items() if "ln_f" not in name and "lm_head" not in name}
    model.save_pretrained(tmp_path / "part", state_dict=part)
    with refused("no weights for transformer.ln_f.bias, transformer.ln_f.weight, .* be random"):
        load_model(f"hf:{tmp_path / 'part'}")
    (tmp_path / "model.safetensors").unlink()
    cli(line, code=2, says="no file named model.safetensors")
    cli(line, "--classes", 3, code=2, says="its own weights and head")
    cli(f"rank {tmp_path} --model hf:{tmp_path}", code=2, says="nor a folder with weights")
    cli("estimate squeezenet1_1 --inputs tokens", code=2, says="no config with a vocab_size")
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    cli(line, code=2, says="needs transformers, which is not installed")


def test_factory_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "my_factory_for_test.py").write_text(
        textwrap.dedent("""
        from torch import nn
        def net(num_classes=7, width=4):
            return nn.Linear(width, num_classes)
        def fixed():
            return nn.Linear(4, 7)
        """)
    )
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    model = load_model("my_factory_for_test:net", num_classes=2, kwargs={"width": 5})
    assert model.weight.shape == (2, 5)
    assert load_model("my_factory_for_test:net").weight.shape == (7, 4)
    with refused("leave --classes .num_classes. out, or let the function take num_classes"):
        load_model("my_factory_for_test:fixed", num_classes=2)
    assert sys.path == before


@mark.parametrize("wrap", [None, "state_dict", "model", "model_state_dict"])
@mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_checkpoint_with_wrappers_and_prefixes(tmp_path, wrap, prefix):
    source = build(1)
    state = {prefix + k: v for k, v in source.state_dict().items()}
    path = tmp_path / "c.safetensors"
    if wrap:
        path = tmp_path / "c.pt"
        torch.save({wrap: state, "epoch": 3}, path)
    else:
        save_file(state, path)
    assert not same_bits(source, build(2))
    torch.manual_seed(2)
    assert same_bits(source, load_model(NAME, num_classes=2, checkpoint=path))


@mark.parametrize("prefix", ["net.", "model.backbone.", "_orig_mod.module."])
def test_any_prefix_that_all_names_have_is_dropped(prefix):
    source, model = build(1), build(2)
    load_state_dict(model, {prefix + k: v for k, v in source.state_dict().items()})
    assert same_bits(source, model)
    longer = nn.Sequential(source)  # whose own names begin alike
    load_state_dict(nn.Sequential(model), longer.state_dict())
    with refused("1 unexpected: head.weight"):
        load_state_dict(model, {**source.state_dict(), "head.weight": torch.ones(1)})


def test_an_averaged_model_is_a_checkpoint(tmp_path):
    source, model = build(1), build(2)
    averaged = AveragedModel(source)
    averaged.update_parameters(source)
    torch.save(averaged.state_dict(), tmp_path / "ema.pt")
    load_state_dict(model, read_checkpoint(tmp_path / "ema.pt"))
    assert same_bits(source, model)
    load_state_dict(averaged, averaged.state_dict())
    load_state_dict(model, {f"ema.{k}": v for k, v in averaged.state_dict().items()})


def test_a_checkpoint_of_lightning(tmp_path):
    lightning = importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, width):
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Linear(width, 2)

        def training_step(self, batch, _):
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 3)))
    module = Module(3)
    silent = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", **dict.fromkeys(silent, False))
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "epoch.ckpt")
    model = nn.Linear(3, 2)
    load_state_dict(model, read_checkpoint(tmp_path / "epoch.ckpt"))
    assert same_bits(module.net, model)


def test_weights_in_several_files(tmp_path):
    transformers = importorskip("transformers")
    sizes = {"n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 11}
    special = {"bos_token_id": None, "eos_token_id": None}
    source, model = (
        transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **special)) for _ in range(2)
    )
    source.save_pretrained(tmp_path, max_shard_size="4KB")
    parts = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(parts) > 1
    with refused("part of several: give their folder, or its .index.json"):
        load_state_dict(model, read_checkpoint(parts[0]), source=str(parts[0]))
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        torch.nn.init.zeros_(model.lm_head.weight)
        load_state_dict(model, read_checkpoint(path))
        assert same_bits(source, model)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    name, *_ = (name for name, file in index["weight_map"].items() if file == parts[0].name)
    stale = {**load_file(parts[1]), name: torch.zeros(1)}
    save_file(stale, parts[1])  # another file holds this name, too
    load_state_dict(model, read_checkpoint(tmp_path))
    assert same_bits(source, model)
    parts[1].unlink()
    with refused(f"no {parts[1].name} beside it: copy all of its files"):
        read_checkpoint(tmp_path)
    for content in ([], {}, {"weight_map": {}}, {"weight_map": {"a": 1}}):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
        with refused("is no index of"):
            read_checkpoint(tmp_path)
    for file in ("../a.safetensors", str(parts[0]), "", "model.safetensors.index.json"):
        content = json.dumps({"weight_map": {"a": file}})
        (tmp_path / "model.safetensors.index.json").write_text(content)
        with refused("is no index of files beside it"):
            read_checkpoint(tmp_path)
    content = json.dumps({"weight_map": {"a": parts[0].name}})
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with refused(f"{parts[0].name} lacks a of its index"):
        read_checkpoint(tmp_path)


def test_an_adapter_alone_is_named(tmp_path):
    peft = importorskip("peft")
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"]))
    adapted.save_pretrained(tmp_path)
    with refused("holds an adapter alone, .* merge it by peft's merge_and_unload"):
        read_checkpoint(tmp_path)
    with refused("merge the adapter"):
        load_state_dict(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), adapted.state_dict())


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
    with refused("last.pt: .* holds no model"):
        read_checkpoint(tmp_path / "last.pt")


def test_checkpoint_that_does_not_fit_changes_nothing():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    zeros = {"0.weight": (4, 3), "0.bias": (5,), "1.weight": (2, 4), "head": (1,)}
    state = {k: torch.zeros(shape) for k, shape in zeros.items()}
    with untouched(model), raises(InputError) as raised:
        load_state_dict(model, state, source="c.pt")
    for part in ("c.pt", "1 missing: 1.bias", "1 unexpected: head", "0.bias (5,) for (4,)"):
        assert part in str(raised.value)


def test_tied_weights_stored_once():
    def tied():
        parts = {"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)}
        model = nn.ModuleDict(parts)
        model["head"].weight = model["embed"].weight
        return model

    model = tied()
    load_state_dict(model, {"embed.weight": torch.full((5, 3), 2.0)})
    assert model["head"].weight.unique().tolist() == [2.0]
    untied = tied()
    untied["head"].weight = nn.Parameter(torch.zeros(5, 3))
    with refused("missing: head.weight"):
        load_state_dict(untied, {"embed.weight": torch.zeros(5, 3)})

    head = {"head.weight": torch.zeros(5, 3)}
    with refused("1 one tensor in the model, but not here: embed.weight and head.weight"):
        load_state_dict(model, {"embed.weight": torch.ones(5, 3), **head})


class Versioned(nn.Linear):
    """Its old versions kept the weight transposed."""

    _version = 2

    def _load_from_state_dict(self, state, prefix, metadata, *rest):
        if metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"].mT
        super()._load_from_state_dict(state, prefix, metadata, *rest)


@mark.parametrize("prefix", ["", "module.net."])
@mark.parametrize("end", ["pt", "safetensors"])
def test_versions_of_modules_are_known(tmp_path, prefix, end):
    source, model = nn.Sequential(Versioned(3, 3)), nn.Sequential(Versioned(3, 3))
    wrapped = nn.ModuleDict({"module": nn.ModuleDict({"net": source})}) if prefix else source
    path = tmp_path / f"c.{end}"
    (save_file if end == "safetensors" else torch.save)(wrapped.state_dict(), path)
    load_state_dict(model, read_checkpoint(path))
    assert same_bits(source, model)
    old = source.state_dict()
    old._metadata["0"]["version"] = 1
    torch.save(old, tmp_path / "old.pt")
    load_state_dict(model, read_checkpoint(tmp_path / "old.pt"))
    assert torch.equal(model[0].weight, source[0].weight.mT)


@mark.parametrize(
    ("change", "reason"),
    [
        (torch.Tensor.to_sparse, "is sparse"),
        (lambda t: t.to("meta"), "is sparse, nested, quantised or without values"),
        (torch.Tensor.char, "torch.int8 for torch.float32"),
        (torch.Tensor.cfloat, "torch.complex64 for torch.float32"),
    ],
)
def test_tensors_of_another_kind_are_refused(change, reason):
    model = nn.Linear(3, 2)
    state = {k: change(v) if k == "weight" else v + 1 for k, v in model.state_dict().items()}
    with untouched(model), refused(f"1 of another shape or kind: weight {reason}"):
        load_state_dict(model, state)


def test_batchnorm_counter_may_be_missing():
    model = nn.BatchNorm1d(3)
    state = {k: v + 1 for k, v in model.state_dict().items() if k != "num_batches_tracked"}
    load_state_dict(model, state)
    assert model.running_mean.tolist() == [1.0, 1.0, 1.0]


class Evil:
    def __reduce__(self):
        return (print, ("code from a checkpoint ran",))


def test_unreadable_checkpoints(tmp_path, capsys):
    with refused("no such file"):
        read_checkpoint(tmp_path / "absent.pt")
    torch.save(nn.Linear(1, 1), tmp_path / "module.pt")
    torch.save(Evil(), tmp_path / "evil.pt")
    torch.save({"best": np.float64(3)}, tmp_path / "score.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"epoch": 1}, tmp_path / "empty.pt")
    save = torch.save
    save({**nn.Linear(1, 1).state_dict(), "epoch": Evil()}, tmp_path / "flat.pt")
    save(Evil(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    save({"state_dict": {"weight": torch.ones(1)}, "hook": os.system}, tmp_path / "blocked.pt")
    says = {"module.pt": "holds torch.nn.modules.linear.Linear .*, not named tensors; save one"}
    says |= dict.fromkeys(["old.pt", "flat.pt"], "objects of (builtins.)?print[):]")
    says |= {"score.pt": "numpy._core.multiarray.scalar", "blocked.pt": "posix.system: save one"}
    for path in [*tmp_path.iterdir()]:
        with refused(says.get(path.name, path.name)) as raised:
            read_checkpoint(path)
        assert "damaged" not in str(raised.value)
        assert "\n" not in str(raised.value)
        assert "weights_only" not in str(raised.value)
    assert "ran" not in capsys.readouterr().out


def test_objects_beside_the_tensors_are_not_made(tmp_path, capsys):
    beside = [Evil(), Evil, np.arange(3), argparse.Namespace(a=Path("a")), defaultdict(list, a=1)]
    torch.save({"state_dict": {"weight": torch.ones(2)}, "args": beside}, tmp_path / "a.pt")
    assert read_checkpoint(tmp_path / "a.pt")["weight"].tolist() == [1.0, 1.0]
    assert capsys.readouterr().out == ""
    with raises(pickle.UnpicklingError):  # as before, for all others
        torch.load(tmp_path / "a.pt")


def test_a_file_that_unpacks_to_a_thousand_times_its_size_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a/data/0", bytes(1 << 20))
    with refused("would unpack to 1,048,576 bytes, over 100 times its"):
        read_checkpoint(tmp_path / "a.pt")


@mark.filterwarnings("error")
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
        with refused(r"checkpoint .*a\.pt is damaged: the checksum of .*data/0 in it fails"):
            read_checkpoint(path)
    path.write_bytes(whole)
    assert len(read_checkpoint(path)) == 2


@mark.parametrize("how", ["old format", "without checksums"])
def test_files_without_checksums_are_said_to_have_none(tmp_path, how):
    path, state = tmp_path / "a.pt", nn.Linear(2, 2).state_dict()
    before = torch.serialization.get_crc32_options()
    try:
        torch.serialization.set_crc32_options(how == "old format")
        torch.save(state, path, _use_new_zipfile_serialization=how != "old format")
    finally:
        torch.serialization.set_crc32_options(before)
    with warned("has no checksums: whether it is as it was saved cannot be verified"):
        assert torch.equal(read_checkpoint(path)["weight"], state["weight"])


@mark.parametrize(
    ("name", "content", "says"),
    [
        ("text.pt", b"hello\nworld\n", "torch.load can read as plain tensors: it is a text file"),
        ("picture.pt", b"\x89PNG\r\n\x1a\n", "torch.load can read as plain tensors: save one"),
        ("empty.pt", b"", r"is empty \(0 bytes\)"),
        ("empty.safetensors", b"", r"is empty \(0 bytes\)"),
        ("text.safetensors", b"hello, world", "no whole safetensors file"),
        ("part.pt", b"PK\x03\x04 and no more", "damaged or incomplete"),
    ],
)
def test_files_that_are_no_checkpoints(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with refused(says) as raised:
        read_checkpoint(tmp_path / name)
    assert raised.value.__cause__ is not None
    assert str(tmp_path / name) in str(raised.value)


def test_the_remedy_for_images_of_another_size_names_their_size():
    model = load_model("fastlr.models.convnet:ConvNet", kwargs={"size": 64})
    with refused(r"""--set model_kwargs='\{"size": 32\}'"""):
        model(torch.zeros(1, 3, 32, 32))
