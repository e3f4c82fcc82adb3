"""Reproducible long runs: continual learning, memorisation, transfer, and their run folders."""
