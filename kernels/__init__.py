"""Triton kernels, one file an op, named like its plain twin in fastlr.ops.reference.

Triton is imported only by those files.
"""
