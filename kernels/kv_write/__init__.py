"""Scatter of new keys and values into the pool.

`kv_write(lines, slots, kv)`: the pool seen as lines `[num_lines, kv_heads · head_dim]`; kv `[tokens, 2, kv_heads ·
head_dim]` (key, value); slots `[tokens, 2]` int64 names the line of each. Slots are distinct; other lines stay as they
are. With block-major layout `[num_blocks, layers, 2, 16, kv_heads, head_dim]` the line of (block, layer, kv, offset) is
`((block · layers + layer) · 2 + kv) · 16 + offset`.
"""
