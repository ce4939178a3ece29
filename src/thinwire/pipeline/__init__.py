"""Compressed activations between ranks: `stage` for pipelines, `tensor_parallel` for tensor parallelism. Both import
modules that take longer than all of thinwire, so nothing is imported here."""
