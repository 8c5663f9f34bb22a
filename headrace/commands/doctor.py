"""`headrace doctor`: what is right, what is doubtful, what is wrong, and what to do about it."""

from __future__ import annotations

import json
from dataclasses import asdict

import httpx
from rich.console import Console
from rich.table import Table

from headrace.checks import Check, examine
from headrace.instance import NoInstance, find
from schemas.settings import Settings

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def diagnose(settings: Settings) -> list[Check]:
    """Return the findings about machine, installation and running instance."""
    found = examine(settings)
    state_check = _instance(settings)
    if state_check.verdict == "ok":  # its own port is in use, as it should be
        held = Check("http port", "ok", "held by the running instance")
        found = [held if check.name == "http port" else check for check in found]
    return [*found, state_check]


def show(settings: Settings, *, as_json: bool) -> int:
    """Print the findings; returns the exit code, 1 if anything failed."""
    found = diagnose(settings)
    failed = any(check.verdict == "fail" for check in found)
    if as_json:
        print(json.dumps([asdict(check) for check in found], indent=1))
        return int(failed)
    table = Table("", "check", "finding", "what to do", box=None, header_style="bold", pad_edge=False)
    for check in found:
        colour = COLOURS[check.verdict]
        table.add_row(f"[{colour}]{check.verdict}[/{colour}]", check.name, check.detail, check.advice)
    Console().print(table)
    return int(failed)


def _instance(settings: Settings) -> Check:
    name = settings.instance_name
    try:
        state = find(settings.runtime_path, name)
    except NoInstance as exc:
        return Check("instance", "warn", str(exc))
    where = f"{name}: pid {state.pid}, {state.http_url}"
    try:
        reply = httpx.get(f"{state.http_url}/health/ready", timeout=3.0, trust_env=False)
    except httpx.HTTPError as exc:
        return Check("instance", "fail", f"{where} does not answer: {exc}", f"look into {state.logs}")
    if reply.status_code != 200:
        return Check("instance", "fail", f"{where} is not ready: {reply.text[:200]}", f"look into {state.logs}")
    return Check("instance", "ok", f"{where} is ready")
