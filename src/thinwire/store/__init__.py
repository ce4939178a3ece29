"""Stores for the messages m(ξ) of AQ-SGD: one record for each sample, in memory or on disk, the same on both sides."""

from thinwire.store.background import Background
from thinwire.store.disk import DiskStore
from thinwire.store.errors import StoreError
from thinwire.store.memory import MemoryStore
from thinwire.store.options import Disk, Memory, Place
from thinwire.store.records import Half, Part, RecordFormat, Rows, check_precision, store_bytes
from thinwire.store.store import LARGEST_SAMPLE, Entry, Evict, Store, StoreCounts

__all__ = [
    "LARGEST_SAMPLE",
    "Background",
    "Disk",
    "DiskStore",
    "Entry",
    "Evict",
    "Half",
    "Memory",
    "MemoryStore",
    "Part",
    "Place",
    "RecordFormat",
    "Rows",
    "Store",
    "StoreCounts",
    "StoreError",
    "check_precision",
    "store_bytes",
]
