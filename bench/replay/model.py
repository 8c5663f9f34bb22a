"""The deployment that a replay assumes, from its published shape: what prefill costs and how large KV is."""

from __future__ import annotations

from dataclasses import dataclass

from actors.ttft import Costs, LoadCost, PrefillCost


@dataclass(frozen=True, slots=True)
class Deployment:
    """A dense transformer with grouped keys and values on a group of GPUs; by default Llama 2 70B on eight A100.

    The arithmetic is 2 operations per parameter and token, and 2 · hidden · layers per pair of tokens that attend to
    each other (two products, half of the square is masked), at `efficiency` of the peak.
    """

    parameters: float = 70e9
    layers: int = 80
    hidden: int = 8192
    kv_heads: int = 8
    head_dim: int = 128
    kv_nbytes: int = 2
    gpus: int = 8
    peak_flops: float = 312e12  # bf16, dense, per GPU
    efficiency: float = 0.5
    fixed_s: float = 0.02

    @property
    def bytes_per_token(self) -> int:
        """KV of one token, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_nbytes

    def prefill(self) -> PrefillCost:
        """Return a + b·T + c·T²."""
        flops = self.gpus * self.peak_flops * self.efficiency
        return PrefillCost(self.fixed_s, 2 * self.parameters / flops, 2 * self.hidden * self.layers / flops)

    def costs(self, load_bytes_per_s: float, copy_bytes_per_s: float) -> Costs:
        """Return all costs, with loads and copies at the given rates."""
        return Costs(
            self.prefill(),
            LoadCost(self.bytes_per_token, load_bytes_per_s),
            LoadCost(self.bytes_per_token, copy_bytes_per_s),
        )

    def describe(self) -> str:
        """Return one line that states the model."""
        cost = self.prefill()
        return (
            f"{self.parameters / 1e9:.0f}B parameters, {self.layers} layers of {self.hidden}, on {self.gpus} GPUs of "
            f"{self.peak_flops / 1e12:.0f} TFLOPS at {self.efficiency:.0%}: prefill of T tokens takes "
            f"{cost.fixed_s:.3f} s + {cost.per_token_s:.3e}·T + {cost.per_square_s:.3e}·T² s; "
            f"KV {self.bytes_per_token:,} bytes per token"
        )
