"""Caches of keys and values. The model knows none of them: it calls `kv.attend` (Law 4)."""

from outrider.kv.base import Entry, KVCache, Plan
from outrider.kv.dense import DenseKV

__all__ = ["DenseKV", "Entry", "KVCache", "Plan"]
