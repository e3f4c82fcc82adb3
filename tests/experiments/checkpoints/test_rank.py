"""Ranking checkpoints: the order, the test that tells them apart, and the command."""

import json
import math
import re

import torch
import torch.nn.functional as F
from exact import seeded
from expected import refused, warned
from pytest import approx, fixture
from safetensors.torch import save_file
from torch import nn

import fastlr
from fastlr.errors import NonFiniteError
from fastlr.estimator.result import Estimate
from fastlr.experiments.checkpoints.measure import measure_each, weight_files
from fastlr.experiments.checkpoints.ranking import ranking
from fastlr.experiments.checkpoints.ranking_report import ranking_sheet, verdict
from fastlr.experiments.data import (
    ImageStore,
    normalise,
    open_series,
    split_series,
    synthetic_store,
)
from fastlr.models.patchtst import PatchTST


def estimate(values, **changes):
    values = values.double()
    fields = {
        "per_parameter": {},
        "routes": {},
        "seconds": 0.0,
        "inputs_used": len(values),
        "inputs_digest": "x",
    }
    stderr = float(values.std() / math.sqrt(len(values)))
    return Estimate(
        float(values.mean()), stderr, len(values), per_sample=values, **{**fields, **changes}
    )


def flat_net(num_classes=3):
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, num_classes))


@fixture
def checkpoints(tmp_path):
    """Three checkpoints: a network, the same with confident outputs, and nearly the first."""
    torch.manual_seed(0)
    model = flat_net()
    paths = {}
    for name, scale in (("first", 1.0), ("confident", 6.0), ("near", 1.0 + 1e-7)):
        state = {k: v.clone() for k, v in model.state_dict().items()}
        state["3.weight"] *= scale
        paths[name] = tmp_path / f"{name}.pt"
        torch.save(state, paths[name])
    return paths


def test_pairs_are_compared_input_by_input():
    generator = seeded(0)
    common = 10 * torch.rand(200, generator=generator, dtype=torch.float64)
    noise = torch.randn(3, 200, generator=generator, dtype=torch.float64)
    values = {"a": common + noise[0], "b": common + 1 + noise[1], "c": common + 0.01 + noise[0]}
    found = ranking({name: estimate(v) for name, v in values.items()})
    assert list(found.estimates) == ["b", "c", "a"]
    assert found.largest == "b"
    pair = found.against_largest("c")
    delta = values["b"] - values["c"]
    assert pair.difference == approx(float(delta.mean()))
    assert pair.second == "c"
    assert pair.stderr == approx(float(delta.std() / math.sqrt(200)))
    assert pair.z == approx(pair.difference / pair.stderr)
    assert pair.p == approx(math.erfc(pair.z / math.sqrt(2)))
    alone = math.hypot(*(e.stderr for e in (found.estimates["b"], found.estimates["c"])))
    assert pair.stderr < alone / 2, "what the inputs share cancels"
    assert found.distinguishable
    assert found.ties == []
    assert len(found.pairs) == 3
    (constant,) = (p for p in found.pairs if (p.first, p.second) == ("c", "a"))
    assert constant.z > 1e6 and constant.adjusted < 1e-6, "the same difference at every input"


def test_equal_checkpoints_are_told_apart_once_in_twenty_times():
    generator = seeded(1)
    told, studies = 0, 400
    for _ in range(studies):
        values = torch.randn(4, 60, generator=generator, dtype=torch.float64)
        found = ranking({str(i): estimate(v) for i, v in enumerate(values)})
        told += any(pair.adjusted < 0.05 for pair in found.pairs)
        assert found.largest not in found.ties
        assert set(found.ties) <= set(found.estimates)
    assert told / studies < 0.05 + 3 * math.sqrt(0.05 * 0.95 / studies)
    assert told > 0


def test_what_is_said_of_ties():
    values = torch.arange(1.0, 51.0)
    found = ranking(
        {"one": estimate(values), "twin": estimate(values.clone()), "low": estimate(values / 2)}
    )
    assert found.equal == ["twin"]
    assert found.ties == []
    assert found.distinguishable
    assert verdict(found) == (
        "one and twin have the largest local redundancy, distinguishable from the next, low (z = "
        "12.4, adjusted p <0.0001). one and twin are equal on every input, as equal weights are."
    )
    copies = {name: estimate(values.clone()) for name in "abc"}
    zeros = {"d": estimate(values * 0), "e": estimate(values * 0)}
    text = verdict(ranking(copies | zeros))
    assert text.startswith("a, b and c have the largest local redundancy, distinguishable")
    assert text.endswith("a, b and c are equal on every input, as equal weights are.")
    assert verdict(ranking(copies)).startswith("a, b and c have the largest local redundancy. a,")
    text = ranking_sheet(found).markdown()
    assert "Holm's correction for all 3 pairs of 3 checkpoints" in text
    assert "n = 50 the normal distribution is doubtful" in text
    two = ranking({"one": estimate(values), "low": estimate(values / 2)})
    assert "correction for the one pair of 2 checkpoints" in ranking_sheet(two).markdown()


def test_a_checkpoint_without_numbers_is_named(tmp_path):
    model, inputs = nn.Linear(3, 2), fastlr.TensorInputs(torch.randn(4, 3))
    torch.save({"weight": torch.full((2, 3), math.nan), "bias": torch.zeros(2)}, tmp_path / "a.pt")
    with refused("^checkpoint .*a.pt: the model's output", NonFiniteError):
        measure_each(model, [tmp_path / "a.pt"], {"": (inputs, 4)})


def test_the_largest_is_not_called_the_best():
    values = torch.arange(1.0, 51.0)
    text = ranking_sheet(ranking({"a": estimate(values), "b": estimate(values / 2)})).markdown()
    assert "a has the largest local redundancy, distinguishable from the next, b" in text
    assert "cannot decide which checkpoint will learn a new task best" in text
    assert text.count("best") == 1


def test_unreadable_checkpoints_are_named_and_the_others_ranked(checkpoints, tmp_path, cli):
    damaged, other, diverged = (tmp_path / f"{name}.pt" for name in ("damaged", "other", "nan"))
    damaged.write_bytes(checkpoints["first"].read_bytes()[:-200])
    torch.save(nn.Linear(2, 2).state_dict(), other)
    state = torch.load(checkpoints["first"], weights_only=True)
    torch.save({name: value * math.nan for name, value in state.items()}, diverged)
    record = tmp_path / "rank.json"
    line = f"rank --model test_rank:flat_net --size 8 -n 8 --json {record}"
    out = cli(line, damaged, *checkpoints.values(), other, diverged).out
    found = json.loads(record.read_text())
    assert set(found["left_out"]) == {str(damaged), str(other), str(diverged)}
    assert len(found["ranking"]) == 3
    said = " ".join(out.split())
    for reason in ("damaged or incomplete zip file", "does not fit Sequential", "not a number"):
        assert reason in said
    assert "largest minus" in out
    ranked = cli(f"{line} --figure {tmp_path}/f.png", *checkpoints.values(), damaged).out
    assert str(damaged) in "".join(ranked.split())  # a long path goes over several lines
    few = "fewer than two checkpoints can be measured: .*damaged"
    assert re.search(few, cli(line, damaged, checkpoints["first"], code=2).err)


def test_a_folder_of_a_trainer_is_ranked_with_its_own_weights(checkpoints, tmp_path, cli):
    run = tmp_path / "run"
    weights = {name: torch.load(path, weights_only=True) for name, path in checkpoints.items()}
    for folder, name in (
        (".", "near"),
        ("checkpoint-90", "first"),
        ("checkpoint-100", "confident"),
    ):
        (run / folder).mkdir(exist_ok=True, parents=True)
        save_file(weights[name], run / folder / "model.safetensors")
    (run / "checkpoint-110").mkdir()  # as of a process that was killed
    (run / "checkpoint-best").symlink_to(run / "checkpoint-90")
    with warned("checkpoint-110 holds no weights: it is left out"):
        files = weight_files([run])
    folders = [str(file.parent.relative_to(run)) for file in files]
    assert folders == ["checkpoint-90", "checkpoint-100", "."]


def test_a_checkpoint_that_another_strategy_cannot_measure_is_named(
    checkpoints, stores, tmp_path, cli
):
    state = torch.load(checkpoints["first"], weights_only=True)
    state["3.bias"] = torch.tensor([3e38, -3e38, 0.0])
    torch.save(state, tmp_path / "large.pt")
    line = f"rank --model test_rank:flat_net --size 8 -n 8 --json {tmp_path}/rank.json"
    options = f"--by validation_loss --source {stores['source']} --batch-size 16"
    cli(f"{line} {options}", *checkpoints.values(), tmp_path / "large.pt")
    found = json.loads((tmp_path / "rank.json").read_text())
    assert list(found["left_out"]) == [str(tmp_path / "large.pt")]
    assert len(found["ranking"]) == 3
    two = checkpoints["first"], tmp_path / "large.pt"
    cli(f"{line} {options}", *two, code=2, says="fewer than two checkpoints can be measured")


def test_estimates_that_are_not_paired_are_refused():
    a, b = estimate(torch.rand(10)), estimate(torch.rand(10), seed=1)
    with refused("not paired: seed"):
        ranking({"a": a, "b": b})
    with refused("1 checkpoints: a ranking needs at least two"):
        ranking({"a": a})
    one, other = estimate(torch.ones(1)), estimate(torch.full((1,), 2.0))
    with refused("a ranking needs at least two inputs"):
        ranking({"one": one, "other": other})


def test_the_command(checkpoints, tmp_path, cli):
    files = list(checkpoints.values())
    line = "--model test_rank:flat_net --size 8 -n 40 --seed 3"
    picture, record, table = (tmp_path / f"rank.{end}" for end in ("png", "json", "csv"))
    out = cli(f"rank {line} --figure {picture} --json {record} --csv {table}", *files).out
    assert max(map(len, out.splitlines()[:-3])) <= 80
    assert picture.read_bytes()[:4] == b"\x89PNG"
    found = json.loads(record.read_text())
    ordered = [entry["value"] for entry in found["ranking"]]
    assert ordered == sorted(ordered, reverse=True)
    assert found["largest"] == found["ranking"][0]["checkpoint"]
    values = {entry["checkpoint"]: entry for entry in found["ranking"]}
    for name, path in checkpoints.items():
        model = flat_net()
        model.load_state_dict(torch.load(path, weights_only=True))
        direct = fastlr.estimate(model, fastlr.ShapeImages((3, 8, 8)), n=40, seed=3)
        assert values[f"{name}.pt"]["value"] == approx(direct.value, rel=1e-6)
        assert values[f"{name}.pt"]["stderr"] == approx(direct.stderr, rel=1e-5)
        assert f"{name}.pt" in out
        assert f"{name}.pt" in table.read_text()
    assert len(found["pairs"]) == 3
    assert found["folder"] == str(tmp_path)
    captured = cli(f"rank --json - {line}", *files[:2])
    assert json.loads(captured.out)["pairs"]
    assert "Checkpoints by local redundancy" in captured.err


def two_forecasters(folder, channels):
    """Save two small PatchTSTs; return the arguments that name the model, and the files."""
    kwargs = {
        "channels": channels,
        "context": 20,
        "horizon": 3,
        "patch": 4,
        "stride": 4,
        "layers": 1,
        "width": 4,
        "heads": 2,
    }
    files = [folder / f"{seed}.pt" for seed in (0, 1)]
    for seed, file in enumerate(files):
        torch.manual_seed(seed)
        torch.save(PatchTST(**kwargs).state_dict(), file)
    model = ["--model", "fastlr.models.patchtst:PatchTST", "--model-kwargs", json.dumps(kwargs)]
    return model, list(map(str, files))


def test_series_and_settings(tmp_path, cli):
    model, files = two_forecasters(tmp_path, channels=2)
    series = "--inputs series --length 20 --features 2 -n 16"
    cli(f"rank {series}", *files, *model, says="Gaussian(sigma=1.0)")  # series are regression
    of_one = f"estimate {series} --checkpoint {files[0]} --sigma 2"
    cli(of_one, *model[1:], says="Gaussian(sigma=2.0)")


def test_what_does_not_fit_is_named(checkpoints, tmp_path, cli):
    first, both = checkpoints["first"], f"{checkpoints['first']} {checkpoints['confident']}"
    model = "--model test_rank:flat_net --size 8 -n 8"
    for line, message in (
        (f"{first} {model}", "1 checkpoints: a ranking needs at least two; fastlr estimate"),
        (f"{first} {tmp_path}/none.pt {model}", "none.pt: no such file"),
        (f"{both} {model} --classes 2", "first.pt does not fit Sequential"),
        (f"{both} {model} --inputs sounds", "--inputs sounds: choose shapes, noise, series"),
        (f"{both} {model} --length 0", "--length 0"),
        (both, "--model"),
    ):
        cli(f"rank {line}", code=2, says=message)


# -- the paper's other strategies
# ---------------------------------------------------------------------------------------


@fixture
def stores(tmp_path):
    """What the checkpoints were trained on, of 3 classes, and the next, of 4."""
    for name, classes in (("source", 3), ("target", 4)):
        synthetic_store(tmp_path / name, classes=classes, size=8, train=20, test=10, seed=classes)
    return {name: str(tmp_path / name) for name in ("source", "target")}


def test_strategies_stand_side_by_side(checkpoints, stores, tmp_path, cli):
    record = tmp_path / "rank.json"
    data = f"--source {stores['source']} --target {stores['target']} --batch-size 16 --seed 3"
    by = f"--by weight_norm,validation_loss,dormant_ratio,linear_probe --json {record}"
    line = f"rank --model test_rank:flat_net --size 8 -n 40 {data} {by}"
    out = cli(line, *checkpoints.values()).out
    table = out[
        out.index("Checkpoints by the paper's strategies") : out.index("*: the checkpoint")
    ].splitlines()
    assert table[1].split() == "checkpoint max LR probe † val. loss dormant weight norm".split()
    assert [line.split()[0] for line in table[2:]] == [path.name for path in checkpoints.values()]
    assert max(len(line) for line in out.splitlines() if str(tmp_path) not in line) <= 80
    assert "Checkpoints by local redundancy" in out
    found = json.loads(record.read_text())["strategies"]
    assert list(found) == [
        "local_redundancy",
        "linear_probe",
        "validation_loss",
        "dormant_ratio",
        "weight_norm",
    ]
    source = ImageStore.open(stores["source"])
    (x, y) = source.load(range(3), "test")
    (seen, _) = source.load(range(3), "train")
    for name, path in checkpoints.items():
        model = flat_net().eval()
        model.load_state_dict(torch.load(path, weights_only=True))
        values = {strategy: one["candidates"][f"{name}.pt"] for strategy, one in found.items()}
        with torch.no_grad():
            loss = F.cross_entropy(model(normalise(x)), y)
            units = model[2](model[1](normalise(seen).flatten(1))).mean(0)
        assert values["validation_loss"] == approx(float(loss), rel=1e-5)
        assert values["dormant_ratio"] == approx(float((units < 0.05).float().mean()))
        assert values["weight_norm"] == approx(float(fastlr.metrics.weight_norm(model)))
        assert values["linear_probe"] > 0
    for one in found.values():
        assert one["candidates"][one["pick"]] == {"least": min, "greatest": max}[one["rule"]](
            one["candidates"].values()
        )
    probes = found["linear_probe"]["candidates"]
    # They differ in their heads alone, which probes draw anew.
    assert probes["first.pt"] == probes["confident.pt"]
    assert found["weight_norm"]["pick"] == "first.pt"


def test_strategies_of_series(tmp_path, cli):
    model, files = two_forecasters(tmp_path, channels=7)
    record = tmp_path / "rank.json"
    line = "rank --by validation_loss --inputs series -n 16 --source generated:1"
    cli(f"{line} --length 20 --json {record}", *files, *model)
    found = json.loads(record.read_text())["strategies"]["validation_loss"]["candidates"]
    windows = split_series(open_series("generated:1"), 20, 3).validation
    for name, value in found.items():
        network = PatchTST(**json.loads(model[-1])).eval()
        network.load_state_dict(torch.load(tmp_path / name, weights_only=True))
        x, y = windows.batch(torch.arange(len(windows)))
        with torch.no_grad():
            assert value == approx(float(F.mse_loss(network(x), y)), rel=1e-5)
    says = "generated:1: the model does not run on windows of 24 rows and 7 features"
    cli(f"{line} --length 24", *files, *model, code=2, says=says)


def test_data_that_a_strategy_needs_are_asked_for(checkpoints, stores, cli):
    source, target = stores["source"], stores["target"]
    for line, message in (
        (
            "--by validation_loss",
            "--by validation_loss needs --source DATA, what the checkpoints were trained on",
        ),
        ("--by weight_norm,dormant_ratio", "--by dormant_ratio needs --source DATA"),
        (
            "--by linear_probe",
            "--by linear_probe needs --target DATA, what they shall be trained on next",
        ),
        (
            f"--by weight_norm --source {source}",
            "--source goes with --by validation_loss or dormant_ratio",
        ),
        (f"--target {target}", "--target goes with --by linear_probe"),
        ("--by weight", "--by weight: choose from linear_probe, local_redundancy"),
        ("--head 3", "--head goes with --by linear_probe"),
        (
            f"--by linear_probe --target {target} --head none",
            "head=none: the model has no such part",
        ),
        (
            f"--by validation_loss --source {target}",
            "has 4 classes, the model 3 outputs: give --classes",
        ),
        ("--by weight_norm --dtype fp16", "--dtype fp16 goes with local_redundancy alone"),
        ("--by validation_loss --source none.csv", "no series none.csv"),
    ):
        command = f"rank --model test_rank:flat_net --size 8 -n 8 {line}"
        cli(command, *checkpoints.values(), code=2, says=message)
