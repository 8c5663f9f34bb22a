"""RMS normalization of rows.

`rms_norm(x, weight, eps, dtype)`: x `[rows, hidden]` float32, weight `[hidden]` float32 → `[rows, hidden]` in `dtype`:
`x / sqrt(mean(x²) + eps) · weight`, computed in float32. A row's result depends on that row alone.
"""
