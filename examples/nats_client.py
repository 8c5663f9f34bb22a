"""A streamed chat over NATS, with nothing but nats-py: JSON in, JSON out.

    python examples/nats_client.py "Why is the sky blue?"
    python examples/nats_client.py --bus nats://host:4222 --token SECRET "Why is the sky blue?"

Without `--bus` (or HEADRACE_BUS_URL and HEADRACE_BUS_TOKEN) it looks for a running instance of this user.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

SILENCE_S = 2.0  # without a word for so long, the request was lost before anybody took it
LOST_S = 5.0  # nor without a frame for so long after that, before the first item: keepalives come once per second
NOBODY_S = 0.2
WINDOW = 64  # items per choice that may be under way unacknowledged


async def chat(bus: str, token: str | None, body: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """Send one request, print the answer as it comes, and return the terminal."""
    connection = await nats.connect(bus, token=token)
    loop = asyncio.get_running_loop()
    until, silence_s = loop.time() + limit_s, SILENCE_S
    try:
        while True:
            left_s = until - loop.time()
            if left_s <= 0.0:
                return {"error": {"message": f"no end within {limit_s} s"}}
            terminal = await ask(connection, {**body, "deadline_ms": round(left_s * 1000)}, left_s, silence_s)
            if terminal is not None:
                return terminal
            silence_s *= 2  # nobody has said a word, or all who had have died with it: ask again
    finally:
        await connection.drain()


async def ask(connection: Client, body: dict[str, Any], limit_s: float, silence_s: float) -> dict[str, Any] | None:
    """Publish a request and follow it to its terminal; None if it was lost before its first item."""
    frames: asyncio.Queue[Msg] = asyncio.Queue()
    inbox = connection.new_inbox()  # of this try alone: whoever works for an earlier one finds that nobody listens
    subscription = await connection.subscribe(inbox, cb=frames.put)
    headers = {"Content-Type": "application/json"}
    await connection.publish("requests.chat", json.dumps(body).encode(), reply=inbox, headers=headers)

    next_index = [0] * int(body.get("n", 1))
    taken = False
    try:
        async with asyncio.timeout(limit_s):
            while True:
                try:
                    patience_s = max(silence_s, LOST_S) if taken else silence_s
                    message = await asyncio.wait_for(frames.get(), None if any(next_index) else patience_s)
                except TimeoutError:
                    return None
                if message.headers and message.headers.get("Status") == "503":  # nobody listens at the moment
                    await asyncio.sleep(NOBODY_S)
                    return None
                taken = True
                frame = json.loads(message.data)
                for choice, index, _id, text, _logprob in frame.get("items", []):
                    if index == next_index[choice]:  # 1. drop every index but the next one expected
                        next_index[choice] += 1
                        if choice == 0:
                            print(text, end="", flush=True)
                if message.reply:  # 3. acknowledge: what is not acknowledged comes again
                    await message.respond(json.dumps({"next": next_index, "window": WINDOW}).encode())
                # 2. stop at the first terminal; one that overtook lost items is not the end yet, it comes again
                if "terminal" in frame and not missing(frame, next_index):
                    return dict(frame["terminal"])
    except TimeoutError:
        return {"error": {"message": "no end in time"}}
    finally:
        await subscription.unsubscribe()


def missing(frame: dict[str, Any], next_index: list[int]) -> bool:
    """Tell whether items are still missing, by the totals per choice that come with the end."""
    terminal = frame["terminal"]
    return "error" not in terminal and next_index != terminal["items"]


def running_instance(name: str) -> tuple[str, str | None]:
    """Return bus URL and token of a running instance, from its state file."""
    places = [os.environ.get("HEADRACE_RUNTIME_DIR"), f"/tmp/headrace-{os.getuid()}"]
    if os.environ.get("XDG_RUNTIME_DIR"):
        places.insert(1, os.environ["XDG_RUNTIME_DIR"] + "/headrace")
    for place in filter(None, places):
        path = Path(place) / f"{name}.json"
        if path.is_file():
            state = json.loads(path.read_text())
            return state["bus_url"], state["bus_token"]
    sys.exit(f"no instance {name!r} is running; start one with `headrace up`, or give --bus")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Chat over NATS.")
    parser.add_argument("prompt", nargs="?", default="Why is the sky blue? Answer in two sentences.")
    parser.add_argument("--bus", default=os.environ.get("HEADRACE_BUS_URL"))
    parser.add_argument("--token", default=os.environ.get("HEADRACE_BUS_TOKEN"))
    parser.add_argument("--instance", default=os.environ.get("HEADRACE_INSTANCE", "default"))
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--max-tokens", type=int, default=80)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--limit-s", type=float, default=60.0)
    args = parser.parse_args()
    bus, token = (args.bus, args.token) if args.bus else running_instance(args.instance)
    body = {
        "model": args.model,
        "messages": [{"role": "user", "content": args.prompt}],
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
    }
    terminal = asyncio.run(chat(bus, token, body, args.limit_s + 1.0))
    print()
    error = terminal.get("error")
    print(json.dumps({"ok": error is None, "error": error, "usage": terminal.get("usage")}))
    return 0 if error is None else 1


if __name__ == "__main__":
    sys.exit(main())
