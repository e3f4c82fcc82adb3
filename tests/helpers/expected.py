"""What tests expect: refusals and warnings by their words, a GPU, Triton."""

from importlib.util import find_spec

import pytest
import torch

from fastlr.errors import FastlrWarning, InputError

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


def failing(error):
    """A function that raises this whatever it is given."""

    def fail(*args, **options):
        raise error

    return fail


def refused(words, error=InputError):
    """Hold that the block raises an error with these words."""
    return pytest.raises(error, match=words)


def warned(words):
    """Hold that the block warns, with these words."""
    return pytest.warns(FastlrWarning, match=words)
