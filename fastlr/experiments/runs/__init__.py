"""Run folders, records, checkpoints, resumption, queues of runs, reports.

The way of a seed: the command (`fastlr.cli.experiments`) names the runs and gives them to a `Queue`
(`fastlr.experiments.runs.queue`), which writes them down and starts a process for each
(`fastlr.experiments.runs.processes`; on a cluster `fastlr.experiments.runs.ray` does). There `main`
in `fastlr.experiments.runs.experiment` has the `Driver` begin the run, or go on with it, and its
``carry_on`` does the steps that are left. A single run begins at the `Driver`.
"""
