"""`headrace kv verify`: check a disk tier that no process uses."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

from kvstore.disk.scrub import NoDiskTier, Report, scrub, tiers_in
from kvstore.errors import DiskBusy


def verify(directory: Path, *, drop: bool) -> int:
    """Check every record, print what was found, one JSON object last; returns the exit code.

    0: all good; 1: something was bad (also if it is dropped now) or unreadable; 2: not a disk tier, or one in use.
    """

    def show(where: Path, folder: str, report: Report) -> None:
        parts = [f"{report.segments} segments", f"{report.good} good records"]
        parts += [
            f"{count} {name}"
            for name, count in (
                ("with a bad header", report.bad_headers),
                ("with bad bytes", report.bad_payloads),
                ("cut", report.cut),
                ("segments unreadable", report.unreadable),
                ("unfinished files", report.leftovers),
                ("dropped", report.dropped),
            )
            if count
        ]
        print(f"{(where / folder).relative_to(directory)}: {', '.join(parts)}")

    try:
        report = Report()
        for tier in tiers_in(directory):
            report.add(scrub(tier, drop=drop, progress=partial(show, tier)))
    except (DiskBusy, NoDiskTier) as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    except OSError as exc:
        print(f"error: {directory}: {exc.strerror or exc}", file=sys.stderr)
        return 1
    print(json.dumps({"directory": str(directory), "bad": report.bad, **asdict(report)}))
    return 1 if report.bad else 0
