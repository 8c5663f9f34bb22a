"""Write the table of settings in docs/configuration.md from the settings themselves; `--check` only compares."""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic_core import PydanticUndefined

from schemas.settings import Settings, env_name

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
BEGIN, END = "<!-- settings: begin (make_config_docs.py) -->\n", "<!-- settings: end -->\n"


def table() -> str:
    """Return the table in Markdown."""
    lines = ["| setting | environment | default | meaning |", "|---|---|---|---|"]
    for name, field in Settings.model_fields.items():
        default = "" if field.default in (None, "", PydanticUndefined) else f"`{str(field.default).lower()}`"
        if isinstance(field.default, (str, float)) and field.default != "":
            default = f"`{field.default}`"
        meaning = (field.description or "").replace("|", "\\|")
        lines.append(f"| `{name}` | `{env_name(name)}` | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


def render(page: str) -> str:
    """Return the page with a fresh table."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return head + BEGIN + table() + END + tail


def main() -> int:
    """Write or check the page; returns the exit code."""
    old = PAGE.read_text()
    new = render(old)
    if "--check" in sys.argv[1:]:
        if new != old:
            print("docs/configuration.md is out of date: run scripts/make_config_docs.py", file=sys.stderr)
        return int(new != old)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
