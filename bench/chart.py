"""Draws a comparison: its JSON on standard input, the picture's path as the argument.

Run by whichever interpreter has matplotlib, which is not ours by default; so it imports nothing of the project.
"""

import importlib
import json
import sys
from typing import Any

PANELS = (("tokens_per_s", "tokens/s"), ("ttft_p50_ms", "TTFT p50, ms"), ("itl_p50_ms", "ITL p50, ms"))


def draw(result: dict[str, Any], path: str) -> None:
    """Write one row of panels per length of prompt, one group of bars per number of streams."""
    importlib.import_module("matplotlib").use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    names = list(result["commands"])
    lengths = sorted({row["prompt"] for row in result["levels"]})
    figure, axes = pyplot.subplots(len(lengths), len(PANELS), figsize=(14, 4 * len(lengths)), squeeze=False)
    for line, length in zip(axes, lengths, strict=True):
        rows = [row for row in result["levels"] if row["prompt"] == length]
        for axis, (key, label) in zip(line, PANELS, strict=True):
            for at, name in enumerate(names):
                places = [i + (at - (len(names) - 1) / 2) * 0.8 / len(names) for i in range(len(rows))]
                heights = [row["figures"][name].get(key, 0.0) for row in rows]
                bars = axis.bar(places, heights, 0.75 / len(names), label=name)
                axis.bar_label(bars, fmt="%.3g", fontsize=7)
            axis.set_xticks(range(len(rows)), [f"{row['streams']}" for row in rows])
            axis.set_xlabel("streams")
            axis.set_title(f"{label}, prompts of about {length} tokens")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    draw(json.load(sys.stdin), sys.argv[1])
