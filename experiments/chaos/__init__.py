"""Faults on purpose: which error every surviving rank of a training gets, and when."""
