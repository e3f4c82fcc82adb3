"""Results of an op against those of its definition."""

import torch


def pairs(got, want):
    """The results of two runs of an op, one tensor or several, side by side."""
    sides = [t if isinstance(t, tuple) else (t,) for t in (got, want)]
    return list(zip(*sides, strict=True))


def assert_near(got, want, tolerance, *, of="result"):
    """Hold results to a definition: off by at most ``tolerance`` of its largest value.

    ``of``: the largest value of the whole result, of the row (the last axis) or the element itself.
    What the definition leaves out (None) must be left out, what is not finite must be the same.
    """
    assert got is not NotImplemented
    for result, truth in pairs(got, want):
        if truth is None:
            assert result is None
            continue
        result, truth = (t.detach().cpu().double() for t in (result, truth))
        torch.testing.assert_close(
            *(t / scale_of(truth, of) for t in (result, truth)),
            rtol=0,
            atol=tolerance,
            equal_nan=True,
        )


def scale_of(truth, of):
    """The largest finite size of a result, of its rows or of its elements; never zero."""
    size = truth.abs().nan_to_num(nan=0, posinf=0)
    if of != "element" and size.numel():
        size = size.amax(-1, keepdim=True) if of == "row" else size.amax()
    return size.clamp_min(torch.finfo(torch.float64).tiny)
