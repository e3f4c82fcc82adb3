"""The command line: ``fastlr.cli.main`` is the entry point."""
