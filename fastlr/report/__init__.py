"""Estimates as tables, charts and pictures."""
