"""A server of a comparison is started, measured from its first answer on, and gone afterwards."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from bench.load import differing, measure
from bench.servers import Server, ServerFailed, ServerSpec
from tests.support.ports import free_ports

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

STUB = """
import json, subprocess, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
helper = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
count = 0

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args): pass
    def do_GET(self):
        self.answer(json.dumps({"data": [{"id": "stub"}]}).encode(), "application/json")
    def do_POST(self):
        global count
        count += 1
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        events = [{"choices": [{"index": 0, "delta": {"content": f"w{i} "}}]} for i in range(body["max_tokens"])]
        if "moody" in sys.argv:
            events[0]["choices"][0]["delta"]["content"] = str(count)
        usage = {"prompt_tokens": 7, "completion_tokens": body["max_tokens"]}
        lines = [json.dumps(e) for e in [*events, {"choices": [], "usage": usage}]] + ["[DONE]"]
        self.answer("".join(f"data: {line}\\n\\n" for line in lines).encode(), "text/event-stream")
    def answer(self, data, kind):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def stub(tmp_path: Path, *options: str) -> ServerSpec:
    """Return a small server that answers like the real ones."""
    (tmp_path / "stub.py").write_text(STUB)
    port = free_ports()
    return ServerSpec("stub", (sys.executable, str(tmp_path / "stub.py"), str(port), *options), port)


async def test_a_server_is_ready_when_it_has_answered_and_gone_when_left(tmp_path: Path) -> None:
    """Its helpers too, which a signal to the first process does not reach."""
    async with Server(stub(tmp_path), tmp_path / "log") as server:
        family = server.processes()
        level = await measure(server.base, server.model, ["a", "b", "c"], 2, 5)

        assert server.model == "stub" and server.start_s > 0
        assert len(family) == 2 and server.pss_mb() > 1
        assert (level.requests, level.completion_tokens, level.prompt_tokens) == (3, 5, 7)

    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []


async def test_texts_that_change_between_alone_and_together_are_counted(tmp_path: Path) -> None:
    """A server that numbers its answers never gives the same one twice."""
    async with Server(stub(tmp_path, "moody"), tmp_path / "log") as server:
        assert await differing(server.base, server.model, ["a", "b", "c"], 4) == 3
    async with Server(stub(tmp_path), tmp_path / "log") as server:
        assert await differing(server.base, server.model, ["a", "b", "c"], 4) == 0


async def test_a_server_that_ends_by_itself_is_told_with_its_last_words(tmp_path: Path) -> None:
    """Not waited for until the limit."""
    argv = (sys.executable, "-c", "print('no such model'); raise SystemExit(3)")

    with pytest.raises(ServerFailed, match=r"(?s)ended with 3.*no such model"):
        async with Server(ServerSpec("stub", argv, free_ports()), tmp_path / "log"):
            pass


async def test_a_server_that_never_answers_is_stopped_at_the_limit(tmp_path: Path) -> None:
    """And its process is gone."""
    argv = (sys.executable, "-c", "import threading; threading.Event().wait()")
    server = Server(ServerSpec("stub", argv, free_ports()), tmp_path / "log", limit_s=1.0)

    with pytest.raises(ServerFailed, match="no answer"):
        async with server:
            pass

    assert server.processes() == []


async def test_a_port_where_another_server_answers_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """Its answers would be measured under the new one's name."""
    async with Server(stub(tmp_path), tmp_path / "log") as first:
        started = tmp_path / "started"
        argv = (sys.executable, "-c", f"open({str(started)!r}, 'w'); import threading; threading.Event().wait()")
        second = Server(ServerSpec("second", argv, first.spec.port), tmp_path / "second.log", limit_s=10.0)

        with pytest.raises(ServerFailed, match=f"second is not started: .*port {first.spec.port}"):
            async with second:
                pass

        assert not started.exists() and not second.log.exists()
        assert len(first.processes()) == 2


async def test_a_server_that_another_one_answers_for_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port was taken after the look at it: only answers of the own processes count."""

    async def free(port: int) -> bool:
        return False

    async with Server(stub(tmp_path), tmp_path / "log") as first:
        monkeypatch.setattr("bench.servers.taken", free)
        argv = (sys.executable, "-c", "import threading; threading.Event().wait()")
        second = Server(ServerSpec("second", argv, first.spec.port), tmp_path / "second.log", limit_s=10.0)

        with pytest.raises(ServerFailed, match=f"something else answers on the port of second, {first.spec.port}"):
            async with second:
                pass

        assert second.processes() == []
