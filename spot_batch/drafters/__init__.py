"""Drafters: what the target may commit next, guessed from its own stale distributions."""
