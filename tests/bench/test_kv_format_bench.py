"""The benches of KV formats and of pieces: what they compute themselves."""

from __future__ import annotations

import numpy as np
import pytest

from bench import kv_format, kv_transfer
from bench.kv_format import FORMS, WrongBytes, errors, parts, rates
from kernels import native
from kernels.kv_format import Shape, group_of, plain
from kvstore.handoff import PrivateMemory

if not native.available():
    pytest.skip(native.why_not(), allow_module_level=True)

SHAPE = Shape("native-1", 2, 2, 32, "int8")
LAYOUT = "native-1,2,16,2,32,bfloat16"


def pool(form: str, count: int = 2) -> bytearray:
    """Blocks as an engine that rounds writes them."""
    x = np.random.default_rng(1).standard_normal((count, SHAPE.groups, group_of(32))).astype(np.float32)
    values = plain.round_groups(x.reshape(count, -1), 32, form)
    places, _ = plain._places(SHAPE)
    flat = np.empty((count, SHAPE.elements), np.float32)
    flat[:, places.reshape(-1)] = values
    return bytearray((flat.view(np.uint32) >> 16).astype(np.uint16).tobytes())


def test_values_that_are_rounded_already_have_no_error() -> None:
    """In the groups that they were rounded in; taken out of the pool by token and head."""
    for name, part in parts(pool("int8"), SHAPE).items():
        found = errors(part, "int8")
        assert found["32"] == 0.0 and found["16"] >= 0.0 and found["512" if "512" in found else "64"] > 0.0, name
        assert part.shape == (2 * 2 * 2, 16, 32)


def test_the_error_of_a_coarser_scale_is_larger() -> None:
    """For numbers of one place; an exponent of its own makes the size of groups matter little."""
    x = np.random.default_rng(2).standard_normal((50, 16, 64)).astype(np.float32)

    whole, floating = (errors(x, form) for form in FORMS)

    assert whole["16"] < whole["32"] < whole["64"] < whole["1024"] and whole["32, free scale"] < whole["32"]
    assert max(floating.values()) < 1.3 * min(floating.values())


def test_no_rate_is_printed_for_blocks_that_do_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that loses a byte ends the command."""
    monkeypatch.setattr(kv_format, "RATE_BLOCKS", 2)
    monkeypatch.setattr(kv_format, "TURNS", 1)
    source = pool("int8")
    good = rates(f"{LAYOUT},int8", LAYOUT, source, SHAPE)
    assert set(good) == {"raw_in_mb_s", "raw_out_mb_s", "packed_in_mb_s", "packed_out_mb_s"}
    assert all(rate > 0 for rate in good.values())
    real = kv_format.copy_blocks

    def damaging(*args: object, **options: object) -> list[int]:
        sums = real(*args, **options)  # type: ignore[arg-type]
        dest = args[2]
        assert hasattr(dest, "view")
        dest.view()[5] ^= 1
        return sums

    monkeypatch.setattr(kv_format, "copy_blocks", damaging)
    with pytest.raises(WrongBytes):
        rates(f"{LAYOUT},int8", LAYOUT, source, SHAPE)


def test_groups_of_layers_are_whole_copies() -> None:
    """What is timed as a copy in groups does copy every byte."""
    pools = object.__new__(kv_transfer.Pools)
    pools.num_blocks = 3
    pools.source, pools.dest = PrivateMemory("l", 40, 3), PrivateMemory("l", 40, 3)  # type: ignore[assignment]
    pools.source.view()[:] = bytes(range(120))

    pools.copy_groups(3, 5)

    assert pools.dest.view() == pools.source.view()
