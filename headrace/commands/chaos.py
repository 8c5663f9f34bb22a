"""`headrace chaos`: becomes `python -m chaos`. Nothing here imports it: what serves knows nothing of what breaks it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn


def run(arguments: Sequence[str]) -> NoReturn:
    """Run the chaos command line in place of this process."""
    os.execv(sys.executable, [sys.executable, "-m", "chaos", *arguments])
