"""Paired training runs: the same start, the same batches, another compressor; and what their comparison shows."""
