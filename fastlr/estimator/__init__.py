"""The estimator of the local redundancy, its results and their statistics."""
