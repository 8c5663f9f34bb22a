"""What a transformer of the llama family is made of, as read from a model file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from models.errors import ModelFileError
from models.gguf import GgufFile


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and flags of one model. `group` query heads share a KV head."""

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    ffn: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope_theta: float
    rope_scale: float  # linear: positions are divided by it
    rope_factors: bool  # the file has a `rope_freqs.weight` tensor (Llama 3)
    tied_embeddings: bool
    qkv_bias: bool

    @property
    def group(self) -> int:
        """How many query heads share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def kv_width(self) -> int:
        """Elements of one key (or value) line: kv_heads × head_dim."""
        return self.num_kv_heads * self.head_dim

    @classmethod
    def from_gguf(cls, file: GgufFile) -> ModelConfig:
        """Read the configuration from metadata and the tensor table.

        Raises:
            ModelFileError: a value is missing, of the wrong type or out of range, a tensor is missing or has another
                shape than the metadata says, or the architecture is not of the llama family.
        """
        meta = _Metadata(file)
        arch = meta.text("general.architecture")
        if arch != "llama":
            raise ModelFileError(file.path, f"architecture {arch!r} is not supported; 'llama' is")
        if meta.integer("llama.expert_count", 0, low=0):
            raise ModelFileError(file.path, "mixtures of experts are not supported (llama.expert_count)")
        scaling = meta.text("llama.rope.scaling.type", "none")
        if scaling not in ("none", "linear"):
            raise ModelFileError(file.path, f"rope scaling {scaling!r} is not supported (llama.rope.scaling.type)")
        num_heads = meta.integer("llama.attention.head_count")
        hidden = meta.integer("llama.embedding_length")
        head_dim = meta.integer("llama.attention.key_length", hidden // num_heads)
        tokens = file.metadata.get("tokenizer.ggml.tokens")
        vocab_size = meta.integer("llama.vocab_size", len(tokens) if isinstance(tokens, list) else None)
        config = cls(
            name=meta.text("general.name", file.path.stem),
            num_layers=meta.integer("llama.block_count", high=1000),
            num_heads=num_heads,
            num_kv_heads=meta.integer("llama.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            hidden=hidden,
            ffn=meta.integer("llama.feed_forward_length"),
            vocab_size=vocab_size,
            context_length=meta.integer("llama.context_length", low=32, high=1 << 20),
            norm_eps=meta.real("llama.attention.layer_norm_rms_epsilon"),
            rope_theta=meta.real("llama.rope.freq_base", 10000.0),
            rope_scale=meta.real("llama.rope.scaling.factor", 1.0) if scaling == "linear" else 1.0,
            rope_factors="rope_freqs.weight" in file.tensors,
            tied_embeddings="output.weight" not in file.tensors,
            qkv_bias="blk.0.attn_q.bias" in file.tensors,
        )
        if config.num_heads % config.num_kv_heads:
            raise ModelFileError(file.path, f"{num_heads} heads do not share {config.num_kv_heads} KV heads evenly")
        if meta.integer("llama.rope.dimension_count", head_dim) != head_dim or head_dim % 2:
            raise ModelFileError(file.path, "rotary embedding of a part of each head is not supported")
        for name, shape in config.tensor_shapes().items():
            if name not in file.tensors:
                raise ModelFileError(file.path, f"tensor {name!r} is missing")
            if file.tensors[name].shape != shape:
                raise ModelFileError(
                    file.path, f"tensor {name!r} has the shape {file.tensors[name].shape}; the metadata says {shape}"
                )
        return config

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor that the model needs, in torch's order."""
        q_width = self.num_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "token_embd.weight": (self.vocab_size, self.hidden),
            "output_norm.weight": (self.hidden,),
        }
        if not self.tied_embeddings:
            shapes["output.weight"] = (self.vocab_size, self.hidden)
        if self.rope_factors:
            shapes["rope_freqs.weight"] = (self.head_dim // 2,)
        for layer in range(self.num_layers):
            part = {
                "attn_norm.weight": (self.hidden,),
                "attn_q.weight": (q_width, self.hidden),
                "attn_k.weight": (self.kv_width, self.hidden),
                "attn_v.weight": (self.kv_width, self.hidden),
                "attn_output.weight": (self.hidden, q_width),
                "ffn_norm.weight": (self.hidden,),
                "ffn_gate.weight": (self.ffn, self.hidden),
                "ffn_up.weight": (self.ffn, self.hidden),
                "ffn_down.weight": (self.hidden, self.ffn),
            }
            if self.qkv_bias:
                part |= {
                    "attn_q.bias": (q_width,),
                    "attn_k.bias": (self.kv_width,),
                    "attn_v.bias": (self.kv_width,),
                }
            shapes |= {f"blk.{layer}.{name}": shape for name, shape in part.items()}
        return shapes


class _Metadata:
    """Typed look-ups that name the key when something is wrong."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file

    def _get(self, key: str, default: Any) -> Any:
        value = self.file.metadata.get(key, default)
        if value is None:
            raise ModelFileError(self.file.path, f"metadata {key!r} is missing")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise ModelFileError(self.file.path, f"metadata {key!r} is {value!r}, not a text")
        return value

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = 1 << 31) -> int:
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ModelFileError(
                self.file.path, f"metadata {key!r} is {value!r:.80}, not an integer in [{low}, {high}]"
            )
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e30:
            raise ModelFileError(self.file.path, f"metadata {key!r} is {value!r:.80}, not a positive number")
        return float(value)
