"""Import this before fastlr's kernels where TRITON_INTERPRET=1: it repairs Triton 3.6's interpreter for NumPy 2.4.

``range()`` over a run-time value makes a Python integer of an array of one element, which NumPy no longer allows. Kernels
need such loops: Triton pipelines the loads of ``range``, not of ``while``.
"""

import triton.runtime.interpreter as interpreter

_plain = interpreter._patch_lang_tensor


def _patched(tensor, scope):
    _plain(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patched
