"""Triton reads TRITON_INTERPRET when it is imported, so these tests have a process of their own (scripts/test.sh).

`TRITON_INTERPRET=1 pytest tests/triton` interprets the kernels on the CPU; `TRITON_INTERPRET=0` runs the same tests on
a GPU. Without the variable nothing here is collected.
"""

from __future__ import annotations

import os

import pytest
import torch

collect_ignore_glob = [] if "TRITON_INTERPRET" in os.environ else ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """The interpreter is numpy with one thread; the references need no more."""
    torch.set_num_threads(1)
