"""The command ``thinwire run``: a training script with compression, without a change to it."""
