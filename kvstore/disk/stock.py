"""Taking stock of a directory: what segments hold, what belongs to other layouts, what dead writers left."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvstore.disk.files import Files, Found
from kvstore.disk.segment import Scanned, parse_name, scan_segment


@dataclass(slots=True)
class Stock:
    """What lies in a directory.

    Args:
        scans: our segments, the oldest first.
        foreign: files that count and are not ours to read: other layouts, and what cannot be read. The oldest first.
        leftovers: how many unfinished files were removed.
        number: the highest number of a name.
    """

    scans: list[Scanned] = field(default_factory=list)
    foreign: list[tuple[Path, Found]] = field(default_factory=list)
    leftovers: int = 0
    number: int = 0


def take_stock(files: Files, directory: Path, folder: Path, shelf: bytes, block_nbytes: int) -> Stock:
    """Read all headers of one layout's folder and list the others; remove what dead writers left.

    Only names of ours are looked at; other files are left alone and do not count.

    Raises:
        OSError: if a folder cannot be read or a leftover not be removed.
    """
    stock = Stock()
    for path in (directory / name for name in files.folders(directory)):
        for found in files.list(path):
            parsed = parse_name(found.name)
            if parsed is None:
                continue
            if parsed[0] == "staging":
                files.unlink(path / found.name)
                stock.leftovers += 1
                continue
            if path != folder:
                stock.foreign.append((path / found.name, found))
                continue
            stock.number = max(stock.number, parsed[1])
            try:
                stock.scans.append(scan_segment(files, folder, found, shelf, block_nbytes))
            except OSError:
                stock.foreign.append((path / found.name, found))
    stock.scans.sort(key=lambda scan: scan.number)
    stock.foreign.sort(key=lambda pair: pair[1].mtime)
    return stock
