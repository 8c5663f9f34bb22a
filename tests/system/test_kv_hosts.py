"""Two hosts on one bus, as processes and in a network namespace: a prompt of the first is loaded by the second."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.support.ports import free_ports
from tests.system.cases import script
from tests.system.launch import COMMAND, System, wait_until
from tests.system.test_kv_restart import STORY, metric

pytestmark = pytest.mark.slow

NETWORK = "10.213.77"
BLOCK_NBYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Place:
    """Where the second host's processes run, and the address at which the first one's bus is reached from both."""

    address: str
    inside: tuple[str, ...] = ()
    counter: Path | None = None  # of the bytes that have gone into the other namespace


@contextmanager
def namespace() -> Iterator[Place]:
    """A network namespace with a wire to this one; skipped where that is not permitted."""
    name, here, there = f"hr-{os.getpid()}", f"hra{os.getpid()}", f"hrb{os.getpid()}"
    steps = (
        ("netns", "add", name),
        ("link", "add", here, "type", "veth", "peer", "name", there),
        ("link", "set", there, "netns", name),
        ("addr", "add", f"{NETWORK}.1/24", "dev", here),
        ("link", "set", here, "up"),
        ("-n", name, "addr", "add", f"{NETWORK}.2/24", "dev", there),
        ("-n", name, "link", "set", there, "up"),
        ("-n", name, "link", "set", "lo", "up"),
    )
    with ExitStack() as stack:
        for step in steps:
            try:
                done = subprocess.run(["ip", *step], capture_output=True, text=True, timeout=20, check=False)
            except FileNotFoundError:
                pytest.skip("iproute2 is not installed")
            if done.returncode != 0:
                pytest.skip(f"no network namespaces here: ip {' '.join(step)}: {done.stderr.strip()}")
            if step[0] == "netns":
                stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
            if step[1] == "add" and step[0] == "link":
                stack.callback(subprocess.run, ["ip", "link", "del", here], capture_output=True, check=False)
        counter = Path("/sys/class/net") / here / "statistics" / "tx_bytes"
        yield Place(f"{NETWORK}.1", ("ip", "netns", "exec", name), counter)


@pytest.fixture(params=["processes", "namespaces"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """On this machine's own network, and across a wire."""
    if request.param == "processes":
        yield Place("127.0.0.1")
        return
    with namespace() as made:
        yield made


@dataclass(slots=True)
class Hosts:
    """A bus, the first host's instance, and the nodes of the second."""

    place: Place
    directory: Path
    options: tuple[str, ...]
    first: System
    bus: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def join(self, *kinds: str) -> None:
        """Start a node of the second host."""
        argv = [*self.place.inside, *COMMAND, "actor", *kinds, "--bus", self.bus, "--node", f"far-{kinds[0]}"]
        env = {**os.environ, "HEADRACE_HOST": "second", "HEADRACE_INSTANCE": f"far-{os.getpid()}"}
        with (self.directory / f"far-{kinds[0]}.log").open("ab") as out:
            process = subprocess.Popen([*argv, *self.options], stdout=out, stderr=out, env=env)
        self.processes.append(process)

    def silence_first_engine(self) -> int:
        """Freeze it, so that the second host's engine takes what comes; returns its process id."""
        (row,) = [row for row in self.first.rows() if row["kind"] == "decode" and row["node"] == "decode-0"]
        os.kill(row["pid"], signal.SIGSTOP)
        wait_until(
            lambda: all(r["node"] != "decode-0" for r in self.first.rows()), limit_s=10.0, what="the engine is silent"
        )
        return int(row["pid"])

    def tail(self) -> str:
        """The ends of all output."""
        logs = [path.read_text(errors="replace")[-2000:] for path in self.directory.glob("*.log")]
        return "\n".join(logs)


@contextmanager
def hosts(place: Place, directory: Path, nats_binary: str, options: tuple[str, ...]) -> Iterator[Hosts]:
    """A bus that both reach, the first host's instance with one engine, and whatever joins it."""
    port = free_ports()
    with (directory / "nats.log").open("ab") as log:
        server = subprocess.Popen([nats_binary, "-a", place.address, "-p", str(port)], stdout=log, stderr=log)
    bus = f"nats://{place.address}:{port}"
    env = {"HEADRACE_HOST": "first", "HEADRACE_FROZEN_KILL_S": "300"}
    first = System(directory, "--decode", "1", "--bus", bus, *options, env=env)
    made = Hosts(place, directory, options, first, bus)
    try:
        first.start()
        yield made
    except AssertionError as exc:
        raise AssertionError(f"{exc}\n{made.tail()}") from exc
    finally:
        for process in made.processes:
            process.terminate()
        for process in made.processes:
            try:
                process.wait(20.0)
            except subprocess.TimeoutExpired:
                process.kill()
        first.stop()
        server.terminate()
        server.wait(10.0)


def ask(system: System) -> tuple[str, int]:
    """Send the prompt; returns the answer, and how many tokens of the prompt were not computed."""
    response = system.chat(STORY)
    assert response.status_code == 200, response.text
    body = response.json()
    return str(body["choices"][0]["message"]["content"]), int(body["usage"]["prompt_tokens_details"]["cached_tokens"])


def loaded_from_the_first_host(made: Hosts) -> None:
    """The whole case: computed on the first host, frozen there, asked again, loaded by the second."""
    text, cached = ask(made.first)
    assert cached == 0
    wait_until(lambda: metric(made.first, "kv_stored") > 0, limit_s=20.0, what="the prompt is stored")
    stored = metric(made.first, "kv_stored")
    made.join("kv", "transfer")
    made.join("decode")
    wait_until(
        lambda: metric(made.first, "kv_remote_known") == stored, limit_s=60.0, what="the second host knows of it"
    )

    def told() -> bool:
        return any(row["kind"] == "kv" and row["load"].get("elsewhere") for row in made.first.rows())

    wait_until(told, limit_s=10.0, what="its engines know that there is something")
    frozen = made.silence_first_engine()
    counter = made.place.counter
    before = int(counter.read_text()) if counter is not None else 0
    try:
        again, cached = ask(made.first)
    finally:
        os.kill(frozen, signal.SIGCONT)
    assert again == text and cached > 0
    wait_until(lambda: metric(made.first, "kv_remote_fetched_total") > 0, limit_s=10.0, what="counted")
    # Sent over TCP, or read by another way (`HEADRACE_KV_TRANSPORT`).
    served = sum(metric(made.first, f"transfer_serve_{how}_total") for how in ("bytes", "read"))
    assert served > 0 and served == metric(made.first, "transfer_peer_fetched_bytes_total")
    assert metric(made.first, "kv_remote_failures_total") == 0
    if counter is not None:
        assert int(counter.read_text()) - before > served
    wait_until(lambda: metric(made.first, "kv_lent_tickets") == 0, limit_s=10.0, what="the lease is given back")


def test_a_prompt_of_one_host_is_loaded_on_another(place: Place, tmp_path: Path, nats_binary: str) -> None:
    """Scripted engines check each block that they read; what they got went over TCP."""
    spec = tmp_path / "script.json"
    spec.write_text(json.dumps({**script(), "block_nbytes": BLOCK_NBYTES}))
    with hosts(place, tmp_path, nats_binary, ("--engine", f"scripted:{spec}")) as made:
        loaded_from_the_first_host(made)


def test_the_real_model_says_the_same_from_blocks_of_another_host(
    tmp_path: Path, model_path: Path, nats_binary: str
) -> None:
    """Greedy, so any wrong byte that matters would show."""
    with hosts(Place("127.0.0.1"), tmp_path, nats_binary, ("--model", str(model_path))) as made:
        loaded_from_the_first_host(made)


def test_a_host_that_takes_no_part_serves_nothing(tmp_path: Path, nats_binary: str, script_file: Path) -> None:
    """With `kv_listen = off` on the first host the second one computes; the text is the same."""
    place = Place("127.0.0.1")
    with hosts(place, tmp_path, nats_binary, ("--engine", f"scripted:{script_file}")) as made:
        made.first.stop()
        made.first = System(
            tmp_path, "--decode", "1", "--bus", made.bus, *made.options,
            env={"HEADRACE_HOST": "first", "HEADRACE_FROZEN_KILL_S": "300", "HEADRACE_KV_LISTEN": "off"},
        ).start()  # fmt: skip
        try:
            text, _ = ask(made.first)
            wait_until(lambda: metric(made.first, "kv_stored") > 0, limit_s=20.0, what="the prompt is stored")
            made.join("kv", "transfer")
            made.join("decode")
            wait_until(
                lambda: any(r["node"] == "far-decode" for r in made.first.rows()), limit_s=60.0, what="it has joined"
            )
            frozen = made.silence_first_engine()
            try:
                assert ask(made.first) == (text, 0)
            finally:
                os.kill(frozen, signal.SIGCONT)
            assert metric(made.first, "transfer_serve_bytes_total") == 0
            assert httpx.get(made.first.url + "/health", timeout=5.0).status_code == 200
        finally:
            made.first.stop()
