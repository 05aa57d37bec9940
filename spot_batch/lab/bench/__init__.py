"""Benchmarks: commands that anyone can run, each figure with what it was measured against."""
