"""Exact decoding: one transition, drafted states verified by equality, one engine over samples."""

from spot_batch.decoding.engine import Engine, EngineSettings
from spot_batch.decoding.latency import LatencyTable, measure_latency

__all__ = ["Engine", "EngineSettings", "LatencyTable", "measure_latency"]
