"""Run steps one after another, write each result at once, and resume an earlier run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import tarfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench.gpu_run.steps import OWN_CACHE, ROOT, Step

LEAST = 20.0  # seconds: no step begins with less, unless its own limit is less
RESERVE = 8.0  # seconds at the end, for the archives
GRACE = 5.0  # seconds between SIGTERM and SIGKILL
PRINTED = 200_000  # characters of a step's output that are kept
LARGEST = 15 << 20  # bytes of an archive
LAST_LINES = 40  # of the output of a step whose run was killed, for the report
RESULTS, TESTS, REPORT = "results.jsonl", "tests.jsonl", "report.txt"
LOG = "step.log"  # output of the step under way
NAMES = {"started": "crashed or cut short", "collected": "not yet run"}  # of outcomes


@dataclasses.dataclass
class Result:
    """An attempt of a step.

    Attributes:
        step: Name of the step.
        code: Exit code, or None where the time limit ended it.
        seconds: Time that it took.
        limit: Time limit, which the end of the whole run may have shortened.
        printed: Output, both streams, or its end.
    """

    step: str
    code: int | None
    seconds: float
    limit: float
    printed: str

    @property
    def passed(self) -> bool:
        """True if the command succeeded."""
        return self.code == 0

    def counts(self, step: Step) -> bool:
        """Return True unless the end of its run cut the attempt short."""
        return self.code is not None or self.limit >= step.seconds

    def __str__(self) -> str:
        """Return the outcome in a line, with the last line of the output."""
        outcome = f"exit code {self.code}"
        if self.passed:
            outcome = "passed"
        elif self.code is None:
            outcome = f"stopped at its limit of {self.limit:.0f} s"
        last_line = self.printed.strip().rpartition("\n")[2]
        return f"{self.step}: {outcome} ({self.seconds:.1f} s) {last_line[:150]}".rstrip()


def whole_lines(path: Path) -> list[str]:
    """Return the lines of a file that are JSON: a killed process may have left half a line."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            json.loads(line)
            lines.append(line)
    return lines


def summary_of_tests(path: Path) -> str:
    """Return the number of tests by their last outcome in a line, or "" without any test."""
    tests = [json.loads(line) for line in whole_lines(path)]
    last_outcomes = {test["test"]: test["outcome"] for test in tests}
    counts = Counter(last_outcomes.values())
    outcomes = ("passed", "failed", "started", "skipped", "collected")
    parts = [f"{counts[outcome]} {NAMES.get(outcome, outcome)}" for outcome in outcomes]
    return f"tests: {', '.join(parts)}" if tests else ""


def signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group; return False if it has no process any more."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def bound_to_this_process(group: int) -> Iterator[None]:
    """Have a process group killed if this process dies, even by SIGKILL.

    A shell outside the group reads from a pipe, which closes when this process dies.
    """
    words = ["sh", "-c", f"read _; kill -s KILL -- -{group}"]
    watcher = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        watcher.kill()
        watcher.communicate()


def run_command(
    step: Step, limit: float, environment: Mapping[str, str], log: Path
) -> tuple[int | None, str]:
    """Run a step's command in a process group of its own, all of which ends with it.

    Args:
        step: The step.
        limit: Seconds after which the group is stopped: SIGTERM, then SIGKILL.
        environment: Variables of its environment.
        log: File for the step's name, in the first line, and its output.

    Returns:
        (exit code, or None at the limit; the end of the output).
    """
    code = None
    with open(log, "w+", encoding="utf-8", errors="replace") as file:
        file.write(f"{step.name}\n")
        file.flush()
        process = subprocess.Popen(
            step.command,
            shell=True,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        with bound_to_this_process(process.pid):
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                signal_group(process.pid, signal.SIGTERM)
                end = time.monotonic() + GRACE
                while time.monotonic() < end and signal_group(process.pid, 0):
                    process.poll()
                    time.sleep(0.05)
            finally:
                signal_group(process.pid, signal.SIGKILL)  # what is left would hold GPU memory
                process.wait()
        file.seek(0)
        return code, file.read().partition("\n")[2][-PRINTED:]


class Archive:
    """A folder that travels from run to run as a compressed file.

    Args:
        folder: The folder, which is created.
        path: The file.
    """

    def __init__(self, folder: Path, path: Path) -> None:
        self.folder, self.path = folder, path
        self._packed: list[tuple[str, int, int]] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def restore(self, earlier: Path) -> str:
        """Unpack an earlier run's file and keep it; return a remark, or ""."""
        if not earlier.exists():
            return ""
        try:
            with tarfile.open(earlier) as tar:
                tar.extractall(self.folder, filter="data")
        except (tarfile.TarError, EOFError, OSError) as error:
            return f"{earlier}: cannot be unpacked ({error})"
        if earlier.resolve() != self.path.resolve():
            shutil.copyfile(earlier, self.path)
        self._packed = self._contents()
        return ""

    def pack(self) -> str:
        """Replace the file if the folder has changed; return a remark, or ""."""
        contents = self._contents()
        if contents == self._packed:
            return ""
        partial = self.path.with_name(f"{self.path.name}.partial")
        try:
            with tarfile.open(partial, "w:gz", compresslevel=1) as tar:
                tar.add(self.folder, ".")
        except OSError as error:  # such as a full disk
            partial.unlink(missing_ok=True)
            return f"{self.path.name}: not replaced ({error})"
        self._packed = contents
        size = partial.stat().st_size
        if size > LARGEST:
            partial.unlink()
            return f"{self.path.name}: not replaced, it would have {size >> 20} MiB"
        os.replace(partial, self.path)
        return ""

    def _contents(self) -> list[tuple[str, int, int]]:
        stats = [(path, path.stat()) for path in self.folder.rglob("*") if path.is_file()]
        return sorted((str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats)


class GpuRun:
    """A run of steps, whose files are in one folder.

    Args:
        steps: Steps in order.
        out: Folder of the five files.
        work: Folder for what steps need while they run.
        resume: Folder of an earlier run's files, which may be ``out``, or None.
        environment: Variables of the steps' environment.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        out: Path,
        work: Path,
        resume: Path | None,
        environment: Mapping[str, str],
    ) -> None:
        self.steps, self.out, self.work = steps, out, work
        out.mkdir(parents=True, exist_ok=True)
        records, cache = work / "records", work / "cache"
        self.archives = [
            Archive(records, out / "records.tar.gz"),
            Archive(cache, out / "triton.tar.gz"),
        ]
        self.environment = dict(environment) | {
            "RECORDS": str(records),
            "GPU_RUN_TESTS": str(out / TESTS),
            "GPU_RUN_EARLIER_TESTS": str(work / TESTS),
        }
        self.triton_cache = cache / "triton"
        self.results: list[Result] = []
        if resume is not None:
            self._restore(resume)
        self._report_killed_step((resume or out) / LOG)
        (out / LOG).unlink(missing_ok=True)

    def _restore(self, earlier: Path) -> None:
        """Take over the files of an earlier run; results come last, as records belong to them."""
        report = earlier / REPORT
        if report.exists() and report.resolve() != (self.out / REPORT).resolve():
            shutil.copyfile(report, self.out / REPORT)
        for archive in self.archives:
            self.say(archive.restore(earlier / archive.path.name))
        for name in (RESULTS, TESTS):
            lines = whole_lines(earlier / name)
            partial = self.out / f"{name}.partial"
            partial.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            os.replace(partial, self.out / name)
        self.results = [Result(**json.loads(line)) for line in whole_lines(self.out / RESULTS)]

    def _report_killed_step(self, log: Path) -> None:
        """Report the end of a step's output if its run was killed before it had a result."""
        if log.exists():
            text = log.read_text(encoding="utf-8", errors="replace")
            name, *lines = text.splitlines() or ["a step"]
            last_lines = "\n".join(lines[-LAST_LINES:])
            self.say(f"{name}: its run was killed; the end of its output:\n{last_lines}")

    def say(self, text: str) -> None:
        """Print a line and add it to the report, unless it is empty."""
        if text:
            print(text, flush=True)
            with open(self.out / REPORT, "a", encoding="utf-8") as report:
                report.write(f"{text}\n")

    def is_open(self, step: Step) -> bool:
        """Return True if a step has neither passed nor used up its attempts."""
        tried = [each for each in self.results if each.step == step.name and each.counts(step)]
        return not any(each.passed for each in tried) and len(tried) < step.attempts

    def run(self, seconds: float) -> int:
        """Run the open steps in order, and report the number of tests by outcome.

        Args:
            seconds: Time for all of them.

        Returns:
            1 if a step failed and none is left to try, or without setup none can be, else 0.
        """
        try:
            return self._run(seconds)
        finally:
            self.say(summary_of_tests(self.out / TESTS))

    def _run(self, seconds: float) -> int:
        end = time.monotonic() + seconds
        earlier = len(self.results)
        for step in self.steps:
            if not (step.setup or self.is_open(step)):
                continue
            left = end - time.monotonic() - RESERVE
            if left < min(LEAST, step.seconds):
                self.say(f"{step.name}: left for a command with --resume {self.out}")
                break
            result = self.attempt(step, min(step.seconds, left))
            if step.setup and not result.passed:
                self.say(f"no other step can run without {step.name}:\n{result.printed}")
                return 1
        failed = any(not result.passed for result in self.results[earlier:])
        more_to_try = any(self.is_open(step) for step in self.steps if not step.setup)
        return int(failed and not more_to_try)

    def attempt(self, step: Step, limit: float) -> Result:
        """Run a step once, pack its records, and only then write its result."""
        # Tests that passed are read from a copy, as the file grows while tests run.
        lines = whole_lines(self.out / TESTS)
        (self.work / TESTS).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        environment = dict(self.environment)
        if step.name not in OWN_CACHE:
            environment["TRITON_CACHE_DIR"] = str(self.triton_cache)
        begun = time.monotonic()
        code, printed = run_command(step, limit, environment, self.out / LOG)
        took = round(time.monotonic() - begun, 1)
        result = Result(step.name, code, took, round(limit, 3), printed)
        remarks = [archive.pack() for archive in self.archives]
        self.results.append(result)
        with open(self.out / RESULTS, "a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(result)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        (self.out / LOG).unlink()
        for line in (str(result), *remarks):
            self.say(line)
        return result
