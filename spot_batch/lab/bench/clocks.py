"""Latency tables that decoding is timed by: of a device by formula, or as they were measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from spot_batch.engine.latency import BUCKETS, LatencyTable

_KEYS = (128, 1024, 4096)


@dataclass(frozen=True, kw_only=True, slots=True)
class Body:
    """The properties of a model and a device that decide the seconds of a forward."""

    num_parameters: float
    num_layers: int
    kv_width: int  # keys and values of a position in a layer, numbers
    query_width: int
    hidden_size: int
    vocab_size: int
    block_length: int = 32
    flops: float = 600e12  # bf16 products of an H200 as large matrices reach them
    bytes_per_s: float = 4.0e12
    launch_s: float = 0.4e-3
    wave_s: float = 0.35e-3

    def table(self) -> LatencyTable:
        """A forward takes its launch and its weights or products, whichever take longer, and the
        same of attention."""
        return LatencyTable(
            slots=BUCKETS,
            num_keys=_KEYS,
            forward_s=tuple(tuple(self._forward(n, keys) for n in BUCKETS) for keys in _KEYS),
            queries=(1, 1024),
            draft_s=(self.wave_s, self.wave_s + 1024 * 3e-6),
            states=(1, 1024),
            visit_s=(self._visit(1), self._visit(1024)),
            noisy_visit_s=(self._visit(1), self._visit(1024)),
        )

    def _forward(self, num_slots: int, num_keys: int) -> float:
        rows = num_slots * self.block_length
        linear = max(
            2 * self.num_parameters / self.bytes_per_s, 2 * self.num_parameters * rows / self.flops
        )
        read = 2 * num_slots * num_keys * self.kv_width / self.bytes_per_s
        products = 4 * rows * num_keys * self.query_width / self.flops
        return self.launch_s + linear + self.num_layers * max(read, products)

    def _visit(self, num_states: int) -> float:
        weights = 2 * self.vocab_size * self.hidden_size / self.bytes_per_s
        rows = num_states * self.block_length
        return 0.15e-3 + max(weights, 2 * self.vocab_size * self.hidden_size * rows / self.flops)


BODIES: Mapping[str, Body] = {
    "h200-1.7b": Body(
        num_parameters=1.4e9,
        num_layers=28,
        kv_width=2 * 8 * 128,
        query_width=16 * 128,
        hidden_size=2048,
        vocab_size=151_936,
    ),
    "h200-8b": Body(
        num_parameters=7.0e9,
        num_layers=36,
        kv_width=2 * 8 * 128,
        query_width=32 * 128,
        hidden_size=4096,
        vocab_size=151_936,
    ),
}
"""SDAR bodies on an H200, from G.1's formula: nothing here was measured on one."""


def clock_of(name: str) -> LatencyTable:
    """The table of a body by formula, or of a file of `bench latency`. Raises ValueError."""
    return BODIES[name].table() if name in BODIES else read_table(Path(name), known=BODIES)


def read_table(path: Path, *, known: Iterable[str] = ()) -> LatencyTable:
    """A file of `bench latency`. Raises ValueError naming it, and the `known` names."""
    try:
        return LatencyTable.from_json(path.read_text(encoding="utf-8"), f"{path}")
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join(known)
        what = f" is none of {names} and no file" if names else ": cannot be read"
        raise ValueError(f"{path}{what} ({error})") from error
