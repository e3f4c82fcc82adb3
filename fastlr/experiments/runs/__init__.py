"""Run folders, queues of runs, and the processes they run in."""
