"""Damaged messages, very many of them."""
