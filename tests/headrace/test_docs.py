"""Pages that are made from the code are up to date."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_table_of_settings_is_up_to_date() -> None:
    """The page is generated from the settings."""
    script = ROOT / "scripts" / "make_config_docs.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
