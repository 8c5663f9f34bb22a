"""What is asked for and not installed is said at the start."""

from __future__ import annotations

from typing import Any, cast

import pytest

from headrace.assembly import Parts, factory
from headrace.checks import StartError
from kvstore.transport import nixl
from runtime.actor import Context
from schemas.settings import Settings


def test_nixl_that_is_not_installed_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transfer actor is not made; by TCP it would be."""
    monkeypatch.setattr(nixl, "installed", lambda: "")
    options: dict[str, Any] = {"kv_transport": "nixl"}
    parts = Parts(Settings(**options), None, [])

    with pytest.raises(StartError, match=r"pip install 'headrace\[nixl\]'"):
        factory("transfer", parts)(cast(Context, None))
