"""`headrace kv freeze`, `thaw`: tiers that take nothing new until they are thawed, or their stores end."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence

from headrace.commands.kv_pin import NOBODY, ask
from headrace.commands.kv_show import ANSWER_S
from schemas.messages import KvFreeze, KvFrozen
from schemas.settings import Settings

TIERS = ("host", "disk")


def freeze(settings: Settings, tiers: Sequence[str], *, as_json: bool) -> int:
    """Let these tiers of every store take nothing new, and all others what is new; returns 1 if a store is silent.

    Raises:
        HeadraceError: if there is no store.
    """
    wish = KvFreeze(ticket="", tiers=list(tiers), reply=NOBODY)
    answers = asyncio.run(ask(settings, "kv", wish, ANSWER_S))
    found = [answer for answer in answers if isinstance(answer, KvFrozen)]
    frozen = sorted({tier for answer in found for tier in answer.tiers})
    if as_json:
        print(json.dumps({"stores": len(answers), "answered": len(found), "frozen": frozen}))
    else:
        print(f"{len(found)} of {len(answers)} stores answered; frozen: {', '.join(frozen) or 'none'}")
    if len(found) == len(answers):
        return 0
    print("error: a store did not answer in time", file=sys.stderr)
    return 1
