"""What must be equal for a stored block to be the same: each difference alone gives hash chains that never meet."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actors.engine_host import root_fields
from engine.torch_runner import TorchRunner
from kvstore.block import chain_hashes, root_hash
from tests.models.files import tiny_model
from tests.models.hf_files import tiny_folder

IDS = [(7 * i) % 250 for i in range(64)]
SALT = "default:"
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "rope base": lambda c: c.update(rope_theta=20000.0),
    "rope scaling": lambda c: c.update(rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "another factor of rope scaling": lambda c: c.update(rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "rope by frequency": lambda c: c.update(rope_scaling=LLAMA3),
    "norm": lambda c: c.update(rms_norm_eps=1e-6),
}


def hashes(path: Path, *, salt: str = SALT, **options: Any) -> list[bytes]:
    """The hashes by which an engine of this model knows the blocks of one prompt."""
    runner = TorchRunner(path, **options)
    try:
        return chain_hashes(IDS, root=root_hash(*root_fields(runner), salt))
    finally:
        runner.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model as a folder."""
    return tiny_folder(tmp_path_factory.mktemp("roots") / "model")


@pytest.fixture(scope="module")
def own(folder: Path) -> list[bytes]:
    """The hashes of its blocks."""
    return hashes(folder)


def test_a_copy_of_a_model_under_another_name_shares_its_blocks(folder: Path, own: list[bytes], tmp_path: Path) -> None:
    """Or the tests below would show nothing."""
    shutil.copytree(folder, tmp_path / "by another name")

    assert hashes(tmp_path / "by another name") == own


@pytest.mark.parametrize("change", EDITS)
def test_a_model_whose_config_differs_in_one_thing_shares_nothing(
    change: str, folder: Path, own: list[bytes], tmp_path: Path
) -> None:
    """The weights are the same to the last bit."""
    shutil.copytree(folder, path := tmp_path / "other")
    config = json.loads((path / "config.json").read_text())
    EDITS[change](config)
    (path / "config.json").write_text(json.dumps(config))

    assert not set(hashes(path)) & set(own)


def swap_two_tokens(vocabulary: dict[str, int]) -> None:
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


TOKENIZERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "two ids exchanged": lambda t: swap_two_tokens(t["model"]["vocab"]),
    "a space in front": lambda t: t["pre_tokenizer"].update(add_prefix_space=True),
    "a token that is special no more": lambda t: t["added_tokens"][0].update(special=False),
}


@pytest.mark.parametrize("change", TOKENIZERS)
def test_a_model_with_another_tokenizer_shares_nothing(
    change: str, folder: Path, own: list[bytes], tmp_path: Path
) -> None:
    """Though equal ids give equal KV: whoever compares texts would be told of a hit that is none."""
    shutil.copytree(folder, path := tmp_path / "other")
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    before = json.dumps(tokenizer)
    TOKENIZERS[change](tokenizer)
    assert json.dumps(tokenizer) != before
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))

    assert not set(hashes(path)) & set(own)


def test_keys_and_values_of_another_type_are_not_shared(folder: Path, own: list[bytes]) -> None:
    """Of the very same files; the 8-bit formats of native engines are in `test_rounded_kv.py`."""
    assert not set(hashes(folder, dtype="float32")) & set(own)


def test_other_weights_and_another_tenant_share_nothing(folder: Path, own: list[bytes], tmp_path: Path) -> None:
    """The last two of the fields."""
    other = tiny_folder(tmp_path / "other", seed=1)

    assert not set(hashes(other)) & set(own)
    assert not set(hashes(folder, salt="another:")) & set(own)


GGUF_EDITS = {
    "rope base": (struct.pack("<f", 10000.0), struct.pack("<f", 20000.0)),
    "norm": (struct.pack("<f", 1e-5), struct.pack("<f", 1e-6)),
    "a token": (b"hello", b"hellp"),
    "a merge": (b"he ll", b"hf ll"),
}


@pytest.mark.parametrize("change", GGUF_EDITS)
def test_a_gguf_file_that_differs_in_one_field_shares_nothing(change: str, tmp_path: Path) -> None:
    """Four or five bytes of metadata, in a file of the same length."""
    path, other = tiny_model(tmp_path / "model.gguf"), tmp_path / "other.gguf"
    data = path.read_bytes()
    before, after = GGUF_EDITS[change]
    assert data.count(before) >= 1
    other.write_bytes(data.replace(before, after, 1))

    assert not set(hashes(path)) & set(hashes(other))
