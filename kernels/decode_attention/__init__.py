"""Attention of single rows, one per sequence, over paged keys and values.

`decode_attention(q, pool, tables, lengths)` → the shape and type of q:

* q `[rows, heads, head_dim]`; pool and tables as in `kernels.prefill_attention`.
* lengths `[rows]`, integers on the host, at least 1: the row stands at position `lengths[r] - 1` and sees keys
  `[0, lengths[r])`, its own included.

The keys may be split among several workers, but only at fixed absolute positions, and the parts are merged in order:
then a row's bits depend neither on its neighbours nor on the number of workers, and are those that
`prefill_attention` of the same implementation gives.
"""
