"""How fast fastlr is on this machine, correctness first: what ``fastlr bench`` and ``python -m bench.gpu`` run."""
