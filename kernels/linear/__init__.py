"""Matrix product with a weight.

`linear(x, weight, min_rows)`: x `[rows, in]`, weight `[out, in]`, one type → `x · weightᵀ` `[rows, out]`.
Contract: a row's result has the same bits whatever rows stand beside it and however many there are. Libraries keep that
only above some number of rows (below it they pick another kernel), so fewer rows are padded with zeros to `min_rows`;
`models/exactness.py` finds the number for the machine at hand.
"""
