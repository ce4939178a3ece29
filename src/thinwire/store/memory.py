"""A message store in memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.store.errors import StoreError
from thinwire.store.record_store import RecordStore


class MemoryStore(RecordStore):
    """Keeps the records in memory. They are part of the state, so a checkpoint is as large as they are."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._records: dict[int, Tensor] = {}

    def checksum(self, sample: int) -> int:
        return kernels.checksum(self._records[sample])

    @property
    def num_bytes(self) -> int:
        return len(self._records) * self.form.record_bytes

    def state_dict(self) -> dict[str, Tensor]:
        records = [self._records[sample] for sample in self._entries]
        empty = torch.empty(0, self.form.record_bytes, dtype=torch.uint8, device="cpu")
        return {**super().state_dict(), "records": torch.stack(records) if records else empty}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        entries, records = self._load_entries(state), state.get("records")
        expected = (len(entries), self.form.record_bytes)
        if not isinstance(records, Tensor) or records.dtype != torch.uint8 or tuple(records.shape) != expected:
            shape = f"{tuple(records.shape)}" if isinstance(records, Tensor) else "none"
            raise StoreError(
                f"the state's records are {shape}, expected {expected}: it is of another model, precision or store"
            )
        self._entries = entries
        self._records = {sample: record.clone() for sample, record in zip(entries, records.cpu(), strict=True)}

    def _read(self, sample: int, out: Tensor) -> None:
        out.copy_(self._records[sample])

    def _write(self, sample: int, record: Tensor) -> None:
        mine = self._records.get(sample)
        if mine is None:
            # A copy: the record is a row of a micro-batch's, which all its rows would keep alive.
            self._records[sample] = record.clone()
        else:
            mine.copy_(record)

    def _drop(self, sample: int) -> None:
        del self._records[sample]

    def _is_whole(self, sample: int) -> bool:
        return True
