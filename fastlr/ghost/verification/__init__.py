"""Checks that a number passes before it is returned."""
