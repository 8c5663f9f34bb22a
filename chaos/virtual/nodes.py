"""The nodes of an instance on the in-memory bus: made, killed, frozen, thawed, and what they hold at rest."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.admission import AdmissionActor, AdmissionConfig
from actors.byte_text import ByteText
from actors.detokenize import DetokenizeActor
from actors.kv import KvActor
from actors.tokenize import TokenizeActor
from actors.transfer import TransferActor
from actors.transfer_peers import PeerConfig
from chaos.virtual.engine import SteppedEngineActor
from chaos.virtual.system import MemorySystem
from engine.plan import Runner
from runtime.actor import Actor, Context
from runtime.node import Node

if TYPE_CHECKING:
    from actors.kv_disk import DiskConfig
    from kvstore.owners import Quotas

MODEL = "bytes"
TOKEN_BUDGET = 128
NUM_BLOCKS = 256
COPIES_PER_MINUTE = 1 << 30  # bytes
PREFIX = "headrace-test-"
LIGHT = ("admission", "tokenize", "detokenize")
LAYOUT = {"admission": 2, "tokenize": 2, "detokenize": 2, "kv": 1, "transfer": 1, "prefill": 1, "decode": 2}


class Nodes:
    """Nodes named `<kind>-<number>`, with one actor each; a `light` node has three, as in the default layout."""

    def __init__(
        self, system: MemorySystem, directory: Path, make_runner: Callable[[], Runner], whole_below: int = 0
    ) -> None:
        self.system = system
        self.whole_below = whole_below  # 0: every request takes every hop
        self.disk: DiskConfig | None = None
        self.disk_folders = False  # whether each store has a folder of its own there
        self.hosts: dict[str, str] = {}  # of nodes that are not on the first host
        self.quotas: Quotas | None = None
        self.pace_s: dict[str, float] = {}  # by class, the mean time between tokens that is promised
        self.directory = directory
        self.make_runner = make_runner
        self.nodes: dict[str, Node] = {}
        self.crashes: list[tuple[str, tuple[str, ...]]] = []  # nodes of engines, and what they computed when they died
        self._burials: set[asyncio.Future[None]] = set()

    # --- nodes ----------------------------------------------------------------------------------

    def make(self, kind: str, number: int) -> Node:
        """Make a node; a second one of that name is a new incarnation."""
        name = f"{kind}-{number}"
        node = self.nodes[name] = self.system.node(name, host=self.hosts.get(name, "host-a"))
        for each in LIGHT if kind == "light" else (kind,):
            node.add(each, str(number), functools.partial(self._actor, each))
        return node

    def _actor(self, kind: str, context: Context) -> Actor:
        match kind:
            case "admission":
                return AdmissionActor(context, config=AdmissionConfig(models=(MODEL,), whole_below=self.whole_below))
            case "tokenize":
                return TokenizeActor(context, load_encoder=ByteText)
            case "detokenize":
                return DetokenizeActor(context, load_vocabulary=ByteText)
            case "transfer":
                return TransferActor(context, peers=PeerConfig() if self.hosts else None)
            case "kv":
                disk = self.disk
                if disk is not None and self.disk_folders:
                    disk = replace(disk, directory=disk.directory / context.ref.id)
                return KvActor(
                    context, directory=self.directory, prefix=PREFIX, num_blocks=64, disk=disk,
                    remote=bool(self.hosts), copies_per_minute=COPIES_PER_MINUTE, quotas=self.quotas,
                )  # fmt: skip
            case _:
                engine = SteppedEngineActor(
                    context, role=kind, make_runner=self.make_runner, directory=self.directory,
                    prefix=PREFIX, num_blocks=NUM_BLOCKS, token_budget=TOKEN_BUDGET, max_running=16,
                    pace_s=self.pace_s,
                )  # fmt: skip
                engine.on_death = functools.partial(self._died, context.node)
                return engine

    def _died(self, name: str, computing: tuple[str, ...]) -> None:
        """An engine has crashed in a step of these requests: its node is gone, and comes back."""
        self.crashes.append((name, computing))
        task = asyncio.ensure_future(self.kill(name, computing=computing))
        self._burials.add(task)
        task.add_done_callback(self._burials.discard)

    def actor(self, name: str) -> Any:
        """The actor of a node."""
        return self.nodes[name].actors[0]

    def engines(self) -> list[SteppedEngineActor]:
        """All engines that live."""
        return [
            a
            for name, n in self.nodes.items()
            for a in n.actors
            if isinstance(a, SteppedEngineActor) and not self.system.is_gone(name)
        ]

    def holding(self, kind: str, request_id: str) -> str:
        """The name of the node of this kind that holds a request; the first if none says so."""
        names = [n for n in self.nodes if n.startswith(f"{kind}-")]
        for name in names:
            if request_id in self.actor(name).load().get("requests", ()):
                return name
        return names[0]

    async def kill(self, name: str, *, again_after_s: float | None = 0.3, computing: tuple[str, ...] = ()) -> None:
        """SIGKILL, or a crash in a step of these; it is announced, and started again if `again_after_s` is set."""
        kind, _, number = name.partition("-")
        await self.system.kill(self.nodes[name], code=-6 if computing else -9, computing=computing)
        if again_after_s is not None:
            await self.system.clock.sleep(again_after_s)
            await self.system.start(self.make(kind, int(number)))

    def has_started(self, name: str) -> bool:
        """Whether a node is past its start, as far as its engine goes."""
        actor = self.actor(name)
        return not isinstance(actor, SteppedEngineActor) or actor.thread is not None

    def freeze(self, name: str) -> None:
        """SIGSTOP."""
        self.system.freeze(self.nodes[name])
        actor = self.actor(name)
        if isinstance(actor, SteppedEngineActor):
            actor.stepped.frozen = True

    def thaw(self, name: str) -> None:
        """SIGCONT."""
        self.system.thaw(self.nodes[name])
        actor = self.actor(name)
        if isinstance(actor, SteppedEngineActor):
            actor.stepped.frozen = False
            actor.stepped.wake()

    # --- what must hold at rest -----------------------------------------------------------------

    def busy(self) -> list[str]:
        """What still holds something of a request."""
        out = [f"{a.ref}: {sorted(a.works)}" for a in self.engines() if a.works]
        for a in self.engines():
            load = a.stepped.core.load()
            held = {k: load.get(k, 0) for k in ("running", "waiting", "held", "expected", "blocks_quarantined")}
            if any(held.values()) or a.stepped.core.pool.in_use:
                out.append(f"{a.ref}: {held}, {a.stepped.core.pool.in_use} blocks in use")
        for name, node in self.nodes.items():
            if not self.system.is_gone(name):
                out += [f"{name} is not idle: {actor.ref} {actor.load()}" for actor in node.actors if not actor.idle]
        return out

    async def rest(self, *, limit_s: float = 2.0) -> None:
        """Wait until nothing is held anywhere; the ledgers of all pools balance."""
        try:
            await self.system.until(lambda: not self.busy(), limit_s=limit_s)
        except TimeoutError:
            raise AssertionError(f"after {limit_s} s: {self.busy()}") from None
        for a in self.engines():
            a.stepped.core.check_integrity()


def at_once(_: Any, fn: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
    """Run what an executor would run, now: in virtual time nothing waits for a thread."""
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    try:
        future.set_result(fn(*args))
    except Exception as exc:
        future.set_exception(exc)
    return future
