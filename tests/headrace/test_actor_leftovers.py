"""What a killed process has left in shared memory goes when its successor starts, wherever that is started from."""

from __future__ import annotations

from pathlib import Path

from headrace.commands.actor import _reap
from kvstore.pool import BlockPool
from schemas.settings import load


def test_a_node_started_by_hand_removes_the_pools_of_its_killed_predecessors(tmp_path: Path) -> None:
    """Of its own actors alone, and never one whose owner lives."""
    settings = load({"instance": "far", "shm_dir": str(tmp_path)}).settings
    prefix = settings.pool_prefix
    dead = [tmp_path / f"{prefix}{name}-0123456789abcdef" for name in ("kv-far-kv", "decode-far-kv")]
    others = [tmp_path / f"{prefix}kv-other-0123456789abcdef", tmp_path / "headrace-else-kv-far-kv-0123456789abcdef"]
    for path in (*dead, *others):
        path.write_bytes(b"left")
    lives = BlockPool.create(tmp_path, f"{prefix.removeprefix('headrace-')}kv-far-kv", 2, 64, "l", "fedc", "h")

    _reap(settings, ["kv", "transfer", "decode"], "far-kv")

    left = {path.name for path in tmp_path.iterdir()}
    assert left == {path.name for path in others} | {Path(lives.handle().path).name}
    lives.close()
