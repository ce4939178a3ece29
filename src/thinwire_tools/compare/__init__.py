"""Paired training runs with the same start, the same batches, and another compressor; and their comparison."""
