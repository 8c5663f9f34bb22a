"""How blocks are kept in host memory and on disk: as they are, or, if their engine rounds them, packed.

The engine's layout says which: `native-1,30,16,3,64,bfloat16` is kept as it is, `…,bfloat16,int8` packed, under the
layout `packed-1/…`. Packing loses nothing (see `kernels.kv_format`): the rounding was done where a key or value was
computed, and the layout is part of every hash, so a rounded block is never found by an engine that does not round.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from kernels.kv_format import BLOCK_TOKENS, FORMATS, RAW, Shape

if TYPE_CHECKING:  # a node that only moves raw blocks does without it
    import numpy as np
    import numpy.typing as npt

PREFIX = "packed-1/"
ELEMENT = "bfloat16"


def stored_form(layout: str, block_nbytes: int) -> tuple[str, int]:
    """Return layout and bytes of an engine's blocks in a store; the same two if they are kept as they are."""
    shape = shape_of(layout)
    if shape is None or shape.block_nbytes != block_nbytes:
        return layout, block_nbytes
    return PREFIX + layout, shape.packed_nbytes


@functools.lru_cache(maxsize=64)
def shape_of(layout: str) -> Shape | None:
    """Return how an engine's rounded blocks are packed; None for all other layouts."""
    fields = layout.split(",")
    form, element = fields[-1], fields[-2] if len(fields) > 1 else ""
    if form not in FORMATS or form == RAW or element != ELEMENT:
        return None
    try:
        match fields[:-2]:
            case ["native-1", layers, tokens, kv_heads, dim] if int(tokens) == BLOCK_TOKENS:
                return Shape("native-1", int(layers), int(kv_heads), int(dim), form)
            case ["block", layers, "2", tokens, kv_heads, dim] if int(tokens) == BLOCK_TOKENS:
                return Shape("block", int(layers), int(kv_heads), int(dim), form)
    except ValueError:
        pass
    return None


class Packing:
    """Blocks of one shape into their packed form and back. Stateless; callable from any thread."""

    def __init__(self, shape: Shape) -> None:
        """Take the compiled kernels, or the plain ones where these cannot be had."""
        from kernels import native

        self.shape = shape
        self._compiled = native.available()

    def pack(self, blocks: memoryview, packed: memoryview) -> None:
        """Pack blocks, one after another, into as many packed ones."""
        if self._compiled:
            from kernels.kv_format.native import pack_into

            return pack_into(self.shape, _array(blocks), _array(packed))
        from kernels.kv_format import plain

        packed[:] = plain.pack(self.shape, self._rows(blocks, self.shape.block_nbytes)).reshape(-1).data
        return None

    def unpack(self, packed: memoryview, blocks: memoryview) -> None:
        """Unpack into as many blocks."""
        if self._compiled:
            from kernels.kv_format.native import unpack_into

            return unpack_into(self.shape, _array(packed), _array(blocks))
        from kernels.kv_format import plain

        blocks[:] = plain.unpack(self.shape, self._rows(packed, self.shape.packed_nbytes)).reshape(-1).data
        return None

    def first_unequal(self, blocks: memoryview, packed: memoryview) -> int | None:
        """Return the first block that its packed one does not give back bit by bit; None if all are given back."""
        if self._compiled:
            from kernels.kv_format.native import first_unequal

            return first_unequal(self.shape, _array(blocks), _array(packed))
        from kernels.kv_format import plain

        rows = self._rows(blocks, self.shape.block_nbytes), self._rows(packed, self.shape.packed_nbytes)
        return plain.first_unequal(self.shape, *rows)

    def _rows(self, view: memoryview, nbytes: int) -> npt.NDArray[np.uint8]:
        return _array(view).reshape(-1, nbytes)


def _array(view: memoryview) -> npt.NDArray[np.uint8]:
    import numpy as np

    return np.frombuffer(view, dtype=np.uint8)


@functools.lru_cache(maxsize=64)
def packing_for(layout: str) -> Packing | None:
    """Return how blocks of an engine's layout are packed; None if they are kept as they are."""
    shape = shape_of(layout)
    return None if shape is None else Packing(shape)
