"""``python -m fastlr``: the command line."""

from __future__ import annotations

import sys

from fastlr.cli import main

sys.exit(main())
