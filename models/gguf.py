"""A careful reader of GGUF files: nothing is allocated by a size that the file only claims to have.

Every count, length and offset is compared with the bytes that are left before it is used, so that a corrupt file costs
no more time and memory than a good one of its size. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.errors import ModelFileError

MAGIC = b"GGUF"
MAX_DIMS = 4
MAX_ITEMS = 1 << 22  # of one metadata array; the largest vocabularies have a quarter of a million

# Value types of metadata: struct code, or the marker of a string or an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

# Tensor types: name, elements per block, bytes per block.
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `shape` is in torch's order (rows first); `offset` counts from the start of the file."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class GgufFile:
    """An open GGUF file: metadata and tensor table are parsed, tensor bytes stay mapped until `close`."""

    def __init__(self, path: Path) -> None:
        """Open and check the file.

        Raises:
            ModelFileError: the file is missing, not GGUF, or corrupt; the message names what is wrong.
        """
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self.size = file.seek(0, 2)
                if self.size < 24:
                    raise ModelFileError(path, f"not a GGUF file: only {self.size} bytes long")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelFileError(path, f"cannot be opened: {error.strerror or error}") from error
        try:
            reader = _Reader(self.path, self._map, self.size)
            self.version, self.metadata, self.tensors, self.data_start = reader.read()
        except BaseException:
            self._map.close()
            raise

    def data(self, tensor: TensorInfo) -> memoryview:
        """Return the bytes of a tensor, read-only, without copying."""
        return memoryview(self._map)[tensor.offset : tensor.offset + tensor.nbytes]

    def fingerprint(self) -> str:
        """Return 32 hexadecimal digits that name the contents.

        Hashes the file's size, everything before the tensor data (metadata, tokenizer, tensor table), and the first,
        middle and last 4 KiB of every tensor: cheap (about 3 MB of a 100 MB file), and any conversion or fine-tune
        changes it. It is an identity, not an integrity check: a flipped bit elsewhere goes unseen.
        """
        digest = hashlib.blake2b(struct.pack("<Q", self.size), digest_size=16)
        digest.update(self._map[: self.data_start])
        for tensor in self.tensors.values():
            for at in (0, tensor.nbytes // 2, max(0, tensor.nbytes - 4096)):
                start = tensor.offset + at
                digest.update(self._map[start : min(start + 4096, tensor.offset + tensor.nbytes)])
        return digest.hexdigest()

    def close(self) -> None:
        """Unmap the file, or leave that to the last of the views that `data` handed out."""
        # A view may live in the frames of an error on its way out, which must not be hidden by one about the view.
        with contextlib.suppress(BufferError):
            self._map.close()

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Reader:
    """A cursor over the mapped header; every read checks what is left."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path = path
        self.data = data
        self.size = size
        self.at = 0
        self.what = "header"

    def fail(self, problem: str) -> ModelFileError:
        return ModelFileError(self.path, problem)

    def need(self, nbytes: int) -> int:
        """Claim the next bytes and return where they begin."""
        if nbytes > self.size - self.at:
            left = self.size - self.at
            raise self.fail(f"truncated or corrupt: {self.what} needs {nbytes} bytes at {self.at}, {left} are left")
        start = self.at
        self.at += nbytes
        return start

    def number(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self.data, self.need(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        length = self.number("Q")
        start = self.need(length)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"corrupt: {self.what} is not UTF-8") from error

    def raw_text(self) -> str:
        """A string that need not be UTF-8 (vocabulary entries of some files); bad bytes become surrogates."""
        length = self.number("Q")
        start = self.need(length)
        return self.data[start : start + length].decode("utf-8", "surrogateescape")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            if kind == 7:
                return self.number("B") != 0
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text() if depth == 0 else self.raw_text()
        if kind != _ARRAY:
            raise self.fail(f"corrupt: {self.what} has the unknown value type {kind}")
        if depth > 2:
            raise self.fail(f"corrupt: {self.what} nests arrays too deeply")
        item = self.number("I")
        count = self.number("Q")
        if count > MAX_ITEMS:
            raise self.fail(f"truncated or corrupt: {self.what} claims {count} items, more than {MAX_ITEMS}")
        if item in _SCALARS:
            code = "B" if item == 7 else _SCALARS[item]
            width = struct.calcsize("<" + code)
            start = self.need(count * width)
            values = struct.unpack_from(f"<{count}{code}", self.data, start)
            return [v != 0 for v in values] if item == 7 else list(values)
        smallest = 8 if item == _STRING else 12
        if count * smallest > self.size - self.at:
            raise self.fail(f"truncated or corrupt: {self.what} claims {count} items, more than the file can hold")
        return [self.value(item, depth + 1) for _ in range(count)]

    def read(self) -> tuple[int, dict[str, Any], dict[str, TensorInfo], int]:
        if self.data[:4] != MAGIC:
            raise self.fail(f"not a GGUF file: it begins with {bytes(self.data[:4])!r}")
        self.at = 4
        version = self.number("I")
        if version not in (2, 3):
            hint = " (a big-endian file?)" if version >= 1 << 16 else ""
            raise self.fail(f"GGUF version {version} is not supported{hint}; 2 and 3 are")
        num_tensors, num_values = self.number("Q"), self.number("Q")
        if num_values * 13 > self.size or num_tensors * 24 > self.size:
            raise self.fail(f"corrupt: claims {num_values} metadata values and {num_tensors} tensors")
        metadata = self.read_metadata(num_values)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1) or alignment > 1 << 20:
            raise self.fail(f"corrupt: general.alignment is {alignment!r}, not a power of two up to 1 MiB")
        table = [self.read_tensor() for _ in range(num_tensors)]
        data_start = -(-self.at // alignment) * alignment
        return version, metadata, self.place(table, data_start, alignment), data_start

    def read_metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for index in range(count):
            self.what = f"the key of metadata value {index}"
            key = self.text()
            if not key or len(key) > 65535:
                raise self.fail(f"corrupt: {self.what} is {len(key)} characters long")
            self.what = f"metadata {key!r}"
            if key in metadata:
                raise self.fail(f"corrupt: {self.what} occurs twice")
            metadata[key] = self.value(self.number("I"))
        return metadata

    def read_tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        self.what = "the tensor table"
        name = self.text()
        self.what = f"the table entry of tensor {name!r}"
        num_dims = self.number("I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise self.fail(f"corrupt: tensor {name!r} has {num_dims} dimensions")
        dims = tuple(self.number("Q") for _ in range(num_dims))
        return name, self.number("I"), dims, self.number("Q")

    def place(
        self, table: list[tuple[str, int, tuple[int, ...], int]], data_start: int, alignment: int
    ) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for name, kind, dims, offset in table:
            if name in tensors:
                raise self.fail(f"corrupt: tensor {name!r} occurs twice")
            if kind not in TENSOR_TYPES:
                known = ", ".join(t[0] for t in TENSOR_TYPES.values())
                raise self.fail(f"tensor {name!r} has type number {kind}, which is not supported; {known} are")
            label, per_block, block_nbytes = TENSOR_TYPES[kind]
            elements = 1
            for dim in dims:
                elements *= dim  # Python integers do not wrap round
            if elements == 0 or dims[0] % per_block:
                raise self.fail(f"corrupt: tensor {name!r} of type {label} has dimensions {dims}")
            nbytes = elements // per_block * block_nbytes
            if offset % alignment:
                raise self.fail(f"corrupt: tensor {name!r} begins at {offset}, which is not aligned to {alignment}")
            if data_start + offset + nbytes > self.size:
                end = data_start + offset + nbytes
                raise self.fail(f"truncated or corrupt: tensor {name!r} ends at {end}, the file at {self.size}")
            tensors[name] = TensorInfo(name, label, tuple(reversed(dims)), data_start + offset, nbytes)
        spans = sorted((t.offset, t.offset + t.nbytes, t.name) for t in tensors.values())
        for before, after in zip(spans, spans[1:], strict=False):
            if before[1] > after[0]:
                raise self.fail(f"corrupt: tensors {before[2]!r} and {after[2]!r} overlap")
        return tensors


def fingerprint(path: Path) -> str:
    """Return the fingerprint of a model file (see `GgufFile.fingerprint`).

    Raises:
        ModelFileError: the file cannot be read as GGUF.
    """
    with GgufFile(path) as file:
        return file.fingerprint()
