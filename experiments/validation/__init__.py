"""Faults, damaged messages and other suites that validate thinwire, each a command of its own."""
