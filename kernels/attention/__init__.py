"""Attention of query rows over paged keys and values, the same bits for a position however it is computed.

The result of the library's kernel for one query row depends on the shape of the call: on the number of query rows (one
to three rows take another matrix kernel than six and more) and on the length of the keys, masked or not. So shapes are
a function of the row's absolute position alone:

* positions are cut into tiles `[j·T, (j+1)·T)`; T is `tile_rows(group)`, a multiple of the block size;
* a query row sees keys `[0, (j+1)·T)` of its tile, the later ones masked; lines that hold no token yet count as zeros
  (a masked NaN left in a reused block would spoil the sum otherwise);
* `tile_attention` computes whole tiles (`T · group` query rows per KV head, where `group` query heads share it);
* `row_attention` computes single rows of many sequences whose tiles end alike, each row standing `repeat` times so that
  the matrix kernel is the one that tiles get; `models/exactness.py` finds the smallest that gives a tile's bits.

Layouts: q `[.., kv_heads, rows · group, head_dim]`; k, v `[.., length, kv_heads, head_dim]` as gathered from the pool;
masks additive, 0 or -inf, in the type of q. Scale is `head_dim ** -0.5`.
"""
