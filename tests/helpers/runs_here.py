"""Runs of a queue in the process of the test, which has imported what they need."""

from contextlib import redirect_stderr, suppress
from unittest.mock import patch

from fastlr.experiments.runs import experiment


def messages_here(jobs, slots):
    """Stand in for `job_messages` where jobs are runs: one after another, without processes."""
    for job in jobs:
        sent = [{"event": "started"}]
        with (
            job.log.open("a") as log,
            redirect_stderr(log),
            suppress(SystemExit),
            patch.object(experiment, "attach", return_value=sent.append),
        ):
            experiment.main(job.command[-1])
        error = next((message["error"] for message in sent if "error" in message), None)
        ended = {"event": "ended", "error": error}
        for message in [*sent, ended]:
            yield job.name, message
