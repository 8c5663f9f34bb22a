"""Rotary position embedding over interleaved pairs (2i, 2i+1).

`rope(x, turns)`: x `[tokens, heads, head_dim]`, turns `[tokens, 1, head_dim / 2]` complex64 (`exp(i · pos · freq)`)
→ the same shape and type as x, computed in float32. GGUF files of the llama family store query and key weights permuted
for exactly this pairing, so they are used as they lie in the file. A token's result depends on that token alone.
"""
