"""Stores for the messages m(ξ) of AQ-SGD: one record for each sample, in memory or on disk, or cluster centres; the
same on both sides."""

from thinwire.store.background import Background
from thinwire.store.centres import CentreStore, CentreTable, centre_bytes
from thinwire.store.crops import Corner, CroppedStore
from thinwire.store.disk import DiskStore
from thinwire.store.errors import StoreError
from thinwire.store.memory import MemoryStore
from thinwire.store.options import Centres, Crops, Disk, Memory, Place
from thinwire.store.record_store import Entry, Evict, RecordStore
from thinwire.store.records import Half, Part, RecordFormat, Rows, check_precision, store_bytes
from thinwire.store.store import LARGEST_SAMPLE, Store, StoreCounts

__all__ = [
    "LARGEST_SAMPLE",
    "Background",
    "CentreStore",
    "CentreTable",
    "Centres",
    "Corner",
    "CroppedStore",
    "Crops",
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
    "RecordStore",
    "Rows",
    "Store",
    "StoreCounts",
    "StoreError",
    "centre_bytes",
    "check_precision",
    "store_bytes",
]
