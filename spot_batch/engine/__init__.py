"""Exact decoding: one transition, drafted states verified by equality, one engine over samples."""
