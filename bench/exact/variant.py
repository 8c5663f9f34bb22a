"""A runner that is wrong on purpose: what it computes for a row depends on the batch. The check must notice."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.plan import BatchPlan, Sampled
from engine.sampling import choose_ids
from kernels.sampling.reference import sample


class VariantRunner:
    """Rounds logits to quarters when a step has more than one row: another kernel for another size, a coarse one."""

    def __init__(self, inner: Any) -> None:
        """Wrap a runner that has `logits(rows)`."""
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def execute(self, plan: BatchPlan) -> list[Sampled]:
        """Compute one step with the fault in it."""
        sampling = [row for row in plan.rows if row.sample]
        found = self._inner.logits(plan.rows)
        if not sampling:
            return []
        logits = np.asarray(found, np.float32)
        if len(plan.rows) > 1:
            logits = (np.round(logits * 4) / 4).astype(np.float32)
        return choose_ids(sampling, logits, self._inner.eos_ids, sample)
