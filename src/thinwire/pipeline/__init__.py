"""Activations that ranks send each other, compressed. `stage` has what pipelines use, `tensor_parallel` what tensor
parallelism does; both import what takes longer than all of thinwire, so nothing is imported here."""
