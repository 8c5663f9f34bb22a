"""The benchmark of the index, small: its figures stand over right answers only."""

from __future__ import annotations

import json

import pytest

from bench import kv_index

SMALL = ["kv_index", "--stored", "4000", "--candidates", "600"]


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, object]]:
    """Exit code and last line."""
    monkeypatch.setattr("sys.argv", SMALL)
    code = kv_index.main()
    result: dict[str, object] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return code, result


@pytest.mark.slow
def test_it_prints_one_object_with_all_cases(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All, half and none of the candidates are stored."""
    code, result = run(monkeypatch, capsys)

    assert (code, result["ok"], result["stored"], result["candidates"]) == (0, True, 4000, 600)
    cases = result["cases"]
    assert isinstance(cases, list)
    assert [(row["case"], row["blocks"]) for row in cases] == [
        ("all stored", 600),
        ("half stored", 300),
        ("nothing stored", 0),
    ]


@pytest.mark.slow
def test_a_wrong_answer_gives_no_figure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the index says is compared with looking at each block."""
    monkeypatch.setattr("kvstore.runs.StoredRuns.prefix", lambda _, hashes, start=0: max(0, len(hashes) - start - 1))

    code, result = run(monkeypatch, capsys)

    assert code == 1 and result["ok"] is False and "cpu_ms" not in result
