"""Models as Hugging Face folders: config.json, safetensors (in one file or in shards), tokenizer.json. Never torch.

Tensors are offered under the names that GGUF files use, so that the rest of the program knows one set of names.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.errors import ModelFileError
from models.fields import Fields, read_bytes, read_json
from models.gguf import TensorInfo
from models.hf_config import read_config
from models.safetensors_file import SafetensorsFile
from models.tensors import FLOAT_KINDS, TensorData

if TYPE_CHECKING:
    from models.text import ModelText

MAX_SHARDS = 1000

_GLOBAL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,3})\.(.+)\.(weight|bias)")
_IGNORED = re.compile(r"model\.layers\.[0-9]+\.self_attn\.rotary_emb\.inv_freq")  # computed; old files hold it
# All that changes the text side or the numbers; each is part of the fingerprint.
_SIDE_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
)  # fmt: skip


class HfFolder:
    """An open folder; a `ModelSource`."""

    def __init__(self, path: Path) -> None:
        """Open and check all files but the tokenizer's.

        Raises:
            ModelFileError: a file is missing or corrupt, or asks for something not supported; the message names it.
        """
        self.path = path
        self._files: list[SafetensorsFile] = []
        self._tensors: dict[str, tuple[SafetensorsFile, TensorInfo]] = {}
        try:
            values = read_json(path / "config.json")
            self._open_shards()
            self.config, self._factors = read_config(path / "config.json", values, "output.weight" in self._tensors)
            if self.config.tied_embeddings:
                self._tensors.pop("output.weight", None)  # some writers store the shared matrix twice
            self._check_tensors()
            self.eos_ids = self._eos_ids(values)
        except BaseException:
            self.close()
            raise

    @property
    def tensor_names(self) -> Collection[str]:
        """Names of all tensors, as GGUF files spell them."""
        computed = ["rope_freqs.weight"] if self._factors is not None else []
        return [*self._tensors, *computed]

    def tensor(self, name: str) -> TensorData:
        """Return one tensor's kind, raw bytes and shape; bytes are not copied.

        Raises:
            KeyError: there is none of this name.
        """
        if name == "rope_freqs.weight" and self._factors is not None:
            return TensorData("F32", memoryview(self._factors.tobytes()), (len(self._factors),))
        file, info = self._tensors[name]
        return TensorData(info.kind, file.data(info), info.shape)

    def fingerprint(self) -> str:
        """Return 32 hexadecimal digits that name the contents; see `GgufFile.fingerprint` for what that means."""
        digest = hashlib.blake2b(digest_size=16)
        for name in _SIDE_FILES:
            file = self.path / name
            digest.update(read_bytes(file) if file.exists() else b"")
            digest.update(b"\0" + name.encode())
        for shard in self._files:
            shard.update(digest)
        return digest.hexdigest()

    def text(self) -> ModelText:
        """Read tokenizer and chat template.

        Raises:
            ModelFileError: they are missing, corrupt or of a kind that is not supported.
        """
        from models.hf_tokenizer import read_tokenizer  # engines do without the libraries that it needs

        return read_tokenizer(self.path, self.eos_ids)

    def close(self) -> None:
        """Close the files; their memory goes with the last view that `tensor` handed out."""
        for file in self._files:
            file.close()

    def __enter__(self) -> HfFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _open_shards(self) -> None:
        single, index = self.path / "model.safetensors", self.path / "model.safetensors.index.json"
        if single.exists() or not index.exists():
            if not single.exists():
                raise ModelFileError(self.path, "holds neither model.safetensors nor model.safetensors.index.json")
            self._add(single, None)
            return
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise ModelFileError(index, "corrupt: 'weight_map' is missing or no object")
        shards: dict[str, set[str]] = {}
        for name, file in places.items():
            if not isinstance(file, str) or not file or file != Path(file).name or file in (".", ".."):
                raise ModelFileError(index, f"corrupt: tensor {name!r:.120} lies in {file!r:.80}, no name of a file")
            shards.setdefault(file, set()).add(name)
        if len(shards) > MAX_SHARDS:
            raise ModelFileError(index, f"{len(shards)} shards are more than {MAX_SHARDS}")
        for file, names in sorted(shards.items()):
            self._add(self.path / file, names)

    def _add(self, path: Path, names: set[str] | None) -> None:
        """Take the tensors of a file, of a shard only those that the index says lie in it."""
        file = SafetensorsFile(path)
        self._files.append(file)
        for name in sorted((names or set()) - file.tensors.keys()):
            raise ModelFileError(path, f"tensor {name!r:.120} is missing; the index says that it is here")
        for name, info in file.tensors.items():
            if (names is None or name in names) and not _IGNORED.fullmatch(name):
                ours = _gguf_name(name)
                if ours is None:
                    raise ModelFileError(path, f"tensor {name!r:.120} is not one that the supported families use")
                self._tensors[ours] = file, info

    def _check_tensors(self) -> None:
        shapes = {name: info.shape for name, (_, info) in self._tensors.items()}
        if self._factors is not None:
            shapes["rope_freqs.weight"] = (len(self._factors),)
        self.config.check(self.path, shapes, _hf_name)
        for file, info in self._tensors.values():
            if info.kind not in FLOAT_KINDS:
                known = ", ".join(sorted(FLOAT_KINDS))
                raise ModelFileError(
                    file.path, f"tensor {info.name!r:.120} has type {info.kind}; {known} are supported"
                )

    def _eos_ids(self, values: dict[str, Any]) -> frozenset[int]:
        """Return the ids that end a text: generation_config.json's, else config.json's, else the tokenizer's."""
        path, found = self.path / "generation_config.json", None
        if path.exists():
            found = read_json(path).get("eos_token_id")
        if found is None:
            path, found = self.path / "config.json", values.get("eos_token_id")
        if found is None:
            path, found = self.path / "tokenizer.json", self._tokenizer_eos()
        ids = found if isinstance(found, list) else [found] if found is not None else []
        last = self.config.vocab_size - 1
        return frozenset(
            Fields(path, {"eos_token_id": one}, "key").integer("eos_token_id", low=0, high=last) for one in ids[:100]
        )

    def _tokenizer_eos(self) -> Any:
        """Return the id of the added token that tokenizer_config.json calls `eos_token`; None where there is none."""
        settings, path = self.path / "tokenizer_config.json", self.path / "tokenizer.json"
        if not settings.exists() or not path.exists():
            return None
        named = read_json(settings).get("eos_token")
        text = named.get("content") if isinstance(named, dict) else named
        added = read_json(path).get("added_tokens")
        tokens = [t for t in added if isinstance(t, dict)] if isinstance(added, list) else []
        return next((t.get("id") for t in tokens if text is not None and t.get("content") == text), None)


def _gguf_name(name: str) -> str | None:
    """Return the name under which GGUF files hold a tensor, or None for one of another family."""
    if name in _GLOBAL:
        return _GLOBAL[name]
    match = _LAYER.fullmatch(name)
    part = _IN_LAYER.get(match[2]) if match else None
    return f"blk.{match[1]}.{part}.{match[3]}" if match and part else None


def _hf_name(name: str) -> str:
    """Return what Hugging Face folders call a tensor, for messages."""
    theirs = next((t for t, ours in _GLOBAL.items() if ours == name), None)
    if theirs is not None or not name.startswith("blk."):
        return theirs or name
    _, layer, part, kind = name.split(".")
    inner = next(t for t, ours in _IN_LAYER.items() if ours == part)
    return f"model.layers.{layer}.{inner}.{kind}"
