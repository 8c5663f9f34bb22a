"""Makes the short names under which llama.cpp's programs look for their libraries: `peer_links.py BIN_DIRECTORY`."""

import sys
from pathlib import Path

folder = Path(sys.argv[1])
for library in sorted(folder.glob("lib*.so.*.*.*")):
    stem, _, version = library.name.partition(".so.")
    for short in (f"{stem}.so.{version.split('.')[0]}", f"{stem}.so"):
        link = folder / short
        if not link.exists():
            link.symlink_to(library.name)
