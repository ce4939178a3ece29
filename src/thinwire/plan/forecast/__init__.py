"""Predictions of a training step's time from measured speeds."""
