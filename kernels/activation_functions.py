"""The activations of the folded path and their derivatives, for fp32 tiles in registers.

Kernels call them.

ACT is a key of ``fastlr.ops.activations.ACTIVATIONS``, as a string constexpr. NaN stays NaN in
the forward direction. Nothing is launched from here: no traffic of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

# After tensors, or Triton 3.9's interpreter makes constants of products.
_ROOT_HALF = tl.constexpr(0.7071067811865476)
_NORMAL = tl.constexpr(0.3989422804014327)  # density of the normal distribution at 0
_TANH_SCALE = tl.constexpr(0.7978845608028654)  # sqrt(2 / pi)
_TANH_CUBIC = tl.constexpr(0.044715)


@triton.jit
def _tanh_as_sigmoid(x):
    """Return (1 + tanh(u)) / 2 for the u of gelu's tanh form, as a sigmoid: no further function."""
    return tl.sigmoid((x + x * _TANH_CUBIC * x * x) * (2.0 * _TANH_SCALE))


@triton.jit
def act_forward(x, ACT: tl.constexpr):
    """The activation of fp32 values."""
    if ACT == "relu":
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACT == "relu6":
        positive = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return tl.minimum(positive, 6.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACT == "hardswish":
        return x * tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0) * (1.0 / 6.0)
    elif ACT == "silu":
        return x * tl.sigmoid(x)
    elif ACT == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * _ROOT_HALF))
    elif ACT == "gelu_tanh":
        return x * _tanh_as_sigmoid(x)
    else:
        tl.static_assert(ACT == "none", "no such activation")
        return x


@triton.jit
def activated(x, ACT: tl.constexpr):
    """The activation of what was loaded, in its dtype. Zero, as beyond the edge, stays zero."""
    if ACT == "none":
        return x
    else:
        return act_forward(x.to(tl.float32), ACT).to(x.dtype)


@triton.jit
def act_gradient(g, kept, ACT: tl.constexpr):
    """Return ``g`` (fp32) times the derivative.

    An infinite gradient does not pass where the activation is flat.
    """
    if ACT == "none":
        return g
    kept = kept.to(tl.float32)
    if ACT == "relu":
        return tl.where(kept > 0.0, g, 0.0)
    elif ACT == "relu6":
        return tl.where((kept > 0.0) & (kept < 6.0), g, 0.0)
    elif ACT == "hardswish":
        return tl.where(kept <= -3.0, 0.0, g * act_derivative(kept, ACT))
    else:
        return g * act_derivative(kept, ACT)


@triton.jit
def act_derivative(kept, ACT: tl.constexpr):
    """Return the derivative of the activation in fp32.

    ``kept`` (fp32) is the activation's output for relu and relu6, its input for the others.

    Call it for "none" neither: nothing need be loaded there (the derivative is 1).
    """
    if ACT == "relu":
        return tl.where(kept > 0.0, 1.0, 0.0)
    elif ACT == "relu6":
        return tl.where((kept > 0.0) & (kept < 6.0), 1.0, 0.0)
    elif ACT == "hardswish":
        return tl.where(kept <= -3.0, 0.0, tl.where(kept < 3.0, kept * (1.0 / 3.0) + 0.5, 1.0))
    elif ACT == "silu":
        gate = tl.sigmoid(kept)
        return gate * (1.0 + kept * (1.0 - gate))
    elif ACT == "gelu":
        return 0.5 * (1.0 + tl.erf(kept * _ROOT_HALF)) + kept * _NORMAL * tl.exp(-0.5 * kept * kept)
    elif ACT == "gelu_tanh":
        gate = _tanh_as_sigmoid(kept)
        slope = 2.0 * _TANH_SCALE * (1.0 + 3.0 * _TANH_CUBIC * kept * kept)
        # Far out the slope overflows where the gate has long been 0 or 1.
        return gate + tl.where((gate > 0.0) & (gate < 1.0), kept * gate * (1.0 - gate) * slope, 0.0)
    else:
        tl.static_assert(ACT == "none", "no such activation")
        return tl.full(kept.shape, 1.0, tl.float32)
