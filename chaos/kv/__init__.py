"""Chaos for the KV store: its tiers, index and transfers hurt in this process, then in a running instance.

`python -m chaos.kv`. These campaigns import `kvstore` itself: what they hurt are its files, pools and ledgers.
"""
