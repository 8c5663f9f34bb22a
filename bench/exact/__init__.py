"""Whether the fast path is right: how far from fp32, and whether anything around a request changes its text."""
