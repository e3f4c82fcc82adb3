"""Blocks of a model that are run as one: folded convolutions, gates, attention."""
