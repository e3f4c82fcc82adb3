"""A run folder that several ranks work on.

Rank 0 alone reads and writes it; the others get what it finds there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fastlr.distributed.process_group import broadcast
from fastlr.distributed.sharding import Team, team
from fastlr.experiments.runs.folder import Run


class SharedRun(Run):
    """A run as all ranks of a team see it; every rank calls the same methods in the same order.

    What rank 0 raises is raised on all of them, as they wait for each other where it writes a step.
    Only rank 0 needs the folder.

    Args:
        members: The ranks.
        run: The run as rank 0 has opened it; None on the others.
    """

    def __init__(self, members: Team, run: Run | None) -> None:
        self._members, self._run = members, run
        texts = None if run is None else json.dumps([str(run.path), run.config, run.records])
        try:
            texts, self.state = broadcast(members, None if run is None else (texts, run.state))
        except BaseException:
            self.close()
            raise
        path, self.config, self.records = json.loads(texts)
        self.path = Path(path)

    def set_config(self, config: Mapping[str, Any]) -> None:
        """See `Run`."""
        self.config = dict(config)
        self._on_first("set_config", config)

    def append(self, record: Mapping[str, Any]) -> None:
        """See `Run`."""
        self._on_first("append", record)
        self.records.append(dict(record))

    def commit(self, record: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """See `Run`; every rank has the record of rank 0 afterwards."""
        self._on_first("commit", record, state)
        last = None if self._run is None else self._run.records[-1]
        self.records.append(self._members.share(last)[0])

    def abandon(self) -> None:
        """See `Run`."""
        self._on_first("abandon")

    def write_checkpoint(self, name: str, content: Any) -> None:
        """See `Run`."""
        self._on_first("write_checkpoint", name, content)

    def write_row(self, name: str, row: int, values: Tensor) -> None:
        """See `Run`."""
        self._on_first("write_row", name, row, values)

    def read_checkpoint(self, name: str) -> Any:
        """See `Run`."""
        return broadcast(self._members, self._on_first("read_checkpoint", name))

    def close(self) -> None:
        """See `Run`."""
        self._on_first("close")

    def _on_first(self, method: str, *given: Any) -> Any:
        """Call a method of the run on rank 0; None on the others."""
        return None if self._run is None else getattr(self._run, method)(*given)


def opened(work: Callable[[], Run]) -> Run:
    """Return the run that ``work`` creates or resumes; with several ranks, rank 0 alone does that.

    Args:
        work: Such as ``lambda: Run.resume(path)``.

    Raises:
        InputError, FastlrError: As ``work`` does, on all ranks.
    """
    members = team()
    if members.size == 1:
        return work()
    return SharedRun(members, work() if members.rank == 0 else None)
