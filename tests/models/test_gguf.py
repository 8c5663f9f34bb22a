"""Model files: good ones are read as their reference reader does, bad ones give a clear error and nothing else."""

from __future__ import annotations

import random
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from models.config import ModelConfig
from models.errors import ModelFileError
from models.gguf import GgufFile, fingerprint
from models.gguf_tokenizer import read_gguf_tokenizer
from tests.models.files import tiny_model


def _open(path: Path) -> None:
    """Do everything to a file that serving does before it reads weights."""
    with GgufFile(path) as file:
        ModelConfig.from_gguf(file)
        read_gguf_tokenizer(file)


def _after(data: bytes, mark: bytes, skip: int = 0) -> int:
    at = data.index(mark)
    return at + len(mark) + skip


def _put(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def _extra(data: bytes, key: bytes, kind: int, code: str, *values: float) -> bytes:
    """Put one metadata value in front; the tensors move by a multiple of the alignment."""
    count = struct.unpack_from("<Q", data, 16)[0]
    value = struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + struct.pack("<" + code, *values)
    filler = b"filler"
    length = -(len(value) + 8 + len(filler) + 4 + 8) % 32
    value += struct.pack("<Q", len(filler)) + filler + struct.pack("<IQ", 8, length) + b"f" * length
    return data[:16] + struct.pack("<Q", count + 2) + value + data[24:]


def _dims(data: bytes) -> int:
    return _after(data, b"token_embd.weight")


def test_a_good_file_reads_as_the_reference_reader_reads_it(tiny: Path) -> None:
    """Metadata, shapes, types and bytes of every tensor are equal."""
    reference = gguf.GGUFReader(tiny)

    with GgufFile(tiny) as file:
        for key, field in reference.fields.items():
            if not key.startswith("GGUF."):
                assert file.metadata[key] == field.contents(), key
        assert list(file.tensors) == [t.name for t in reference.tensors]
        for theirs in reference.tensors:
            ours = file.tensors[theirs.name]
            assert ours.shape == tuple(reversed(theirs.shape.tolist()))
            assert ours.kind == theirs.tensor_type.name
            assert bytes(file.data(ours)) == theirs.data.tobytes()


def test_the_configuration_says_what_the_file_says(tiny: Path) -> None:
    """Sizes come from metadata; a missing output tensor means tied embeddings."""
    with GgufFile(tiny) as file:
        config = ModelConfig.from_gguf(file)

    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 8)
    assert (config.hidden, config.ffn, config.context_length, config.vocab_size) == (32, 64, 256, 264)
    assert config.tied_embeddings and not config.qkv_bias and config.group == 2


def test_the_fingerprint_changes_with_weights_and_with_metadata(tmp_path: Path) -> None:
    """Equal files have equal fingerprints; another seed or another template gives another one."""
    one = fingerprint(tiny_model(tmp_path / "a.gguf"))

    assert fingerprint(tiny_model(tmp_path / "b.gguf")) == one
    assert fingerprint(tiny_model(tmp_path / "c.gguf", seed=1)) != one
    assert fingerprint(tiny_model(tmp_path / "d.gguf", template="x")) != one


BAD: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda d: b"",
    "wrong magic": lambda d: b"GGML" + d[4:],
    "version 1": lambda d: _put(d, 4, struct.pack("<I", 1)),
    "version 4": lambda d: _put(d, 4, struct.pack("<I", 4)),
    "big-endian version": lambda d: _put(d, 4, struct.pack(">I", 3)),
    "tensor count 2^60": lambda d: _put(d, 8, struct.pack("<Q", 1 << 60)),
    "value count 2^60": lambda d: _put(d, 16, struct.pack("<Q", 1 << 60)),
    "key length 0": lambda d: _put(d, 24, struct.pack("<Q", 0)),
    "key length 2^62": lambda d: _put(d, 24, struct.pack("<Q", 1 << 62)),
    "array count 2^60": lambda d: _put(d, _after(d, b"tokenizer.ggml.tokens", 8), struct.pack("<Q", 1 << 60)),
    "array of unknown type": lambda d: _put(d, _after(d, b"tokenizer.ggml.tokens", 4), struct.pack("<I", 77)),
    "text past the end": lambda d: _put(d, _after(d, b"general.name", 4), struct.pack("<Q", len(d))),
    "0 dimensions": lambda d: _put(d, _dims(d), struct.pack("<I", 0)),
    "5 dimensions": lambda d: _put(d, _dims(d), struct.pack("<I", 5)),
    "2^31 dimensions": lambda d: _put(d, _dims(d), struct.pack("<I", 1 << 31)),
    "dimensions whose product wraps": lambda d: _put(d, _dims(d) + 4, struct.pack("<QQ", 1 << 33, 1 << 33)),
    "unknown tensor type": lambda d: _put(d, _dims(d) + 20, struct.pack("<I", 99)),
    "offset past the end": lambda d: _put(d, _dims(d) + 24, struct.pack("<Q", len(d) // 32 * 32)),
    "offset 2^64 - 32": lambda d: _put(d, _dims(d) + 24, struct.pack("<Q", (1 << 64) - 32)),
    "offset not aligned": lambda d: _put(d, _dims(d) + 24, struct.pack("<Q", 8)),
    "overlapping tensors": lambda d: _put(d, _after(d, b"output_norm.weight", 4 + 8 + 4), struct.pack("<Q", 0)),
    "duplicate tensor": lambda d: d.replace(b"blk.0.ffn_up.weight", b"blk.1.ffn_up.weight"),
    "missing tensor": lambda d: d.replace(b"blk.0.ffn_up.weight", b"blk.7.ffn_up.weight"),
    "duplicate key": lambda d: d.replace(b"ggml.bos_token_id", b"ggml.eos_token_id"),
    "missing key": lambda d: d.replace(b"llama.context_length", b"llama.context_lengty"),
    "eos outside the vocabulary": lambda d: _put(d, _after(d, b"eos_token_id", 4), struct.pack("<I", 9999)),
    "padding token outside the vocabulary": lambda d: _extra(d, b"tokenizer.ggml.padding_token_id", 4, "I", 264),
    "negative separator": lambda d: _extra(d, b"tokenizer.ggml.seperator_token_id", 5, "i", -1),
    "scores shorter than tokens": lambda d: _extra(d, b"tokenizer.ggml.scores", 9, "IQ3f", 6, 3, 0.0, 0.0, 0.0),
    "nested arrays": lambda d: _extra(d, b"x", 9, "IQ" * 5, *((9, 1) * 5)),
    "array of 2^40 bytes": lambda d: _extra(d, b"x", 9, "IQ", 0, 1 << 40),
    "0 heads": lambda d: _put(d, _after(d, b"llama.attention.head_count", 4), struct.pack("<I", 0)),
    "shape unlike the metadata": lambda d: _put(d, _after(d, b"llama.feed_forward_length", 4), struct.pack("<I", 128)),
    "another architecture": lambda d: d.replace(b"llama", b"mamba"),
    "cut by one byte": lambda d: d[:-1],
    "cut inside a tensor": lambda d: d[:-3000],
    "cut inside the header": lambda d: d[:900],
    "cut inside the counts": lambda d: d[:20],
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_gives_an_error_that_names_it(name: str, tiny: Path, tmp_path: Path) -> None:
    """Each fault is a `ModelFileError` with the file's name, soon, and without memory that only the header claims."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(BAD[name](tiny.read_bytes()))
    tracemalloc.start()
    begin = time.perf_counter()

    with pytest.raises(ModelFileError) as caught:
        _open(path)

    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "bad.gguf" in str(caught.value) and len(str(caught.value)) < 500
    assert time.perf_counter() - begin < 5
    assert peak < 2 * tiny.stat().st_size


def test_a_missing_file_and_a_directory_are_named(tmp_path: Path) -> None:
    """Both are `ModelFileError`, not a traceback of the operating system."""
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelFileError, match="cannot be opened"):
            _open(path)


@pytest.mark.parametrize("alignment", [0, 3, 1 << 40])
def test_an_alignment_that_is_no_power_of_two_is_refused(alignment: int, tiny: Path, tmp_path: Path) -> None:
    """Zero would divide by zero; a huge one would move the data out of the file."""
    data = tiny.read_bytes()
    key = b"general.alignment"
    extra = struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 10, alignment)
    path = tmp_path / "bad.gguf"
    path.write_bytes(
        _put(data[:24], 16, struct.pack("<Q", struct.unpack_from("<Q", data, 16)[0] + 1)) + extra + data[24:]
    )

    with pytest.raises(ModelFileError, match="alignment"):
        _open(path)


def test_a_file_may_end_with_its_last_tensor_or_with_padding(tiny: Path, tmp_path: Path) -> None:
    """The format asks for padding after every tensor; files without it after the last one are in use."""
    data = tiny.read_bytes()
    with GgufFile(tiny) as file:
        end = max(t.offset + t.nbytes for t in file.tensors.values())
        first = min(t.offset for t in file.tensors.values()) - file.data_start
    path = tmp_path / "m.gguf"

    assert first == 0
    for valid in (data[:end], data[:end] + bytes(32), _extra(data, b"tokenizer.ggml.padding_token_id", 4, "I", 263)):
        path.write_bytes(valid)
        _open(path)


@pytest.mark.slow
def test_any_changed_byte_of_the_header_loads_or_gives_a_clear_error(tiny: Path, tmp_path: Path) -> None:
    """10,000 random one-byte changes: nothing but success or `ModelFileError`."""
    data = bytearray(tiny.read_bytes())
    with GgufFile(tiny) as file:
        header = file.data_start
    rng = random.Random(5)
    path = tmp_path / "fuzz.gguf"
    refused = 0
    for _ in range(10_000):
        at = rng.randrange(header)
        old = data[at]
        data[at] = rng.randrange(256)
        path.write_bytes(data)
        try:
            _open(path)
        except ModelFileError:
            refused += 1
        data[at] = old

    assert refused > 100
