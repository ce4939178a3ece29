"""Experiments: the papers repeated, and the benchmarks that validate thinwire. Run from a clone; never installed."""
