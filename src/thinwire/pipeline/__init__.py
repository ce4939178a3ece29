"""Pipelines: what stages send each other, compressed. `stage` has what trainings use; it imports PyTorch's pipelining,
which takes longer than all of thinwire, so nothing is imported here."""
