"""How far the numbers of a spec may go; rows that override them are held to the same."""

from __future__ import annotations

LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-4, 1e4  # beyond, float32 logits over it mean nothing
LEAST_TOP_P, MOST_TOP_K = 1e-6, 2**31 - 1
MOST_COMMIT_STEP = 2**15 - 1  # it is 16 bits wide in data/; a step beyond is written as this one
MAX_NEW_TOKENS = MOST_COMMIT_STEP + 1


def checked_temperature(value: float) -> float:
    """0, or what float32 logits can be divided by; ValueError for anything else."""
    if value == 0.0 or LEAST_TEMPERATURE <= value <= MOST_TEMPERATURE:
        return value
    raise ValueError(
        f"must be 0 or from {LEAST_TEMPERATURE:g} to {MOST_TEMPERATURE:g}, got {value:g}"
    )


def checked_top_p(value: float) -> float:
    """A share that leaves at least one candidate; ValueError for anything else."""
    if LEAST_TOP_P <= value <= 1.0:
        return value
    raise ValueError(f"must be from {LEAST_TOP_P:g} to 1, got {value:g}")
