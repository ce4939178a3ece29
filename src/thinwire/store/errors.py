"""What can be wrong with a message store."""


class StoreError(RuntimeError):
    """A message store cannot be what it should: of another run or shape, full, damaged, or asked for a sample that it
    cannot know."""
