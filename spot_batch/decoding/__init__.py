"""Exact decoding: one transition, drafted states verified by equality, one engine over samples."""

from spot_batch.decoding.engine import AUTO_BUDGET, Engine, EngineSettings

__all__ = ["AUTO_BUDGET", "Engine", "EngineSettings"]
