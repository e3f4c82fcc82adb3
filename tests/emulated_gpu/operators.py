"""Operators that PyTorch has on a GPU only, in plain torch.

They are registered for the CPU, where the kernel of memory.cpp looks for them.
"""

import torch

KERNELS = {}  # by the operator's name


def on_cpu(name):
    """Return a decorator for the kernel of an operator."""
    return lambda kernel: KERNELS.setdefault(name, kernel)


@on_cpu("bmm.dtype")
def bmm(a, b, dtype):
    return torch.bmm(a.to(dtype), b.to(dtype))


@on_cpu("_fused_rms_norm")
def rms_norm(x, shape, weight, eps):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    axes = [*range(-len(shape), 0)]
    rrms = (wide.square().mean(axes, keepdim=True) + eps).rsqrt()
    out = wide * rrms
    return (out if weight is None else out * weight).to(x.dtype), rrms


@on_cpu("_fused_rms_norm_backward")
def rms_norm_backward(g, x, shape, rrms, weight, wanted):
    axes = [*range(-len(shape), 0)]
    normed = x.to(rrms.dtype) * rrms
    scaled = g.to(rrms.dtype) if weight is None else g * weight.to(rrms.dtype)
    gx = (scaled - normed * (scaled * normed).mean(axes, keepdim=True)) * rrms
    of_weight = (g * normed).sum_to_size(shape).to(x.dtype) if wanted[1] else None
    return gx.to(x.dtype), of_weight


@on_cpu("_thnn_fused_lstm_cell")
def lstm_cell(of_input, of_state, cell, *biases):
    i, f, c, o = (of_input + of_state + sum(b for b in biases if b is not None)).chunk(4, 1)
    i, f, c, o = i.sigmoid(), f.sigmoid(), c.tanh(), o.sigmoid()
    new = f * cell + i * c
    return o * new.tanh(), new, torch.cat([i, f, c, o], 1)


@on_cpu("_thnn_fused_lstm_cell_backward_impl")
def lstm_cell_backward(g, g_cell, cell, new, gates, has_bias):
    i, f, c, o = gates.chunk(4, 1)
    g = torch.zeros_like(new) if g is None else g
    shape = new.tanh()
    inner = g * o * (1 - shape**2) + (0 if g_cell is None else g_cell)
    of_gates = (
        inner * c * i * (1 - i),
        inner * cell * f * (1 - f),
        inner * i * (1 - c**2),
        g * shape * o * (1 - o),
    )
    of_gates = torch.cat(of_gates, 1)
    return of_gates, inner * f, of_gates.sum(0)


@on_cpu("_thnn_fused_gru_cell")
def gru_cell(of_input, of_state, state, b_input=None, b_state=None):
    if b_input is not None:
        of_input, of_state = of_input + b_input, of_state + b_state
    (r, z, n), (of_r, of_z, of_n) = of_input.chunk(3, 1), of_state.chunk(3, 1)
    r, z = (r + of_r).sigmoid(), (z + of_z).sigmoid()
    n = (n + r * of_n).tanh()
    return n + z * (state - n), torch.cat([r, z, n, state, of_n], 1)


@on_cpu("_thnn_fused_gru_cell_backward")
def gru_cell_backward(g, kept, has_bias):
    r, z, n, state, of_n = kept.chunk(5, 1)
    g_n = g * (1 - z) * (1 - n**2)
    g_r, g_z = g_n * of_n * r * (1 - r), g * (state - n) * z * (1 - z)
    of_input, of_state = torch.cat([g_r, g_z, g_n], 1), torch.cat([g_r, g_z, g_n * r], 1)
    return of_input, of_state, g * z, of_input.sum(0), of_state.sum(0)


def register():
    """Register all kernels; return their library, which must be kept."""
    library = torch.library.Library("aten", "IMPL", "CPU")
    for name, kernel in KERNELS.items():
        library.impl(name, kernel)
    return library
