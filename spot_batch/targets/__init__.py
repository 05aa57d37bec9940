"""Targets: a family is an adapter over transformers' own modules, with our attention and cache."""
