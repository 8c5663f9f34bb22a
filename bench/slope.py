"""A straight line through measurements, and how sure its slope is. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z95 = 1.96


@dataclass(frozen=True, slots=True)
class Slope:
    """Least squares: the slope, and the bounds between which it lies with 95 % confidence."""

    value: float
    low: float
    high: float


def least_squares(xs: Sequence[float], ys: Sequence[float]) -> Slope:
    """Fit `y = a + b·x` and return `b`.

    Successive measurements of memory resemble each other, so they carry less than their number says: the standard
    error is widened by sqrt((1 + r) / (1 - r)) with the residuals' autocorrelation r of lag one (Bartlett's effective
    sample size for an autoregressive series).

    Raises:
        ValueError: if there are fewer than four points, or all lie at one x.
    """
    count = len(xs)
    if count < 4 or count != len(ys):
        raise ValueError(f"{count} and {len(ys)} values are no line; four points or more are")
    mean_x, mean_y = math.fsum(xs) / count, math.fsum(ys) / count
    spread = math.fsum((x - mean_x) ** 2 for x in xs)
    if spread == 0.0:
        raise ValueError("all points lie at one x")
    slope = math.fsum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    rest = [y - mean_y - slope * (x - mean_x) for x, y in zip(xs, ys, strict=True)]
    squares = math.fsum(r * r for r in rest)
    if squares <= 1e-12 * max(1.0, mean_y * mean_y):
        return Slope(slope, slope, slope)
    alike = math.fsum(a * b for a, b in zip(rest, rest[1:], strict=False)) / squares
    alike = min(0.99, max(0.0, alike))
    error = math.sqrt(squares / (count - 2) / spread) * math.sqrt((1 + alike) / (1 - alike))
    return Slope(slope, slope - Z95 * error, slope + Z95 * error)
