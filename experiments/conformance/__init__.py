"""PyTorch's own tests of its process groups, on the backend ``thinwire``."""
