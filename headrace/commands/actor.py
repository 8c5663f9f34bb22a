"""`headrace actor KIND…`: one node of this process, until SIGTERM."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from headrace.bus_access import BusAccessError
from headrace.checks import StartError
from headrace.layout import KINDS, LIGHT_KINDS
from schemas.errors import HeadraceError
from schemas.settings import Loaded, Settings
from schemas.subjects import token

EXIT_USAGE = 2
EXIT_FAILED = 1
POOL_OWNERS = ("prefill", "decode", "both", "kv")


def run(
    loaded: Loaded, kinds: list[str], *, node: str | None, actor_id: str | None, private: Sequence[str] = ()
) -> int:
    """Host actors of these kinds until the node has to end; returns the exit code.

    The `private` kinds join them once they have started, and work for them alone.
    """
    unknown = [kind for kind in kinds if kind not in KINDS] + [kind for kind in private if kind not in LIGHT_KINDS]
    if unknown or not kinds:
        print(f"error: unknown kind {', '.join(unknown)}; known are {', '.join(KINDS)}", file=sys.stderr)
        return EXIT_USAGE
    if len({*kinds, *private}) != len(kinds) + len(private):
        print("error: a node hosts one actor of a kind; name each kind once", file=sys.stderr)
        return EXIT_USAGE
    name = node or f"{kinds[0]}-{os.urandom(3).hex()}"
    try:
        token(name)
        token(actor_id or name)
    except ValueError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return EXIT_USAGE
    return _serve(loaded.settings, kinds, private, name, actor_id or name)


def _serve(settings: Settings, kinds: list[str], private: Sequence[str], name: str, actor_id: str) -> int:
    from setproctitle import setproctitle

    from runtime.telemetry import route_standard_logging

    setproctitle(f"headrace: {name}")
    route_standard_logging(name, settings.log_level)
    try:
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_main(settings, kinds, private, name, actor_id))
    except (HeadraceError, StartError, BusAccessError) as exc:
        print(f"error: {name}: {exc}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 130


async def _main(settings: Settings, kinds: list[str], private: Sequence[str], name: str, actor_id: str) -> int:
    from headrace.assembly import build_node, join_later
    from runtime.clock import SystemClock

    clock = SystemClock()

    def waiting(line: str) -> None:
        print(f"{name}: {line}", file=sys.stderr, flush=True)

    _reap(settings, kinds, actor_id)
    node = await build_node(kinds, settings, name=name, actor_id=actor_id, clock=clock, on_wait=waiting)
    if sys.stdout.isatty():
        clock.spawn(_announce(node, clock), name="announce")

    def started() -> None:
        _settle()
        if private:
            node.tasks.spawn(join_later(node, private, settings, actor_id=actor_id, done=_settle), name="join")

    return await node.run(on_started=started)


def _reap(settings: Settings, kinds: list[str], actor_id: str) -> None:
    """Remove the pools that killed incarnations of these actors have left: there may be nobody here who does."""
    names = [f"{settings.pool_prefix}{kind}-{actor_id}-" for kind in kinds if kind in POOL_OWNERS]
    if names:
        from kvstore.shm import reap

        for prefix in names:
            for name in reap(Path(settings.shm_dir), prefix, set()):
                logging.getLogger("headrace.actor").warning("removed %s, which a dead process had left", name)


def _settle() -> None:
    """Leave what was made at the start (modules, vocabulary, templates) out of garbage collections from now on.

    Looking through it took tens of milliseconds on busy cores, every few thousand tokens, in which a node sent nothing.
    """
    gc.collect()
    gc.freeze()


async def _announce(node: object, clock: object) -> None:
    from typing import cast

    from runtime.clock import Clock
    from runtime.node import Node

    it, seam = cast(Node, node), cast(Clock, clock)
    while any(actor.state == "starting" for actor in it.actors):
        await seam.sleep(0.05)
    states = {actor.state for actor in it.actors}
    print(f"{it.name}: {'ready' if states == {'ready'} else ', '.join(sorted(states))}", flush=True)
