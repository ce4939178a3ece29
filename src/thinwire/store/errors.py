"""Errors of message stores."""


class StoreError(RuntimeError):
    """A message store is of another run or shape, full or damaged, or has no room for a sample."""
