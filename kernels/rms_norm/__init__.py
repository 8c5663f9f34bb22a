"""RMS normalization of rows, with the residual sum before it.

`rms_norm(x, weight, eps, dtype, add=None)`: x `[rows, hidden]` float32, weight `[hidden]` float32 → `[rows, hidden]` in
`dtype`: `x / sqrt(mean(x²) + eps) · weight`, computed in float32.

With `add` `[rows, hidden]` (any float type) x is the residual stream: `x += add` happens first, in place and in
float32, and the result is the norm of the sum. A row's result depends on that row alone.
"""
