"""What a transformer of the llama family is made of, as read from a model file. Never imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from models.errors import ModelFileError
from models.fields import Fields
from models.gguf import GgufFile

FAMILIES = ("llama", "qwen2", "qwen3")
MAX_CONTEXT = 1 << 20

RopePairing = Literal["interleaved", "halves"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and flags of one model. `group` query heads share a KV head."""

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # need not be hidden / num_heads
    hidden: int
    ffn: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope_theta: float
    rope_scale: float  # linear: positions are divided by it
    rope_factors: bool  # there is a `rope_freqs.weight` tensor (Llama 3): divisors of the frequencies
    rope_pairing: RopePairing  # which elements of a head turn together: (2i, 2i+1) or (i, i + head_dim / 2)
    tied_embeddings: bool
    qkv_bias: bool  # Qwen2
    qk_norm: bool  # Qwen3: each head of q and k is RMS-normalized before it is turned

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
        meta = Fields(file.path, file.metadata, "metadata")
        arch = meta.text("general.architecture")
        if arch not in FAMILIES:
            raise ModelFileError(file.path, f"architecture {arch!r:.80} is not supported; {', '.join(FAMILIES)} are")
        if meta.integer(f"{arch}.expert_count", 0, low=0):
            raise ModelFileError(file.path, f"mixtures of experts are not supported ({arch}.expert_count)")
        scaling = meta.text(f"{arch}.rope.scaling.type", "none")
        if scaling not in ("none", "linear"):
            raise ModelFileError(file.path, f"rope scaling {scaling!r:.80} is not supported ({arch}.rope.scaling.type)")
        num_heads = meta.integer(f"{arch}.attention.head_count")
        hidden = meta.integer(f"{arch}.embedding_length")
        head_dim = meta.integer(f"{arch}.attention.key_length", hidden // num_heads)
        tokens = file.metadata.get("tokenizer.ggml.tokens")
        vocab_size = meta.integer(f"{arch}.vocab_size", len(tokens) if isinstance(tokens, list) else None)
        config = cls(
            name=meta.text("general.name", file.path.stem),
            num_layers=meta.integer(f"{arch}.block_count", high=1000),
            num_heads=num_heads,
            num_kv_heads=meta.integer(f"{arch}.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            hidden=hidden,
            ffn=meta.integer(f"{arch}.feed_forward_length"),
            vocab_size=vocab_size,
            context_length=meta.integer(f"{arch}.context_length", low=32, high=MAX_CONTEXT),
            norm_eps=meta.real(f"{arch}.attention.layer_norm_rms_epsilon"),
            rope_theta=meta.real(f"{arch}.rope.freq_base", 10000.0),
            rope_scale=meta.real(f"{arch}.rope.scaling.factor", 1.0) if scaling == "linear" else 1.0,
            rope_factors="rope_freqs.weight" in file.tensors,
            # Converters permute the rows of llama's query and key weights for this pairing, and of no other family's.
            rope_pairing="interleaved" if arch == "llama" else "halves",
            tied_embeddings="output.weight" not in file.tensors,
            qkv_bias=arch == "qwen2" or "blk.0.attn_q.bias" in file.tensors,
            qk_norm=arch == "qwen3",
        )
        value_dim = meta.integer(f"{arch}.attention.value_length", head_dim)
        if meta.integer(f"{arch}.rope.dimension_count", head_dim) != head_dim:
            raise ModelFileError(file.path, "rotary embedding of a part of each head is not supported")
        if value_dim != head_dim:
            raise ModelFileError(file.path, f"heads of {head_dim} keys and {value_dim} values are not supported")
        config.check(file.path, {name: tensor.shape for name, tensor in file.tensors.items()})
        return config

    def check(
        self, path: Path, shapes: Mapping[str, tuple[int, ...]], spelled: Callable[[str], str] = lambda name: name
    ) -> None:
        """Compare with the shapes of a file's tensors.

        Args:
            path: the file, for messages.
            shapes: by our names.
            spelled: gives the file's own name of a tensor, for messages.

        Raises:
            ModelFileError: heads do not divide evenly; a tensor is missing, has another shape, or is one that this
                family does not use, so that leaving it out would give wrong results.
        """
        if self.num_heads % self.num_kv_heads:
            raise ModelFileError(path, f"{self.num_heads} heads do not share {self.num_kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise ModelFileError(path, f"rotary embedding of heads of {self.head_dim} elements is not supported")
        if len(shapes) < 9 * self.num_layers:  # before a table of a thousand layers is made for nothing
            raise ModelFileError(path, f"{len(shapes)} tensors are too few for {self.num_layers} layers")
        wanted = self.tensor_shapes()
        for name, shape in wanted.items():
            if name not in shapes:
                raise ModelFileError(path, f"tensor {spelled(name)!r} is missing")
            if shapes[name] != shape:
                raise ModelFileError(
                    path, f"tensor {spelled(name)!r} has the shape {shapes[name]}; the configuration says {shape}"
                )
        for name in shapes.keys() - wanted.keys():
            if name.startswith("blk.") or name.endswith(".bias"):
                raise ModelFileError(path, f"tensor {spelled(name)!r:.120} is not one that this architecture uses")

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
        part: dict[str, tuple[int, ...]] = {
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
            part |= {"attn_q.bias": (q_width,), "attn_k.bias": (self.kv_width,), "attn_v.bias": (self.kv_width,)}
        if self.qk_norm:
            part |= {"attn_q_norm.weight": (self.head_dim,), "attn_k_norm.weight": (self.head_dim,)}
        for layer in range(self.num_layers):
            shapes |= {f"blk.{layer}.{name}": shape for name, shape in part.items()}
        return shapes
