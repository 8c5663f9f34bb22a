"""Hugging Face folders: good ones load, bad ones give a clear error that names file and tensor, and nothing else."""

from __future__ import annotations

import copy
import json
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from models.errors import ModelFileError
from models.safetensors_file import SafetensorsFile
from models.source import open_model
from tests.models.hf_files import CONFIG, safetensors_bytes, split, tensors, tiny_folder

FIRST = "model.embed_tokens.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good folder with one file."""
    return tiny_folder(tmp_path_factory.mktemp("hf") / "tiny")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in three shards."""
    return tiny_folder(tmp_path_factory.mktemp("hf") / "tiny", shards=3)


def _open(path: Path) -> None:
    """Do everything to a folder that serving does before it reads weights."""
    with open_model(path) as source:
        source.text()
        source.fingerprint()


def _copy(folder: Path, to: Path, name: str, data: bytes | None) -> Path:
    """Copy a folder with one file replaced, or left out."""
    to.mkdir()
    for file in folder.iterdir():
        if file.name != name:
            (to / file.name).write_bytes(file.read_bytes())
    if data is not None:
        (to / name).write_bytes(data)
    return to


def test_a_good_folder_reads_as_the_reference_reads_it(folder: Path) -> None:
    """Names, types, shapes and bytes of every tensor are those of the safetensors package."""
    file = SafetensorsFile(folder / "model.safetensors")

    with safe_open(folder / "model.safetensors", framework="numpy") as reference:
        assert sorted(file.tensors) == sorted(reference.keys())
        for name in reference.keys():
            theirs = reference.get_tensor(name)
            assert file.tensors[name].shape == theirs.shape and file.tensors[name].kind == "F32"
            assert bytes(file.data(file.tensors[name])) == theirs.tobytes()


def test_a_folder_offers_its_tensors_under_the_names_of_gguf_files(folder: Path, sharded: Path) -> None:
    """All that the configuration asks for, the same from one file and from shards."""
    with open_model(folder) as one, open_model(sharded) as many:
        assert set(one.tensor_names) == set(one.config.tensor_shapes()) == set(many.tensor_names)
        for name, shape in one.config.tensor_shapes().items():
            assert one.tensor(name).shape == many.tensor(name).shape == shape
            assert bytes(one.tensor(name).raw) == bytes(many.tensor(name).raw)
        assert bytes(one.tensor("blk.1.ffn_down.weight").raw) == tensors()[DOWN].tobytes()
        assert one.eos_ids == {258}


def test_the_fingerprint_changes_with_weights_and_with_every_side_file(folder: Path, tmp_path: Path) -> None:
    """Equal folders have equal ones, wherever they lie."""

    def fingerprint(path: Path) -> str:
        with open_model(path) as source:
            return source.fingerprint()

    own = fingerprint(folder)
    others = {
        fingerprint(_copy(folder, tmp_path / file, file, (folder / file).read_bytes() + b" "))
        for file in ("config.json", "tokenizer.json", "tokenizer_config.json")
    }
    others.add(fingerprint(tiny_folder(tmp_path / "other", seed=1)))

    assert fingerprint(_copy(folder, tmp_path / "same", "x", None)) == own
    assert own not in others and len(others) == 4


def _header(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    """Return a change of a file by a change of its header."""

    def apply(data: bytes) -> bytes:
        header, body = split(data)
        changed = change(header)
        return safetensors_bytes(header if changed is None else changed, body)

    return apply


def _set(header: dict[str, Any], name: str, key: str, value: Any) -> None:
    header[name][key] = value


def _duplicate(data: bytes) -> bytes:
    header, body = split(data)
    again = json.dumps({DOWN: header[DOWN]})
    return safetensors_bytes((json.dumps(header)[:-1] + "," + again[1:]).encode(), body)


def _swap_lengths(header: dict[str, Any]) -> None:
    names = sorted((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"])
    begin, end = header[names[1]]["data_offsets"]
    header[names[1]]["data_offsets"] = [begin - 4, end - 4]


def _length(value: int) -> Callable[[bytes], bytes]:
    return lambda d: struct.pack("<Q", value) + d[8:]


BAD: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda d: b"", "only 0 bytes"),
    "cut by one byte": (lambda d: d[:-1], "truncated"),
    "cut inside a tensor": (lambda d: d[:-3000], "truncated"),
    "cut inside the header": (lambda d: d[:500], "truncated"),
    "cut inside the length": (lambda d: d[:7], "only 7 bytes"),
    "header length 0": (_length(0), "header of 0"),
    "header length past the end": (_length(1 << 24), "header of"),
    "header length 2^63": (_length(1 << 63), "header of"),
    "header length 2^64 - 1": (_length((1 << 64) - 1), "header of"),
    "header not JSON": (lambda d: d[:8] + b"x" + d[9:], "not JSON"),
    "header not UTF-8": (lambda d: d[:12] + b"\xff" + d[13:], "not UTF-8"),
    "header a list": (_header(lambda h: []), "no JSON object"),
    "header nests deeply": (_header(lambda h: b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "nests"),
    "a number of 100,000 digits": (_header(lambda h: b'{"a":' + b"9" * 100_000 + b"}"), "not JSON"),
    "header without tensors": (_header(lambda h: {}), "follow"),
    "entry a list": (_header(lambda h: h.update({DOWN: []})), DOWN),
    "entry without offsets": (_header(lambda h: h[DOWN].pop("data_offsets") and None), DOWN),
    "unknown type": (_header(lambda h: _set(h, DOWN, "dtype", "Q4_K")), DOWN),
    "type a list": (_header(lambda h: _set(h, DOWN, "dtype", ["F32"])), DOWN),
    "another type of the same width": (_header(lambda h: _set(h, DOWN, "dtype", "I32")), "has type I32"),
    "a wider type": (_header(lambda h: _set(h, DOWN, "dtype", "F64")), DOWN),
    "a longer shape": (_header(lambda h: _set(h, DOWN, "shape", [33, 64])), DOWN),
    "another shape of the same size": (_header(lambda h: _set(h, DOWN, "shape", [64, 32])), DOWN),
    "negative shape": (_header(lambda h: _set(h, DOWN, "shape", [-32, -64])), DOWN),
    "shape whose product wraps": (_header(lambda h: _set(h, DOWN, "shape", [1 << 33, 1 << 33])), DOWN),
    "shape of floats": (_header(lambda h: _set(h, DOWN, "shape", [32.0, 64.0])), DOWN),
    "shape true": (_header(lambda h: _set(h, DOWN, "shape", True)), DOWN),
    "offsets reversed": (_header(lambda h: h[DOWN]["data_offsets"].reverse()), DOWN),
    "offsets past the end": (_header(lambda h: _set(h, DOWN, "data_offsets", [1 << 30, (1 << 30) + 8192])), DOWN),
    "offsets 2^70": (_header(lambda h: _set(h, DOWN, "data_offsets", [1 << 70, (1 << 70) + 8192])), DOWN),
    "three offsets": (_header(lambda h: h[DOWN]["data_offsets"].append(0)), DOWN),
    "overlapping tensors": (_header(_swap_lengths), "overlaps"),
    "a gap": (_header(lambda h: h.pop(DOWN) and None), "gap"),
    "duplicate tensor": (_duplicate, "twice"),
    "metadata a list": (_header(lambda h: h.update({"__metadata__": []})), "__metadata__"),
    "bytes after the last tensor": (lambda d: d + bytes(4), "follow"),
    "a tensor of another family": (_header(lambda h: h.update({"model.x": h.pop(DOWN)})), "model.x"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_gives_an_error_that_names_it(name: str, folder: Path, tmp_path: Path) -> None:
    """Each fault is a `ModelFileError` with the file's name, soon, and without memory that only the header claims."""
    change, says = BAD[name]
    data = (folder / "model.safetensors").read_bytes()
    bad = _copy(folder, tmp_path / "bad", "model.safetensors", change(data))
    tracemalloc.start()
    begin = time.perf_counter()

    with pytest.raises(ModelFileError) as caught:
        _open(bad)

    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert says in str(caught.value)
    assert "bad" in str(caught.value) and len(str(caught.value)) < 600
    assert time.perf_counter() - begin < 5
    assert peak < 2 * len(data) + (1 << 20)


def _json(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    """Return a change of a JSON file."""

    def apply(data: bytes) -> bytes:
        value = json.loads(data)
        changed = change(value)
        return json.dumps(value if changed is None else changed).encode()

    return apply


SHARD = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"
BAD_FOLDERS: dict[str, tuple[str, Callable[[bytes], bytes | None], str]] = {
    "no configuration": ("config.json", lambda d: None, "config.json: cannot be opened"),
    "configuration not JSON": ("config.json", lambda d: d[:-1], "not JSON"),
    "configuration a bomb": ("config.json", lambda d: b'{"a":' * 100_000, "nests"),
    "no index": (INDEX, lambda d: None, "holds neither"),
    "index without a map": (INDEX, _json(lambda v: {"metadata": {}}), "weight_map"),
    "index a list": (INDEX, lambda d: b"[]", "no JSON object"),
    "missing shard": (SHARD, lambda d: None, SHARD + ": cannot be opened"),
    "cut shard": (SHARD, lambda d: d[:-1], "truncated"),
    "index names a missing tensor": (INDEX, _json(lambda v: v["weight_map"].update({"model.y": SHARD})), "model.y"),
    "index names another shard": (INDEX, _json(lambda v: v["weight_map"].update({DOWN: SHARD, FIRST: SHARD})), SHARD),
    "index leaves out a tensor": (INDEX, _json(lambda v: v["weight_map"].pop(DOWN) and None), DOWN),
    "index leaves the folder": (INDEX, _json(lambda v: v["weight_map"].update({DOWN: "../x.safetensors"})), "../x"),
    "index names a folder": (INDEX, _json(lambda v: v["weight_map"].update({DOWN: ".."})), "no name of a file"),
    "index maps to a number": (INDEX, _json(lambda v: v["weight_map"].update({DOWN: 1})), DOWN),
    "no tokenizer": ("tokenizer.json", lambda d: None, "tokenizer.json: cannot be opened"),
    "tokenizer without a model": ("tokenizer.json", _json(lambda v: v.pop("model") and None), "'model'"),
    "another kind of tokenizer": ("tokenizer.json", _json(lambda v: v["model"].update(type="Unigram")), "Unigram"),
    "no decoder": ("tokenizer.json", _json(lambda v: v.update(decoder=None)), "byte-level"),
    "token id a text": ("tokenizer.json", _json(lambda v: v["model"]["vocab"].update(a="1")), "'a'"),
    "token id 2^40": ("tokenizer.json", _json(lambda v: v["model"]["vocab"].update(a=1 << 40)), "'a'"),
    "added token without id": ("tokenizer.json", _json(lambda v: v["added_tokens"][0].update(id=None)), "added"),
    "merge of unknown parts": ("tokenizer.json", _json(lambda v: v["model"].update(merges=["zz yy"])), "corrupt"),
    "eos token unknown": ("tokenizer_config.json", _json(lambda v: v.update(eos_token="<none>")), "eos_token"),
    "template not a text": ("tokenizer_config.json", _json(lambda v: v.update(chat_template=5)), "chat_template"),
    "template with a fault": ("tokenizer_config.json", _json(lambda v: v.update(chat_template="{% if")), "compiled"),
}


@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_a_bad_folder_gives_an_error_that_names_the_file(name: str, sharded: Path, tmp_path: Path) -> None:
    """Missing and contradicting files are a `ModelFileError`."""
    file, change, says = BAD_FOLDERS[name]
    bad = _copy(sharded, tmp_path / "bad", file, change((sharded / file).read_bytes()))

    with pytest.raises(ModelFileError) as caught:
        _open(bad)

    assert says in str(caught.value)
    assert len(str(caught.value)) < 600


BAD_VALUES: list[tuple[str, Any, str]] = [
    ("model_type", "gpt2", "gpt2"),
    ("model_type", None, "model_type"),
    ("hidden_size", "32", "hidden_size"),
    ("hidden_size", 64, "shape"),
    ("num_attention_heads", 0, "num_attention_heads"),
    ("num_attention_heads", True, "num_attention_heads"),
    ("num_key_value_heads", 3, "evenly"),
    ("num_hidden_layers", 3, "too few"),
    ("num_hidden_layers", 1, "model.layers.1."),
    ("num_hidden_layers", 10**9, "num_hidden_layers"),
    ("head_dim", 16, "shape"),
    ("vocab_size", 300, "embed_tokens"),
    ("rms_norm_eps", float("nan"), "rms_norm_eps"),
    ("rms_norm_eps", float("inf"), "rms_norm_eps"),
    ("max_position_embeddings", 0, "max_position_embeddings"),
    ("hidden_act", "gelu", "gelu"),
    ("attention_bias", True, "attention_bias"),
    ("attention_bias", "no", "attention_bias"),
    ("use_sliding_window", True, "use_sliding_window"),
    ("layer_types", ["full_attention", "sliding_attention"], "layer_types"),
    ("quantization_config", {"bits": 4}, "quantization_config"),
    ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}, "yarn"),
    ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
    ("rope_scaling", {"type": "linear"}, "factor"),
    ("rope_scaling", 5, "rope_scaling"),
    ("partial_rotary_factor", 0.5, "partial_rotary_factor"),
    ("tie_word_embeddings", False, "lm_head.weight"),
    ("tie_word_embeddings", 1, "tie_word_embeddings"),
    ("eos_token_id", 264, "eos_token_id"),
    ("eos_token_id", [1, -1], "eos_token_id"),
    ("eos_token_id", {"a": 1}, "eos_token_id"),
]


@pytest.mark.parametrize(("key", "value", "says"), BAD_VALUES)
def test_a_configuration_that_is_not_supported_is_refused_by_name(
    key: str, value: Any, says: str, folder: Path, tmp_path: Path
) -> None:
    """Wrong types, wrong ranges, contradictions with the tensors, and features that this transformer lacks."""
    bad = _copy(folder, tmp_path / "bad", "config.json", json.dumps(CONFIG | {key: value}).encode())

    with pytest.raises(ModelFileError, match=r"bad") as caught:
        _open(bad)

    assert says in str(caught.value)


def test_old_and_new_spellings_of_the_rotary_embedding_mean_the_same(folder: Path, tmp_path: Path) -> None:
    """Since its version 5 transformers writes `rope_parameters`; before, two keys."""
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    old = CONFIG | {"rope_theta": 5e5, "rope_scaling": scaling}
    new = {k: v for k, v in CONFIG.items() if k != "rope_theta"} | {"rope_parameters": scaling | {"rope_theta": 5e5}}

    for name, config in (("old", old), ("new", new)):
        _copy(folder, tmp_path / name, "config.json", json.dumps(config).encode())
    with open_model(tmp_path / "old") as a, open_model(tmp_path / "new") as b:
        factors = a.tensor("rope_freqs.weight")
        assert a.config.rope_theta == b.config.rope_theta == 5e5
        assert factors.shape == (4,) and factors.raw == b.tensor("rope_freqs.weight").raw
        assert struct.unpack("<4f", factors.raw)[0] == 1.0
        assert struct.unpack("<4f", factors.raw)[-1] == 8.0


def test_end_ids_are_those_of_the_first_file_that_has_any(folder: Path, tmp_path: Path) -> None:
    """The generation configuration, the configuration, the tokenizer's end token: as transformers generates."""
    without = json.dumps({k: v for k, v in CONFIG.items() if k != "eos_token_id"}).encode()
    by_generation = _copy(folder, tmp_path / "a", "generation_config.json", b'{"eos_token_id": [3, 5]}')
    by_tokenizer = _copy(folder, tmp_path / "b", "config.json", without)

    for path, ids in ((by_generation, {3, 5}), (folder, {258}), (by_tokenizer, {258})):
        with open_model(path) as source:
            assert source.eos_ids == ids == source.text().eos_ids
    (by_tokenizer / "tokenizer_config.json").unlink()
    with open_model(by_tokenizer) as source:
        assert source.eos_ids == frozenset()


_JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture], "derandomize": True}


@pytest.mark.slow
@settings(max_examples=1500, **_QUIET)
@given(data=st.data())
def test_any_changed_byte_loads_or_gives_a_clear_error(data: st.DataObject, folder: Path, tmp_path: Path) -> None:
    """Bytes of the header, of its length, and the file's end: success or `ModelFileError`, nothing else."""
    raw = bytearray((folder / "model.safetensors").read_bytes())
    header = 8 + struct.unpack_from("<Q", raw)[0]
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "fuzz.safetensors"
    path.write_bytes(raw[: data.draw(st.sampled_from([len(raw), len(raw) - 1, header, header // 2]))])

    try:
        SafetensorsFile(path).close()
    except ModelFileError as error:
        assert "fuzz.safetensors" in str(error)


@pytest.mark.slow
@settings(max_examples=400, **_QUIET)
@given(data=st.data())
def test_any_json_in_place_of_a_value_loads_or_gives_a_clear_error(
    data: st.DataObject, sharded: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of configuration, index, tokenizer and tokenizer settings, at any depth."""
    name = data.draw(st.sampled_from(["config.json", INDEX, "tokenizer.json", "tokenizer_config.json"]))
    value = json.loads((sharded / name).read_bytes())
    at = changed = copy.deepcopy(value)
    while True:
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        inner = at[key]
        if isinstance(inner, (dict, list)) and inner and data.draw(st.booleans()):
            at = inner
            continue
        at[key] = data.draw(_JUNK)
        break
    bad = _copy(sharded, tmp_path_factory.mktemp("fuzz") / "f", name, json.dumps(changed).encode())

    try:
        _open(bad)
    except ModelFileError as error:
        assert len(str(error)) < 1000
