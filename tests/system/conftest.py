"""Whole systems for tests: real processes on a real bus, with the scripted engine, or with the real model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.cases import script
from tests.system.launch import System


@pytest.fixture(scope="session")
def script_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script, as a file."""
    path = tmp_path_factory.mktemp("script") / "script.json"
    path.write_text(json.dumps(script()))
    return path


@pytest.fixture(scope="session")
def split(script_file: Path, tmp_path_factory: pytest.TempPathFactory, nats_binary: str) -> Iterator[System]:
    """One process per actor, prefill and decode apart, scripted engines."""
    options = ("--isolate", "--prefill", "1", "--engine", f"scripted:{script_file}")
    system = System(tmp_path_factory.mktemp("split"), *options)
    system.start()
    yield system
    code, left = system.stop(), system.leftovers()
    assert (code, left) == (0, []), system.tail()


@pytest.fixture(scope="session")
def joined(script_file: Path, tmp_path_factory: pytest.TempPathFactory, nats_binary: str) -> Iterator[System]:
    """One engine that does both, scripted."""
    options = ("--prefill", "0", "--decode", "0", "--both", "1", "--engine", f"scripted:{script_file}")
    system = System(tmp_path_factory.mktemp("joined"), *options)
    system.start()
    yield system
    code, left = system.stop(), system.leftovers()
    assert (code, left) == (0, []), system.tail()


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The default model; skipped where it is absent, a failure in CI."""
    named = os.environ.get("HEADRACE_TEST_MODEL")
    if named and Path(named).is_file():
        return Path(named)
    from headrace.fetch import cached_model

    found = cached_model()
    if found is None:
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail("the default model is not there; make test fetches it")
        pytest.skip("the default model is not there")
    return found


@pytest.fixture(scope="session")
def real(model_path: Path, tmp_path_factory: pytest.TempPathFactory, nats_binary: str) -> Iterator[System]:
    """The real model in the default layout."""
    system = System(tmp_path_factory.mktemp("real"), "--model", str(model_path))
    system.start()
    yield system
    code, left = system.stop(), system.leftovers()
    assert (code, left) == (0, []), system.tail()
