"""Triton kernels, one file an op, named like its function in plain torch (fastlr.ops).

Triton is imported only by those files.
"""
