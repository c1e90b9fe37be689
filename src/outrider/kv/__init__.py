"""Caches of keys and values. The model knows none of them: it calls `kv.attend` (Law 4)."""

from outrider.kv.base import Entry, KVCache, Plan
from outrider.kv.dense import DenseKV
from outrider.kv.offload import OffloadKV
from outrider.kv.paged import PagedKV
from outrider.kv.views import QuantizedView, View, parse

__all__ = ["DenseKV", "Entry", "KVCache", "OffloadKV", "PagedKV", "Plan", "QuantizedView", "View", "parse"]
