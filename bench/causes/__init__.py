"""Does local redundancy cause plasticity? Small networks with and without interventions.

`runs` makes the runs (``python -m bench.causes OUT``); ``python -m bench.causes.report`` compares
them by intervention and by seed: `comparison` takes late accuracy and measures, `correlations`
correlates them, `sheets`, `prose` and `figure` say what was found.
"""
