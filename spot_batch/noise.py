"""Addressed Gumbel noise: a value is a function of its address, never of a stream.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) in integer
tensor arithmetic, so that one address has one value on every device, in every batch and at every
retry. Counter words are (token // 4, absolute position, step, stream); the lane is token % 4; the
key is the sample's own 64 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

NO_STEP = 0xFFFFFFFF
"""The step word of `position` noise, which does not depend on the commits so far."""

# A uniform is (r + 0.5) / 2^32, so every value of the noise lies within these two.
GUMBEL_MAX = 22.88
"""An upper bound of the noise: -log(-log1p(-u)) is largest at the smallest u, 2^-33."""

_LOW = 0xFFFFFFFF
_MUL_A, _MUL_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_TOKEN_STREAM = 0

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four counter and two key words (int64 holding 32 bits, broadcastable) -> four words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # 64-bit products wrap in int64; the shift is arithmetic, the mask takes the sign bits away.
        product_a, product_b = c0 * _MUL_A, c2 * _MUL_B
        c0, c1, c2, c3 = (
            ((product_b >> 32) & _LOW) ^ c1 ^ k0,
            product_b & _LOW,
            ((product_a >> 32) & _LOW) ^ c3 ^ k1,
            product_a & _LOW,
        )
        k0, k1 = (k0 + _KEY_A) & _LOW, (k1 + _KEY_B) & _LOW
    return c0, c1, c2, c3


def gumbel_from_bits(bits: Tensor) -> Tensor:
    """32 random bits (int64) -> standard Gumbel noise, float32.

    E = -log1p(-u) is a standard exponential whose small values, which win an argmax, are finely
    resolved. float64 throughout and one rounding at the end, so that last-bit differences between
    log implementations do not show.
    """
    uniform = (bits.double() + 0.5) * 2.0**-32
    return uniform.neg_().log1p_().neg_().log_().neg_().float()


def gumbel(key: Tensor, *, position: Tensor, step: Tensor, token: Tensor) -> Tensor:
    """Noise at addresses: int64 tensors that broadcast together -> float32 of their common shape.

    `key` holds 64 bits a sample, `position` is absolute, `step` counts the commits so far in the
    block (`NO_STEP` for noise that ignores them).
    """
    key, position, step, token = torch.broadcast_tensors(key, position, step, token)
    words = philox4x32(
        (token >> 2, position, step, torch.full_like(token, _TOKEN_STREAM)),
        (key & _LOW, (key >> 32) & _LOW),
    )
    lane = token & 3
    bits = torch.where(
        lane < 2,
        torch.where(lane == 0, words[0], words[1]),
        torch.where(lane == 2, words[2], words[3]),
    )
    return gumbel_from_bits(bits.contiguous())


def gumbel_rows(key: Tensor, *, position: Tensor, step: Tensor, vocab_size: int) -> Tensor:
    """Noise of whole vocabulary rows: three (n,) addresses -> (n, vocab_size) float32.

    The same values as `gumbel` gives, at a quarter of its work: one Philox call makes four tokens.
    """
    num_groups = (vocab_size + 3) // 4
    group = torch.arange(num_groups, device=key.device).expand(len(key), num_groups)
    words = philox4x32(
        (group, position[:, None], step[:, None], torch.full_like(group, _TOKEN_STREAM)),
        ((key & _LOW)[:, None], ((key >> 32) & _LOW)[:, None]),
    )
    return gumbel_from_bits(torch.stack(words, dim=2).flatten(1)[:, :vocab_size].contiguous())
