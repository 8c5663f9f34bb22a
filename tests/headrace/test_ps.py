"""`headrace ps` tells how processes ended, why, and when they start again."""

from __future__ import annotations

from headrace.commands.ps import merge, why
from schemas.messages import ChildReport, Heartbeat
from schemas.subjects import Ref

BEAT = Heartbeat(
    ref=Ref("decode", "decode-0", "d" * 16), node="decode-0", host="host-a", pid=12, seq=1, sent_at=0.0, state="ready"
)


def test_an_actor_that_was_started_again_shows_how_its_predecessor_ended() -> None:
    """Exit code, reason and number of starts stand in its row."""
    child = ChildReport(
        name="decode-0", pid=12, state="running", ready=True, restarts=2, kills=1, exit_code=-9,
        reason="decode failed: no step for 31 s with 4 running",
    )  # fmt: skip
    (row,) = merge([BEAT], [(1, child)])
    assert row["history"] == "last exit -9, decode failed: no step for 31 s with 4 running; started again 2 times"
    assert (row["kind"], row["state"]) == ("decode", "ready")


def test_a_process_that_waits_for_its_next_start_has_a_row() -> None:
    """No actor of it speaks, so the row is its node's."""
    child = ChildReport(
        name="decode-1", state="crash_loop", restarts=5, exit_code=1, reason="it ended with 1", next_start_s=21.3
    )
    rows = merge([BEAT], [(1, child)])
    assert [row["node"] for row in rows] == ["decode-0", "decode-1"]
    assert rows[0]["history"] == ""
    assert rows[1]["state"] == "crash_loop"
    assert rows[1]["history"] == "last exit 1, it ended with 1; started again 5 times; next start in 21.3 s"


def test_a_child_that_never_ended_and_never_speaks_has_no_row() -> None:
    """The bus server runs: there is nothing to say of it."""
    child = ChildReport(name="nats", pid=9, state="running", ready=True)
    assert why(child) == ""
    assert [row["node"] for row in merge([BEAT], [(1, child)])] == ["decode-0"]
