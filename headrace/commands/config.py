"""`headrace config`: the effective settings and where each comes from."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table

from schemas.settings import Loaded


def show(loaded: Loaded, *, as_json: bool) -> None:
    """Print every setting with its value, secrets masked, and its source."""
    rows = loaded.rows()
    if as_json:
        print(json.dumps({name: {"value": value, "source": source} for name, value, source in rows}, indent=1))
        return
    table = Table("setting", "value", "source", box=None, header_style="bold", pad_edge=False)
    for name, value, source in rows:
        shown = "" if value is None else str(value)
        table.add_row(name, shown, f"[dim]{source}[/dim]" if source == "default" else source)
    Console().print(table)
