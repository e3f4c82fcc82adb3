"""Benchmarks of fastlr: named cases, timing, and the same work done by other tools."""
