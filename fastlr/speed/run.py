"""The benchmark's sections for a device, in order of importance, under a budget of seconds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from fastlr.errors import InputError
from fastlr.speed import accuracy, bandwidth, kernels, machine, whole
from fastlr.speed.clock import release, timer_for
from fastlr.speed.networks import MAIN, Network, build
from fastlr.speed.record import Record, Say, Section, run_sections


@dataclass(frozen=True)
class Settings:
    """What is run.

    Attributes:
        device: "cuda" or "cpu".
        dtype: of the kernels' activations, and of autocast; "float32" for none.
        size: height and width of the images.
        n: images of the estimate; ``n_others`` of the other networks'.
        others: networks after MobileNetV3-Large.
        rounds: timed rounds of whole estimates.
        repeats: of kernels.
        batch: samples of the kernels' inputs; ``shrink`` divides their sides.
        checked: images of the accuracy section; ``loops`` of them by single backward passes.
        calibration: images behind the statistics of batch norm.
        quick: only the main cases, few modes, no torch.compile.
        budget: seconds; the last sections are dropped first.
    """

    device: str
    dtype: str
    size: int
    n: int
    n_others: int
    others: tuple[str, ...]
    rounds: int
    repeats: int
    batch: int
    shrink: int
    checked: int
    loops: int
    calibration: int
    quick: bool
    budget: float


def settings_for(device: torch.device, *, quick: bool = False, budget: float | None = None) -> Settings:
    """The settings of a full or a quick run on a GPU, or of the CPU cases (about a minute)."""
    if device.type == "cuda":
        made = Settings(
            device=str(device), dtype="bfloat16", size=224, n=5000, n_others=2000, others=("resnet50", "vit_b_16"), rounds=10,
            repeats=30, batch=256, shrink=1, checked=512, loops=4, calibration=256, quick=False, budget=480.0,
        )  # fmt: skip
        if quick:
            made = replace(made, n=1000, others=(), rounds=5, repeats=15, checked=64, quick=True, budget=180.0)
    else:
        made = Settings(
            device=str(device), dtype="float32", size=96, n=16, n_others=0, others=(), rounds=7,
            repeats=5, batch=2, shrink=2, checked=4, loops=1, calibration=32, quick=True, budget=120.0,
        )  # fmt: skip
        if quick:
            made = replace(made, n=4, rounds=3, repeats=3, shrink=8, checked=2, calibration=8)
    return made if budget is None else replace(made, budget=budget)


class Bench:
    """One run: makes the sections for its settings and collects what they find.

    Attributes:
        record: what was found.
    """

    def __init__(self, settings: Settings, say: Say = lambda text: None) -> None:
        self.settings, self.say = settings, say
        self.device = torch.device(settings.device)
        self.timer = timer_for(self.device)
        self.dtype = getattr(torch, settings.dtype)
        self.autocast = None if self.dtype == torch.float32 else self.dtype
        environment = machine.environment() | machine.gpu_details(self.device) | {"sources": machine.source_digest()}
        if self.device.type == "cpu":
            environment["gpu"] = None
        self.record = Record(environment, asdict(settings))
        if self.device.type == "cpu":
            self.record.note("CPU run: no kernel ran, ops are plain torch's; figures for a GPU need one")
        self._network: Network | None = None

    def network(self) -> Network:
        """MobileNetV3-Large, made once."""
        if self._network is None:
            self._network = self.build(MAIN)
        return self._network

    def build(self, name: str) -> Network:
        """A network with the run's settings."""
        s = self.settings
        return build(name, self.device, size=s.size, dtype=self.autocast, calibration=s.calibration)

    def sections(self) -> list[Section]:
        """Name, seconds that it is likely to take, and what to run; in order of importance."""
        gpu, quick = self.device.type == "cuda", self.settings.quick
        found = [Section("ceilings", 5, self.ceilings), Section("accuracy", 60 if gpu else 10, self.accuracy)]
        found.append(Section(MAIN, 40 if quick else 130, self.main))
        found.append(Section(kernels.SECTION, 40 if quick else 130, self.kernels))
        if gpu:
            found += [Section(name, 50, partial(self.other, name)) for name in self.settings.others]
        return found

    def run(self, extra: list[Section] | None = None, after: Callable[[], None] = lambda: None) -> Record:
        """Run all sections; ``extra`` ones come late, ``after`` is called after each."""

        def clean() -> None:
            after()
            release(self.device)

        sections = [*self.sections(), *(extra or [])]
        if self.device.type == "cuda":
            estimate = 25 if self.settings.quick else 60
            sections.append(Section("bfloat16 weights", estimate, self.low_weights))
        run_sections(self.record, sections, self.settings.budget, say=self.say, after=clean)
        return self.record

    # -- sections ---------------------------------------------------------------------------------------------------
    def ceilings(self) -> None:
        """Copy bandwidth and rate of a product: what everything else is held against."""
        small = {} if self.device.type == "cuda" else {"size": 16 << 20, "repeats": 9}
        self.record.ceilings["copy"] = bandwidth.copy_bandwidth(self.device, self.timer, **small)
        self.record.ceilings["matmul"] = bandwidth.matmul_rate(self.device, self.timer, self.dtype)

    def accuracy(self) -> None:
        """Norms against float64."""
        s = self.settings
        precisions = (None,) if self.autocast is None else (self.autocast, None)
        chunk = 64 if self.device.type == "cuda" else 2
        accuracy.section(
            self.record, "accuracy", self.network(), n=s.checked, loops=s.loops, chunk=chunk, precisions=precisions,
            say=self.say,
        )  # fmt: skip

    def main(self) -> None:
        """The whole estimate of MobileNetV3-Large."""
        gpu = self.device.type == "cuda"
        modes = whole.GPU_MODES if gpu else whole.CPU_MODES
        self._whole(
            MAIN, self.network(), self.settings.n, modes, compiled=gpu and not self.settings.quick, by_stage=True
        )

    def other(self, name: str) -> None:
        """The default estimate of another network beside plain passes."""
        network = self.build(name)
        self._whole(name, network, self.settings.n_others, (whole.DEFAULT,), compiled=True, by_stage=False)

    def low_weights(self) -> None:
        """The default estimate with the weights themselves in bfloat16, beside plain passes of the same."""
        low = replace(self.network(), model=copy.deepcopy(self.network().model).bfloat16(), dtype=None)
        compiled = not self.settings.quick
        self._whole("bfloat16 weights", low, self.settings.n, (whole.DEFAULT,), compiled=compiled, by_stage=False)

    def _whole(
        self, name: str, network: Network, n: int, modes: tuple[whole.Mode, ...], *, compiled: bool, by_stage: bool
    ) -> None:  # fmt: skip
        self._need_ceilings()
        folded = name == MAIN
        whole.section(
            self.record, name, network, n=n, modes=modes, rounds=self.settings.rounds, compiled=compiled,
            folded_plain=folded, by_stage=by_stage, say=self.say, seconds_for_rounds=30 if name == MAIN else 12,
        )  # fmt: skip

    def kernels(self) -> None:
        """Each op with a kernel."""
        self._need_ceilings()
        s = self.settings
        kernels.section(
            self.record, self.device, self.timer, kernels.chosen(s.quick), dtype=self.dtype, batch=s.batch,
            repeats=s.repeats, bandwidth=self.record.ceilings["copy"]["bytes_per_second"],
            rate=self.record.ceilings["matmul"]["operations_per_second"], shrink=s.shrink,
            limit=40 if s.quick else 150,
        )  # fmt: skip

    def _need_ceilings(self) -> None:
        if "matmul" not in self.record.ceilings:
            raise RuntimeError("the ceilings were not measured, so there is nothing to hold this against")


def device_named(name: str | None) -> torch.device:
    """The device to measure: the one asked for, or a GPU if there is one.

    Raises:
        InputError: it cannot be used.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.split(":")[0] not in ("cpu", "cuda"):
        raise InputError(f"--device {name}: choose cpu, cuda or cuda:1")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"--device {name}: torch finds no GPU here; leave the option out to run the CPU cases")
    return torch.device(name)


def check_files(**files: str | Path | None) -> None:
    """Refuse files to write whose folder does not exist, before anything is measured."""
    for option, path in files.items():
        if path is not None and str(path) != "-" and not Path(path).absolute().parent.is_dir():
            raise InputError(f"--{option} {path}: there is no folder {Path(path).absolute().parent}")


def exit_code(record: Record) -> int:
    """0, or 1 if anything failed or is wrong."""
    return int(bool(record.failures))
