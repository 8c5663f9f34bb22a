"""A short run of the check against transformers; `scripts/check_oracle.py` alone runs all of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.files import ROOT


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_logits_ids_and_chats_equal_the_oracles(smol: Path) -> None:
    """In a process of its own, where transformers cannot take our package `kernels` for another one."""
    command = [sys.executable, str(ROOT / "scripts/check_oracle.py"), str(smol), "--prompts", "2", "--tokens", "8"]

    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OMP_WAIT_POLICY": "passive"}, timeout=280
    )

    assert done.stdout, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["ok"] and result["max_abs_logit_diff"] <= 2e-3 and result["positions"] > 10
    assert done.returncode == 0
