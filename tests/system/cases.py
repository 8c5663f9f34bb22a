"""What the scripted engine says to marked prompts, and what must hold after every case."""

from __future__ import annotations

from typing import Any

from tests.system.launch import System, wait_until

PACE_S = 0.01
UNICODE = "ď 漢 ש 👩‍🚀 🇨🇿 e\u0301"
COUNTING = "one two three four"
BROKEN = b"ok \xc4 mid \xf0\x9f \xff end \xf0\x9f"


def script() -> dict[str, Any]:
    """Return the script of the scripted engine: what each marked prompt makes it say, byte by byte."""

    def rule(mark: str, said: bytes) -> dict[str, Any]:
        return {"contains": list(mark.encode()), "emit": list(said)}

    return {
        "pace_s": PACE_S,
        "prefill_s_per_token": 0.0005,
        "rules": [
            rule("CASE-COUNT", COUNTING.encode()),
            rule("CASE-UNICODE", UNICODE.encode()),
            rule("CASE-BROKEN", BROKEN),
            rule("CASE-ALIVE", b"alive and well"),
            {"contains": list(b"CASE-DEADLY"), "dies": {"at": 3, "by": "SIGSEGV"}},
        ],
    }


class Alive:
    """ALIVE: a fixed request says after a case what it said before, by the same processes."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._before = self._ask()
        self._pids = self._workers()

    def _ask(self) -> str:
        response = self._system.chat("CASE-ALIVE")
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["message"]["content"])

    def _workers(self) -> set[tuple[str, int]]:
        return {(row["id"], row["pid"]) for row in self._system.rows()}

    def check(self) -> None:
        """Assert that nothing was harmed."""
        assert self._ask() == self._before
        assert self._workers() == self._pids
        assert self._system.status("/health") == 200


def assert_drained(system: System, *, within_s: float = 2.0) -> None:
    """DRAINED: no engine holds anything, at most two seconds from now (and the time to ask)."""

    def held() -> bool:
        rows = [row for row in system.rows() if row["kind"] in ("prefill", "decode", "both")]
        assert rows
        return not any(row["running"] or row["waiting"] or row["load"].get("blocks_in_use") for row in rows)

    wait_until(held, limit_s=within_s + 1.5, what="engines drained")
