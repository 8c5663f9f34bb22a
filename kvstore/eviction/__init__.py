"""Which stored block goes first: pure policies over keys, all under one contract.

`LruPolicy`, `S3FifoPolicy` and `ArcPolicy` differ in what they remember of keys that are gone, and so in whether one
pass over keys that nobody asks for again (a scan) pushes out those that are asked for often.
"""

from kvstore.eviction.arc import ArcPolicy
from kvstore.eviction.lru import LruPolicy
from kvstore.eviction.policy import EvictionPolicy
from kvstore.eviction.s3fifo import S3FifoPolicy

__all__ = ["ArcPolicy", "EvictionPolicy", "LruPolicy", "S3FifoPolicy"]
