"""The command line: results, one-line errors and exit codes."""

import json
import os
import re
import subprocess
import sys
import textwrap

import torch
import typer
from command_line import NETS
from PIL import Image
from pytest import approx, fixture, mark

import fastlr
from fastlr.cli.main import app
from fastlr.experiments.continual.interventions import INTERVENTIONS

BASE = "--size 16 --n 6 --device cpu"


@fixture(autouse=True)
def nets(tmp_path, monkeypatch):
    (tmp_path / "cli_nets.py").write_text(textwrap.dedent(NETS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    sys.modules.pop("cli_nets", None)


@fixture
def refused(cli):
    """A function that runs a command which ends with one line that says what is wrong."""

    def run(line, *more, code, says):
        error = cli(line, *more, code=code, says=says).err
        assert (
            error.startswith("error: ") and error.count("\n") == 1 and "Traceback" not in error
        ), error

    return run


def test_result_is_the_estimate(cli):
    out = cli(f"estimate cli_nets:net --json out.json {BASE}").out
    assert "local redundancy" in out
    assert max(map(len, out.splitlines())) <= 80
    record = json.load(open("out.json"))
    import cli_nets

    torch.manual_seed(0)
    expected = fastlr.estimate(cli_nets.net(), fastlr.ShapeImages(size=(3, 16, 16)), n=6)
    assert record["value"] == approx(expected.value, rel=1e-6)
    assert record["stderr"] == approx(expected.stderr, rel=1e-5)
    assert record["per_parameter"].keys() == expected.per_parameter.keys()
    assert record["model"] == "cli_nets:net"


def test_options_reach_the_estimate(cli):
    import cli_nets

    torch.manual_seed(11)
    model = cli_nets.net(num_classes=2)
    torch.save({"state_dict": model.state_dict()}, "c.pt")
    options = "--checkpoint c.pt --classes 2 --inputs noise --probe exact --seed 3 --batch-size 4"
    record = json.loads(cli(f"estimate cli_nets:net --json - --dtype bf16 {options} {BASE}").out)
    noise = fastlr.NoiseImages(size=(3, 16, 16))
    expected = fastlr.estimate(
        model, noise, n=6, probe="exact", seed=3, batch_size=4, dtype=torch.bfloat16
    )
    assert record["value"] == approx(expected.value, rel=1e-6)
    assert (record["probe"], record["seed"], record["dtype"]) == ("exact", 3, "bfloat16")


def test_target_and_own_inputs_and_gaussian(cli):
    options = "--target-rel-stderr 0.5 --min-n 4 --max-n 8 --inputs cli_nets:small_noise"
    assert 4 <= json.loads(cli(f"estimate cli_nets:net --json - {options}").out)["n"] <= 8
    options = "--size 8 --n 3 --predictive gaussian --sigma 2.0"
    record = json.loads(cli(f"estimate cli_nets:regression --json - {options}").out)
    x = fastlr.ShapeImages(size=(3, 8, 8)).batch(0, 3, seed=0, device="cpu", dtype=torch.float32)
    # One row per output: |x|^2 + 1.
    exact = 5 / 2.0**2 * (x.flatten(1).square().sum(1) + 1).mean().item()
    assert record["value"] == approx(exact, rel=1e-5)


def test_pictures_and_support(cli):
    files = "--save-images images --per-layer layers"
    out = cli(f"estimate cli_nets:net --support {BASE} {files}").out
    for name in ("images.png", "layers.png"):
        assert name in out
        extrema = Image.open(name).convert("L").getextrema()
        assert extrema[1] - extrema[0] > 50
    assert "Convolution" in out
    assert "Addmm" in out
    assert "4 parameters" in out


@mark.parametrize(
    ("arguments", "message"),
    [
        ("mobilenet_v3_larg", "mobilenet_v3_large"),
        ("cli_nets:nets", "did you mean net?"),
        ("no_module_here:f", "no_module_here"),
        ("cli_nets:net --checkpoint absent.pt", "no such file"),
        ("cli_nets:net --inputs shape", "choose shapes, noise"),
        ("cli_nets:net --inputs cli_nets:net", "no batch"),
        ("cli_nets:net --probe gauss", "rademacher"),
        ("cli_nets:net --predictive poisson", "categorical"),
        ("cli_nets:net --dtype int8", "bf16"),
        ("cli_nets:net --device tpu9", "--device tpu9"),
        ("cli_nets:net --size 0", "--size 0"),
        ("cli_nets:net --n 0", "at least 1"),
        ("cli_nets:net --json no/such/folder/out.json", "there is no folder"),
        ("cli_nets:net --per-layer no/such/folder/out.png", "there is no folder"),
        (f"cli_nets:net {BASE} --per-layer out.nonsense", "out.nonsense"),
        ("cli_nets:net --save-images .", "--save-images . is a folder: name a file in it"),
        ("cli_nets:net --n many", "--n"),
        ("cli_nets:net --nonsense", "--nonsense"),
        ("", "Missing argument"),
    ],
)
def test_user_errors_are_one_line_and_exit_2(arguments, message, refused):
    refused(f"estimate {arguments}", code=2, says=message)


def test_an_unknown_command_is_one_line_and_exits_2(refused):
    refused("estimat", code=2, says="estimat")


def test_model_errors_are_one_line_and_exit_1(refused):
    refused(f"estimate cli_nets:interacting {BASE}", code=1, says="")


def test_traceback_on_request(cli, refused):
    error = cli(f"estimate cli_nets:broken --traceback {BASE}", code=1).err
    assert "Traceback" in error
    assert "RuntimeError: the forward pass" in error
    assert error.splitlines()[-1].startswith("error: ")
    says = "Broken does not run on an input float32[2, 3, "
    refused(f"estimate cli_nets:broken {BASE}", code=1, says=says)


def found_commands(group=None, name=""):
    """Yield every command of the command line with its name."""
    for word, command in (group or typer.main.get_command(app)).commands.items():
        yield f"{name}{word}", command
        if hasattr(command, "commands"):
            yield from found_commands(command, f"{word} ")


COMMANDS = dict(found_commands())


@mark.parametrize("name", ["", *COMMANDS])
def test_help(name, cli, monkeypatch):
    """It fits a terminal, has no type for a flag, and arguments in capitals as in the text."""
    monkeypatch.setenv("COLUMNS", "80")
    text = cli(f"{name} --help").out
    assert max(map(len, text.splitlines())) <= 80
    assert "<bool>" not in text
    usage = next(line for line in text.splitlines() if "Usage:" in line)
    arguments = re.findall(r"[\[{](\w+)[\]}]", usage)
    assert all(argument.isupper() for argument in arguments)


@mark.parametrize("name", COMMANDS)
def test_help_texts_stand_alone(name):
    """They begin with a noun or a verb, and end with a full stop."""
    texts = [parameter.help for parameter in COMMANDS[name].params]
    if name == "continual":
        texts += [
            declared.metadata["about"]
            for intervention in INTERVENTIONS.values()
            for _, _, declared in intervention.declared()
        ]
    for text in texts:
        assert re.match(r"[A-Z][\w-]*[ :,]", text) and text.endswith("."), text
        assert not re.match("(Of|With|Without|How|What|That|Also|Only|On|By|A|An|The) ", text), text


@mark.parametrize(
    ("line", "text"),
    [
        ("estimate", "error: Missing argument 'MODEL'. Try 'fastlr estimate --help'.\n"),
        ("rank x.pt", "Try 'fastlr rank --help'"),
        ("data info", "Missing argument 'STORE'. Try 'fastlr data info --help'"),
        ("estimat", "No such command 'estimat'. Did you mean 'estimate'? Try 'fastlr --help'"),
        ("estimate resnet18 --siz 3", "No such option: --siz"),
        ("estimate resnet18 --support=3", "'--support' does not take a value"),
    ],
)
def test_usage_errors_say_where_the_help_is(line, text, cli):
    said = cli(line, code=2).err
    assert text in said and "--help'." in said
    assert said.count("\n") == 1


@mark.parametrize(
    ("words", "wanted"),
    [
        ("fastlr est", {"estimate"}),
        ("fastlr data pre", {"prepare"}),
        ("fastlr estimate --target", {"--target-rel-stderr"}),
        ("fastlr estimate resnet18 --probe ra", {"rademacher"}),
    ],
)
def test_shells_complete_words(words, wanted):
    env = {"_FASTLR_COMPLETE": "complete_bash", "COMP_WORDS": words}
    env |= {"COMP_CWORD": str(len(words.split()) - 1)}
    command = [sys.executable, "-m", "fastlr"]
    run = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)
    assert set(run.stdout.split()) == wanted, run.stderr


def test_dtypes_by_long_names(cli):
    line = f"estimate cli_nets:net {BASE} --json - --dtype"
    long, short = (json.loads(cli(f"{line} {name}").out) for name in ("bfloat16", "bf16"))
    assert long["dtype"] == short["dtype"] == "bfloat16"
    assert long["value"] == short["value"]
    cli(f"{line} double", code=2, says="--dtype double: choose one of fp32, bf16, fp16")


def test_version_and_help(cli):
    assert cli("--version").out.startswith("fastlr ")
    commands = re.findall(r"^│ (\w+) ", cli("--help").out, re.MULTILINE)
    newcomers = ["estimate", "rank", "demo", "doctor", "bench"]
    runs = ["continual", "transfer", "memorize", "sweep"]
    assert commands == [*newcomers, *runs, "report", "cost", "ablate", "data"]
    text = " ".join(cli("estimate --help").out.split())
    assert "-m fastlr estimate ...), all processes share the inputs. " in text
    assert "``" not in cli("continual --help").out
    cli(code=2)
