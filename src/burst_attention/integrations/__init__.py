"""Attention of other libraries' models on a ring."""
