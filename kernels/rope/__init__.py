"""Rotary position embedding.

`rope(x, turns, pairing)`: x `[tokens, heads, head_dim]`, turns `[tokens, 1, head_dim / 2]` complex64
(`exp(i · pos · freq)`) → the same shape and type as x, computed in float32. Pair i is elements (2i, 2i+1)
("interleaved": GGUF files of the llama family store query and key weights permuted for this) or (i, i + head_dim / 2)
("halves": all other files). A token's result depends on that token alone.
"""
