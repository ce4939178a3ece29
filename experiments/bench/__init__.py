"""Benchmarks that validate thinwire itself, too long or too special for users."""
