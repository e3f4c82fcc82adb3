"""A model as it is measured: how it is called, and how it is left as it was."""
