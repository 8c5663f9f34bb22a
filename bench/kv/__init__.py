"""What the KV store is worth and what it costs: first tokens from each tier, bytes per second, decode beside it."""
