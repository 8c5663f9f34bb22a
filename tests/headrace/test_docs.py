"""Pages that are made from the code are up to date."""

from __future__ import annotations

import re
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


def test_the_tests_and_files_that_the_rules_of_failover_name_exist() -> None:
    """A rule whose test was renamed or dropped is one that nothing holds."""
    page = (ROOT / "docs" / "failover.md").read_text()
    files = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    written = set(re.findall(r"`([^`]+)`", page))
    names = {name.strip("…*") for name in written if re.fullmatch(r"…?[a-z]+(_[a-z]+){2,}\*?", name)}
    tests = "\n".join(re.findall(r"def (test_\w+)", "\n".join(files.values())))
    assert len(names) > 25
    assert [name for name in names if name not in tests] == []
    assert {name for name in written if name.startswith("test_")} <= set(files)
    paths = {name for name in written if re.fullmatch(r"(actors|runtime|edge|kvstore|headrace|scripts)/\w+\.py", name)}
    assert paths and all((ROOT / path).is_file() for path in paths)
