"""Examination of a training: is it bound by its communication, and what would help? Measures, predicts, advises."""
