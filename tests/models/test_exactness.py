"""The probe finds shapes in which products do not depend on their batch, on machines that we make up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.linear import reference
from models import exactness


def machine(monkeypatch: pytest.MonkeyPatch, off: Callable[[torch.Tensor], bool]) -> None:
    """Let products be off by a little whenever `off(x)` says so."""

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = torch.stack([weight.float().mv(row) for row in x.float()])
        return y + 1e-6 if off(x) else y

    for module in (reference, exactness):
        monkeypatch.setattr(module, "linear_op", product)


def test_a_difference_in_one_row_of_a_hundred_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short sums hardly ever show that another kernel made them; single rows must be padded all the same."""
    machine(monkeypatch, lambda x: len(x) == 1 and int(x.float().abs().sum() * 1000) % 100 == 0)
    weight = torch.ones(4, 32, dtype=torch.bfloat16)

    assert not exactness._rows_agree(weight, 1)
    assert exactness._rows_agree(weight, 2)


def test_long_products_that_are_summed_otherwise_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The canonical number of rows is the most that a call gets then, and no bound where long ones agree."""
    machine(monkeypatch, lambda x: len(x) > 300)
    weight = torch.ones(4, 32, dtype=torch.bfloat16)

    assert not exactness._long_rows_agree(weight)
    found = exactness._probe([weight], 1, 1, 16)
    assert found.max_rows == {(4, 32): max(exactness.PROBE_ROWS)} and found.min_rows == {(4, 32): 1}

    machine(monkeypatch, lambda x: False)
    assert exactness._probe([weight], 1, 1, 16).max_rows == {}


def test_a_machine_without_such_shapes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is served with bits that depend on chance."""
    calls: list[int] = []

    def chance(x: torch.Tensor) -> bool:
        calls.append(len(x))
        return len(calls) % 2 == 0

    machine(monkeypatch, chance)

    with pytest.raises(exactness.NotExact, match="whatever the padding"):
        exactness._probe([torch.ones(4, 32, dtype=torch.bfloat16)], 1, 1, 16)
