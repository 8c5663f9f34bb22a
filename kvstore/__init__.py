"""The KV store: blocks and their hashes, pools, the hand-off between pools, tiers and their index. Synchronous."""
