"""The mass outside the entries kept: what is more than rounding, and what rounding hides."""

from __future__ import annotations

import torch

from spot_batch.drafters.distributions import TOP_K, tail_mass


def kept(logits: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the entries kept, rounded as trajectories store them."""
    return logits.log_softmax(dim=-1).topk(TOP_K, dim=-1).values.half().float()


def test_a_flat_distribution_keeps_its_tail() -> None:
    flat = torch.zeros(1, 512)
    torch.testing.assert_close(
        tail_mass(kept(flat)), torch.tensor([1 - TOP_K / 512]), rtol=1e-2, atol=0.0
    )


def test_rounding_is_not_taken_for_a_tail() -> None:
    logits = torch.zeros(3, 512)
    logits[:, 0] = torch.tensor([16.0, 20.0, 30.0])
    log_prob = kept(logits)
    assert bool((tail_mass(log_prob) <= 512 * log_prob[:, -1].exp()).all())
    rounded = torch.full((1, TOP_K), -40.0)
    rounded[0, 0] = -5e-4  # a sure token whose sum with the rest misses 1
    assert float(tail_mass(rounded)) < 1e-14
