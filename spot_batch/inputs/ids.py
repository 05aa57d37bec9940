"""Sample ids and the addresses of their noise: pure functions of the spec and the row."""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Container


def noise_key(seed: int, custom_id: str, sample_index: int) -> int:
    """The 64-bit address of a sample's noise: what made it or when plays no part."""
    assert 0 <= seed < 2**64, f"want a seed of 64 bits, got {seed}"
    head = seed.to_bytes(8, "little") + sample_index.to_bytes(8, "little")
    digest = hashlib.blake2b(head + custom_id.encode(), digest_size=8, person=b"spot-noise")
    return int.from_bytes(digest.digest(), "little")


def drawn_sample_ids(num_samples: int, *, count: int, fingerprint: str) -> frozenset[int]:
    """`count` samples drawn by hash, the same at every run of a job; all where there are fewer."""
    if num_samples <= count:
        return frozenset(range(num_samples))
    key, drawn, number = fingerprint.encode()[:64], set[int](), 0
    while len(drawn) < count:
        data = number.to_bytes(8, "little")
        digest = hashlib.blake2b(data, digest_size=8, key=key, person=b"spot-drawn").digest()
        drawn.add(int.from_bytes(digest, "little") % num_samples)
        number += 1
    return frozenset(drawn)


def audit_sample_ids(
    num_samples: int,
    *,
    fraction: float,
    min_rows: int,
    fingerprint: str,
    passed_over: Container[int] = (),
) -> tuple[int, ...]:
    """The samples to decode again draft-free, chosen by hash: nothing that ran can sway it.

    Where one cannot be compared (`passed_over`), the next by hash takes its place.
    """
    count = min(num_samples, max(min_rows, math.ceil(num_samples * fraction)))
    if count == 0 or fraction == 0.0:
        return ()
    key = fingerprint.encode()[:64]

    def drawn(sample_id: int) -> bytes:
        data = sample_id.to_bytes(8, "little")
        return hashlib.blake2b(data, digest_size=8, key=key, person=b"spot-audit").digest()

    eligible = (each for each in range(num_samples) if each not in passed_over)
    return tuple(sorted(heapq.nsmallest(count, eligible, key=drawn)))
