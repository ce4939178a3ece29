"""Stores for the messages m(ξ) of AQ-SGD: one record for each sample, in memory or on disk, or cluster centers; the
same on both sides."""

from thinwire.store.centers import CenterStore as CenterStore, CenterTable as CenterTable, center_bytes as center_bytes
from thinwire.store.crops import Corner as Corner, CroppedStore as CroppedStore
from thinwire.store.disk import DiskStore as DiskStore
from thinwire.store.memory import MemoryStore as MemoryStore
from thinwire.store.options import Centers as Centers, Crops as Crops, Disk as Disk, Memory as Memory, Place as Place
from thinwire.store.store import (
    LARGEST_SAMPLE as LARGEST_SAMPLE,
    Part as Part,
    RecordFormat as RecordFormat,
    Rows as Rows,
    Store as Store,
    StoreError as StoreError,
    check_precision as check_precision,
    store_bytes as store_bytes,
)
