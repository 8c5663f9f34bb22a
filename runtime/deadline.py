"""Deadlines: absolute Unix seconds on the wire, monotonic from the moment of receipt (R13)."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.clock import Clock


@dataclass(frozen=True, slots=True)
class Deadline:
    """A deadline as this process holds it: later steps of the wall clock no longer move it."""

    at: float  # monotonic seconds
    wall: float  # Unix seconds, for sending on

    @classmethod
    def receive(cls, wall_deadline: float, clock: Clock) -> Deadline:
        """Take an absolute deadline from a message just received."""
        return cls(clock.now() + (wall_deadline - clock.wall()), wall_deadline)

    @classmethod
    def after(cls, seconds: float, clock: Clock) -> Deadline:
        """Return the deadline `seconds` from now."""
        return cls(clock.now() + seconds, clock.wall() + seconds)

    def remaining(self, now: float) -> float:
        """Return the seconds left at monotonic `now`; negative once it has passed."""
        return self.at - now

    def passed(self, now: float, grace_s: float = 0.0) -> bool:
        """Whether it has passed by more than `grace_s`."""
        return now > self.at + grace_s


def earliest(*deadlines: Deadline | None) -> Deadline | None:
    """Return the first to pass of those that are set."""
    known = [d for d in deadlines if d is not None]
    return min(known, key=lambda d: d.at) if known else None
