"""Attachments to PyTorch, with one file for each thing that PyTorch lets a library attach to."""
