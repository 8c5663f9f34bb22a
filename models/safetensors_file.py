"""A careful reader of safetensors files: the header is checked against the file before anything believes it.

Format: 8 bytes length n (little-endian), n bytes of JSON, then the tensors' bytes without gaps. The same faults are
refused as by the reference (https://github.com/huggingface/safetensors), bytes after the last tensor among them: each
of them means that the file is not the one that was written.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import mmap
import struct
from pathlib import Path
from typing import Any

from models.errors import ModelFileError
from models.fields import parse_json
from models.gguf import TensorInfo

MAX_HEADER_NBYTES = 100_000_000  # the reference's own limit

_ITEM_NBYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


class SafetensorsFile:
    """An open file: the tensor table is parsed, tensor bytes stay mapped until `close`."""

    def __init__(self, path: Path) -> None:
        """Open and check the file.

        Raises:
            ModelFileError: the file is missing, no safetensors file, or corrupt; the message names what is wrong.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = file.seek(0, 2)
                if self.size < 10:
                    raise ModelFileError(path, f"not a safetensors file: only {self.size} bytes long")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelFileError(path, f"cannot be opened: {error.strerror or error}") from error
        try:
            self.data_start = self._header_end()
            self.tensors = self._table()
        except BaseException:
            self._map.close()
            raise

    def data(self, tensor: TensorInfo) -> memoryview:
        """Return the bytes of a tensor, read-only, without copying."""
        return memoryview(self._map)[tensor.offset : tensor.offset + tensor.nbytes]

    def update(self, digest: hashlib.blake2b) -> None:
        """Add what identifies the file: its size, its header, and three samples of every tensor."""
        digest.update(struct.pack("<Q", self.size))
        digest.update(self._map[: self.data_start])
        for tensor in self.tensors.values():
            for at in (0, tensor.nbytes // 2, max(0, tensor.nbytes - 4096)):
                start = tensor.offset + at
                digest.update(self._map[start : min(start + 4096, tensor.offset + tensor.nbytes)])

    def close(self) -> None:
        """Unmap the file, or leave that to the last of the views that `data` handed out."""
        # A view may live in the frames of an error on its way out, which must not be hidden by one about the view.
        with contextlib.suppress(BufferError):
            self._map.close()

    def _header_end(self) -> int:
        (length,) = struct.unpack_from("<Q", self._map)
        if length > MAX_HEADER_NBYTES:
            raise ModelFileError(self.path, f"corrupt: claims a header of {length} bytes, over {MAX_HEADER_NBYTES}")
        if length < 2 or length > self.size - 8:
            raise ModelFileError(
                self.path, f"truncated or corrupt: claims a header of {length} bytes in a file of {self.size}"
            )
        return 8 + int(length)

    def _table(self) -> dict[str, TensorInfo]:
        header = parse_json(self.path, "the header", self._map[8 : self.data_start], unique=True)
        notes = header.pop("__metadata__", {})
        if not isinstance(notes, dict) or not all(isinstance(v, str) for v in notes.values()):
            raise ModelFileError(self.path, "corrupt: '__metadata__' is no object of texts")
        tensors = {name: self._entry(name, entry) for name, entry in header.items()}
        end, before = self.data_start, "the header"
        # An empty tensor lies between its neighbours, wherever its name would sort it.
        for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
            if tensor.offset != end:
                fault = "overlaps" if tensor.offset < end else "leaves a gap after"
                raise ModelFileError(self.path, f"corrupt: tensor {tensor.name!r:.120} {fault} {before}")
            end, before = end + tensor.nbytes, repr(tensor.name)[:120]
        if end != self.size:
            raise ModelFileError(self.path, f"corrupt: {self.size - end} bytes follow the last tensor, {before}")
        return tensors

    def _entry(self, name: str, entry: Any) -> TensorInfo:
        label = f"tensor {name!r:.120}"
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise ModelFileError(self.path, f"corrupt: the header's entry of {label} is {entry!r:.80}")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _ITEM_NBYTES:
            raise ModelFileError(self.path, f"{label} has the unknown type {dtype!r:.80}")
        if not _naturals(shape) or len(shape) > 8:
            raise ModelFileError(self.path, f"corrupt: {label} has the shape {shape!r:.80}")
        if not _naturals(offsets) or len(offsets) != 2:
            raise ModelFileError(self.path, f"corrupt: {label} has the offsets {offsets!r:.80}")
        begin, end = offsets
        if end < begin or self.data_start + end > self.size:
            room = self.size - self.data_start
            raise ModelFileError(
                self.path, f"truncated or corrupt: {label} lies at {offsets!r:.80}; the file has {room} bytes of data"
            )
        nbytes = math.prod(shape) * _ITEM_NBYTES[dtype]  # Python integers do not wrap round
        if nbytes != end - begin:
            raise ModelFileError(
                self.path,
                f"corrupt: {label} of type {dtype} and shape {shape!r:.80} does not fill its {end - begin} bytes",
            )
        return TensorInfo(name, dtype, tuple(shape), self.data_start + begin, nbytes)


def _naturals(value: Any) -> bool:
    """Whether a value from JSON is a list of integers from 0 up to 2^63."""
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in value)
