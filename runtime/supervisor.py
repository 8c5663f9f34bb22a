"""Keeps children alive: starts, announces each exit the moment it happens, restarts, kills the frozen (R1)."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.bus import Bus
from runtime.child import Child
from runtime.clock import Clock, Tasks
from runtime.exits import is_crash, oom_kills
from runtime.membership import DEAF_S, SKEWED, Member, Membership
from runtime.restart import RestartLimits, RestartPolicy
from runtime.step_note import ENV as NOTE_ENV
from runtime.step_note import NotePage
from runtime.vitals import Vitals
from schemas.codec import encode
from schemas.messages import ChildReport, ExitNotice, SupervisorReport
from schemas.subjects import EXIT, SUPERVISORS, Ref

_log = logging.getLogger("headrace.supervisor")

TICK_S = 0.1
KILL_WAIT_S = 5.0
FAILED_KILL_S = 1.0  # after an actor says for good that it has failed
REPORT_S = 0.25
# The bus delivers at most once; receivers take a notice they know already as nothing new.
REPEAT_NOTICE_S = (0.2, 0.8, 2.0)


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A child to keep alive.

    Args:
        name: of the node; its heartbeats carry it.
        argv: command line.
        env: added to this process's environment.
        kinds: actor kinds it hosts; empty for a child without heartbeats, such as the bus server.
        frozen_kill_s: silence of its heartbeats after which it is killed.
        log: file for its output; absent: discarded.
        stop_last: stopped after all others (the bus server).
        noted: it hosts an engine, whose steps are noted where its death does not take the note along.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    kinds: tuple[str, ...] = ()
    frozen_kill_s: float = 10.0
    log: Path | None = None
    stop_last: bool = False
    noted: bool = False


@dataclass(frozen=True, slots=True)
class ChildStatus:
    """One child as of now. `state`: stopped | running | backoff | crash_loop."""

    name: str
    pid: int | None
    state: str
    ready: bool
    restarts: int
    exit_code: int | None
    kills: int
    refs: tuple[Ref, ...]
    reason: str = ""  # why it ended last, or is not ready
    next_start_s: float | None = None  # until it is started again


@dataclass(frozen=True, slots=True)
class Exit:
    """What happened to a child: told to `on_exit` after the notice is out. `planned` while stopping."""

    name: str
    pid: int
    code: int
    lived_s: float
    planned: bool
    crash_loop: bool
    restart_in_s: float | None


@dataclass(slots=True)
class _Kept:
    spec: NodeSpec
    policy: RestartPolicy
    child: Child | None = None
    born_at: float = 0.0
    exit_code: int | None = None
    restarts: int = 0
    kills: int = 0
    killing: bool = False
    reason: str = ""
    exited_wall: float = 0.0
    next_start: float = 0.0
    failed_since: float | None = None
    note: NotePage | None = None  # what it computes, to be read when it has crashed
    failed: bool = False  # it is killed because its actor has failed for good
    waiting: asyncio.Task[Any] | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    """Supervises the children of `specs`.

    Args:
        specs: in the order in which they start.
        clock: the seam.
        bus: where exits are announced and heartbeats heard; `attach` gives it later if it is a child itself.
        limits: of the restart policy.
        on_exit: told every exit.
    """

    def __init__(
        self,
        specs: Sequence[NodeSpec],
        *,
        clock: Clock,
        bus: Bus | None = None,
        limits: RestartLimits | None = None,
        on_exit: Callable[[Exit], None] | None = None,
    ) -> None:
        self.clock = clock
        self.membership = Membership(clock, self.well)
        self.on_exit = on_exit
        self._limits = limits if limits is not None else RestartLimits()
        self._bus = bus
        self._attached = False
        self._kept: dict[str, _Kept] = {}
        self._vitals = Vitals()
        self._well_since = clock.now()
        self._stopping = False
        self._tasks = Tasks()
        self._ticker: asyncio.Task[Any] | None = None
        self._next_report = 0.0
        self._oom_kills = oom_kills()
        for spec in specs:
            self._keep(spec)

    def _keep(self, spec: NodeSpec) -> _Kept:
        if spec.name in self._kept:
            raise ValueError(f"two children are called {spec.name!r}")
        kept = self._kept[spec.name] = _Kept(spec, RestartPolicy(self._limits))
        if spec.noted:
            try:
                kept.note = NotePage()
            except OSError as exc:  # its crashes are nobody's then
                _log.warning("no note of what %s computes: %s", spec.name, exc)
        return kept

    # --- starting --------------------------------------------------------------------------------------

    async def start(self, names: Sequence[str] | None = None) -> None:
        """Start all children that do not run, or the named ones, in order.

        Raises:
            OSError: if a program cannot be started at all.
        """
        if self._ticker is None:
            self._ticker = self._tasks.spawn(self._tick_forever(), name="supervisor-ticks")
        if self._bus is not None and not self._attached:
            await self.attach(self._bus)
        for kept in self._chosen(names):
            if kept.child is None or not kept.child.running:
                self._spawn(kept)

    async def add(self, spec: NodeSpec) -> None:
        """Supervise one more child, and start it.

        Raises:
            ValueError: if the name is taken.
        """
        self._spawn(self._keep(spec))

    async def attach(self, bus: Bus) -> None:
        """Use this bus from now on; the caller closes it after `stop`."""
        self._bus = bus
        self._attached = True
        await self.membership.start(bus)

    def _chosen(self, names: Sequence[str] | None) -> list[_Kept]:
        return [self._kept[name] for name in names] if names is not None else list(self._kept.values())

    def _spawn(self, kept: _Kept) -> None:
        kept.ended.clear()
        kept.killing = kept.failed = False
        kept.failed_since = None
        kept.born_at = self.clock.now()
        env = {**os.environ, **kept.spec.env}
        inherit = []
        if kept.note is not None:
            kept.note.clear()
            inherit.append(kept.note.fd)
            env[NOTE_ENV] = str(kept.note.fd)
        kept.child = Child(
            kept.spec.argv, env, kept.spec.log, lambda code: self._on_child_exit(kept, code), inherit=inherit
        )
        _log.info("started %s as process %d", kept.spec.name, kept.child.pid)

    # --- exits -----------------------------------------------------------------------------------------

    def _on_child_exit(self, kept: _Kept, code: int) -> None:
        assert kept.child is not None
        pid = kept.child.pid
        self._announce(kept, pid, code)
        now = self.clock.now()
        kept.exit_code = code
        kept.exited_wall = self.clock.wall()
        kept.reason = kept.reason if kept.killing else exit_reason(code)
        kept.ended.set()
        lived_s = now - kept.born_at
        delay_s, crash_loop = None, False
        if not self._stopping:
            decision = kept.policy.exited(now, lived_s, self.clock.random(), code=code)
            delay_s, crash_loop = decision.delay_s, decision.crash_loop
            kept.next_start = now + delay_s
            kept.waiting = self._tasks.spawn(self._restart(kept, delay_s), name=f"restart-{kept.spec.name}")
            again = "" if delay_s is None else f"; again in {delay_s:.2f} s"
            _log.warning("%s (process %d) ended with %d after %.1f s%s", kept.spec.name, pid, code, lived_s, again)
        if self.on_exit is not None:
            self.on_exit(Exit(kept.spec.name, pid, code, lived_s, self._stopping, crash_loop, delay_s))

    def _announce(self, kept: _Kept, pid: int, code: int) -> None:
        if self._bus is None or not kept.spec.kinds:
            return
        refs = [m.ref for m in self._members_of(kept.spec.name, pid)]
        computing = self._computing(kept, code)
        payload = encode(ExitNotice(node=kept.spec.name, pid=pid, code=code, refs=refs, computing=computing))
        self._bus.publish(EXIT, payload)
        self._bus.push()  # before whatever else follows from this exit: streams stand still until it is known
        self._tasks.spawn(self._repeat(payload), name=f"notice-{kept.spec.name}")

    def _computing(self, kept: _Kept, code: int) -> list[str]:
        """Return the requests of the step that a child crashed in; none if it did not crash, or not in a step."""
        if kept.note is None or self._stopping:
            return []
        out_of_memory = False
        if code == -signal.SIGKILL and not kept.killing:
            before, self._oom_kills = self._oom_kills, oom_kills()
            out_of_memory = self._oom_kills > before
        if not is_crash(code, failed=kept.failed, out_of_memory=out_of_memory):
            return []
        computing = kept.note.read()
        if computing:
            _log.warning("%s crashed in a step of %s", kept.spec.name, ", ".join(computing))
        return computing

    async def _repeat(self, payload: bytes) -> None:
        for pause_s in REPEAT_NOTICE_S:
            await self.clock.sleep(pause_s)
            if self._bus is not None:
                self._bus.publish(EXIT, payload)

    async def _restart(self, kept: _Kept, delay_s: float) -> None:
        while True:
            await self.clock.sleep(delay_s)
            if self._stopping:
                return
            try:
                self._spawn(kept)
            except OSError as exc:
                _log.error("%s cannot be started: %s", kept.spec.name, exc)
                delay_s = self._limits.max_delay_s
                kept.reason, kept.next_start = f"it cannot be started: {exc}", self.clock.now() + delay_s
            else:
                kept.restarts += 1
                return

    def _members_of(self, name: str, pid: int) -> list[Member]:
        return [m for m in self.membership.view.all() if m.node == name and m.pid == pid]

    # --- the frozen ------------------------------------------------------------------------------------

    def well(self) -> bool:
        """Whether silence of children may count."""
        if self._deaf():
            return False
        since = self._bus.connected_since if self._bus is not None and self._bus.connected else None
        return self._vitals.well(self.clock.now(), since)

    def _deaf(self) -> bool:
        """Whether all nodes fell silent at once: then it is the bus that is frozen, or cut off, and not all of them."""
        heard: dict[str, float] = {}
        for member in self.membership.view.all():
            if not member.exited:
                heard[member.node] = max(member.last_heard, heard.get(member.node, 0.0))
        return len(heard) > 1 and self.clock.now() - max(heard.values()) > DEAF_S

    async def _tick_forever(self) -> None:
        while True:
            await self.clock.sleep(TICK_S)
            now = self.clock.now()
            self._vitals.tick(now, TICK_S)
            self.membership.check()
            if not self.well():
                self._well_since = now
            for kept in self._kept.values():
                self._check_frozen(kept, now)
                self._check_failed(kept, now)
            try:
                self._report(now)
            except Exception as exc:  # to be seen is not worth the watch over the others
                _log.error("the supervisor's report failed: %r", exc)

    def _check_frozen(self, kept: _Kept, now: float) -> None:
        child = kept.child
        if child is None or not child.running or kept.killing or not kept.spec.kinds:
            return
        heard = [m.last_heard for m in self._members_of(kept.spec.name, child.pid)]
        if not heard:
            return
        silent_s = now - max(*heard, self._well_since)
        if silent_s > kept.spec.frozen_kill_s:
            self._kill(kept, child, f"no heartbeat for {silent_s:.1f} s")

    def _check_failed(self, kept: _Kept, now: float) -> None:
        """End a child whose actor has failed for good: a wedged engine, or one whose every step fails."""
        child = kept.child
        if child is None or not child.running or kept.killing:
            return
        # A clock that differs is no fault of the process: a new one would have the same.
        members = [m for m in self._members_of(kept.spec.name, child.pid) if m.up and not m.skewed and not m.private]
        failed = next((m for m in members if m.state == "failed" and not m.reason.startswith(SKEWED)), None)
        if failed is None:
            kept.failed_since = None
        elif kept.failed_since is None:
            kept.failed_since = now
        elif now - kept.failed_since > FAILED_KILL_S:
            kept.failed = True
            self._kill(kept, child, f"{failed.ref.kind} failed: {failed.reason}")

    def _kill(self, kept: _Kept, child: Child, reason: str) -> None:
        _log.error("%s (process %d) is killed: %s", kept.spec.name, child.pid, reason)
        kept.kills += 1
        kept.killing = True
        kept.reason = reason
        child.signal_group(signal.SIGKILL)

    def _report(self, now: float) -> None:
        """Tell whoever listens (`headrace ps`) how the children are."""
        if self._bus is None or now < self._next_report:
            return
        self._next_report = now + REPORT_S
        children = [
            ChildReport(
                name=row.name,
                pid=row.pid or 0,
                state=row.state,
                ready=row.ready,
                restarts=row.restarts,
                kills=row.kills,
                exit_code=row.exit_code,
                exited_at=self._kept[row.name].exited_wall,
                reason=row.reason,
                next_start_s=row.next_start_s,
            )
            for row in self.status()
        ]
        self._bus.publish(SUPERVISORS, encode(SupervisorReport(pid=os.getpid(), children=children)))

    # --- stopping --------------------------------------------------------------------------------------

    async def stop(
        self, limit_s: float = 30.0, *, order: Sequence[Sequence[str]] | None = None
    ) -> dict[str, int | None]:
        """Ask all children to leave, kill who has not within `limit_s` in all; returns exit codes by name.

        Args:
            limit_s: shared by all groups.
            order: groups of names that leave one after another; whoever is not named comes after them.
        """
        self._stopping = True
        end = self.clock.now() + limit_s
        groups = [[self._kept[name] for name in group if name in self._kept] for group in order or ()]
        named = {kept.spec.name for group in groups for kept in group}
        rest = [k for k in self._kept.values() if k.spec.name not in named]
        groups.append([k for k in rest if not k.spec.stop_last])
        groups.append([k for k in rest if k.spec.stop_last])
        for kept in self._kept.values():
            if kept.waiting is not None:
                kept.waiting.cancel()
        for group in groups:
            await self._stop_group(group, end)
        await self._tasks.cancel_all()
        self._ticker = None
        for kept in self._kept.values():
            if kept.note is not None and (kept.child is None or not kept.child.running):
                kept.note.close()
                kept.note = None
        return {name: kept.exit_code for name, kept in self._kept.items()}

    async def _stop_group(self, group: list[_Kept], end: float) -> None:
        running = [k for k in group if k.child is not None and k.child.running]
        for kept in running:
            assert kept.child is not None
            kept.child.signal(signal.SIGTERM)
            kept.child.signal(signal.SIGCONT)  # a stopped one would take no notice
        await self._wait_all(running, end - self.clock.now())
        late = [k for k in running if not k.ended.is_set()]
        for kept in late:
            assert kept.child is not None
            _log.warning("%s (process %d) did not leave in time: killed", kept.spec.name, kept.child.pid)
            kept.kills += 1
            kept.child.signal_group(signal.SIGKILL)
        await self._wait_all(late, KILL_WAIT_S)

    async def _wait_all(self, group: list[_Kept], limit_s: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, limit_s)):
                for kept in group:
                    await kept.ended.wait()
        except TimeoutError:
            pass

    def kill_all(self) -> None:
        """Kill every child now (a second Ctrl-C); `stop` then returns at once."""
        self._stopping = True
        for kept in self._kept.values():
            if kept.child is not None:
                kept.child.signal_group(signal.SIGKILL)

    # --- questions -------------------------------------------------------------------------------------

    def status(self) -> list[ChildStatus]:
        """Return one row per child, in the order of the specs."""
        rows = []
        for name, kept in self._kept.items():
            child = kept.child
            running = child is not None and child.running
            pid = child.pid if child is not None and running else None
            members = self._members_of(name, pid) if pid is not None else []
            if running:
                state = "running"
            elif kept.policy.crash_loop:
                state = "crash_loop"
            else:
                state = "backoff" if kept.waiting is not None and not kept.waiting.done() else "stopped"
            refs = tuple(m.ref for m in members)
            ready = running and self._is_ready(kept, members)
            waiting = state in ("backoff", "crash_loop") and not self._stopping
            rows.append(
                ChildStatus(
                    name, pid, state, ready, kept.restarts, kept.exit_code, kept.kills, refs, kept.reason,
                    max(0.0, kept.next_start - self.clock.now()) if waiting else None,
                )
            )  # fmt: skip
        return rows

    def _is_ready(self, kept: _Kept, members: list[Member]) -> bool:
        needed = [m for m in members if not m.private]  # the others only spare a node a way
        ready = {m.ref.kind for m in needed if m.up and m.state == "ready"}
        return ready.issuperset(kept.spec.kinds) and all(m.state == "ready" for m in needed)

    async def wait_ready(self, limit_s: float) -> bool:
        """Wait until every child is ready; false if that takes longer than `limit_s` or a child is in a crash loop."""
        end = self.clock.now() + limit_s
        while self.clock.now() < end:
            rows = self.status()
            if all(row.ready for row in rows):
                return True
            if any(row.state == "crash_loop" for row in rows):
                return False
            await self.clock.sleep(0.02)
        return False


def exit_reason(code: int) -> str:
    """Say in words how a process ended."""
    if code >= 0:
        return "it was asked to leave" if code == 0 else f"it ended with {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
