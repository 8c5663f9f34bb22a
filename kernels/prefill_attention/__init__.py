"""Causal attention of runs of new tokens over paged keys and values, cached prefixes included.

`prefill_attention(q, pool, tables, begins, starts)` → the shape and type of q:

* q `[tokens, heads, head_dim]`: a ragged batch. Run r is the rows `[begins[r], begins[r + 1])`; its first row stands at
  absolute position `starts[r]` of its sequence. Positions before it are a cached prefix. Runs may be empty.
* pool `[num_blocks, 2, 16, kv_heads, head_dim]` in the type of q: keys and values of one layer, usually a view. Those
  of the runs themselves have been written before the call.
* tables `[runs, width]`, an integer type: blocks of positions from 0. Entries past a run's last block are not read.
* begins `[runs + 1]` and starts `[runs]`: integers on the host.

Row at position p sees keys `[0, p]`: `softmax(q · kᵀ / sqrt(head_dim)) · v`, in float32. Query head h reads KV head
`h // (heads / kv_heads)`. Lines that hold no token of the sequence are not used, whatever they hold.

A row's bits depend on its own sequence and position alone: not on the other runs, on the blocks' numbers, or on how the
prompt was cut into runs; and `decode_attention` of the same implementation gives the same row the same bits.
"""
