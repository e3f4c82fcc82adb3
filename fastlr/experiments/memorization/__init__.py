"""Memorization capacity."""
