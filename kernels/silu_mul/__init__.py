"""The gate of a feed-forward layer.

`silu_mul(x)`: x `[rows, 2 · ffn]`, gate then up → `silu(gate) · up` as `[rows, ffn]` in the type of x. silu is computed
in float32 and rounded to the type of x before the product. Elementwise: a row's result depends on that row alone.
"""
