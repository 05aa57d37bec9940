"""Addressed Gumbel noise: a value is a function of its address, never of a stream.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) in integer
tensor arithmetic, so that one address has one value on every device, in every batch and at every
retry. Counter words are (token // 4, absolute position, step, stream); the lane is token % 4; the
key is the sample's own 64 bits.

The rounds become one compiled kernel once they have cost what compiling costs. Integers are exact,
so that changes no bit; the logarithms behind them always run op by op, for theirs could change.
"""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

NO_STEP = 0xFFFFFFFF
"""The step word of `position` noise, which does not depend on the commits so far."""

# A uniform is (r + 0.5) / 2^32, so every value of the noise lies within these two.
GUMBEL_MAX = 22.88
"""An upper bound of the noise: -log(-log1p(-u)) is largest at the smallest u, 2^-33."""

_LOW = 0xFFFFFFFF
# The multipliers 0xD2511F53 and 0xCD9E8D57 less 2^32: products then fit into 64 bits with a sign.
_MUL_A, _MUL_B = 0xD2511F53 - (1 << 32), 0xCD9E8D57 - (1 << 32)
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_TOKEN_STREAM = 0

_WORTH_COMPILING = 1 << 28
"""Addresses after which the rounds are compiled: 15 s of a CPU core, about what compiling takes."""

_LEAST = 1 << 13
"""A call counts as so many addresses or more."""

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def at_once(device: torch.device) -> int:
    """How many Philox calls are made together: a few megabytes on CPU, enough work on a GPU."""
    return 1 << 16 if device.type == "cpu" else 1 << 22


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four counter and two key words (int64 holding 32 bits, of one shape) -> four words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_a, product_b = c0 * _MUL_A, c2 * _MUL_B
        # c * (m + 2^32): the upper word has another c in it, the lower one has not.
        upper_a, upper_b = product_a >> 32, product_b >> 32
        upper_a += c0
        upper_b += c2
        upper_a ^= c3
        upper_b ^= c1
        upper_a ^= k1
        upper_b ^= k0
        upper_a &= _LOW
        upper_b &= _LOW
        product_a &= _LOW
        product_b &= _LOW
        c0, c1, c2, c3 = upper_b, product_b, upper_a, product_a
        k0, k1 = k0 + _KEY_A, k1 + _KEY_B  # what goes beyond 32 bits is masked with the rest
    return c0, c1, c2, c3


def words_at(address: Tensor) -> Tensor:
    """(5, N) int64 [token // 4, position, step, stream, key] -> (N, 4) words, a lane a column."""
    *counter, key = address.unbind(0)
    c0, c1, c2, c3 = counter
    words = philox4x32((c0, c1, c2, c3), (key & _LOW, (key >> 32) & _LOW))
    return torch.stack(words, dim=1)


class Philox:
    """The noise's words; `kernel` is `words_at`, compiled after so much work where that works."""

    def __init__(self, worth_compiling: int = _WORTH_COMPILING) -> None:
        self._left = worth_compiling
        self.kernel: Callable[[Tensor], Tensor] = words_at

    @torch.inference_mode()  # always: with and without it would be two kernels
    def __call__(self, group: Tensor, position: Tensor, step: Tensor, key: Tensor) -> Tensor:
        """int64 addresses that broadcast together -> the words of each, (..., 4)."""
        stream = torch.full((), _TOKEN_STREAM, dtype=torch.int64, device=key.device)
        address = torch.stack(torch.broadcast_tensors(group, position, step, stream, key))
        shape = (*address.shape[1:], 4)
        parts = address.view(5, -1).split(at_once(key.device), dim=1)
        if len(parts) == 1:
            return self._at_once(parts[0]).view(shape)
        return torch.cat([self._at_once(part.contiguous()) for part in parts]).view(shape)

    def _at_once(self, address: Tensor) -> Tensor:
        num_addresses = address.shape[1]
        if num_addresses < 2:  # a compiler takes a size of 1 for a constant
            return words_at(address)
        if self._left > 0:
            self._left -= max(_LEAST, num_addresses)
            if self._left <= 0:
                self.kernel = _compiled(address)
        return self.kernel(address)


def _compiled(address: Tensor) -> Callable[[Tensor], Tensor]:
    """`words_at` as one kernel, or itself where that fails; tried on `address`."""
    try:
        # One process: the pool of compilers that is the default would outlive its only use.
        kernel = torch.compile(
            words_at, dynamic=True, fullgraph=True, options={"compile_threads": 1}
        )
        agrees = torch.equal(kernel(address), words_at(address))
    except (RuntimeError, OSError, ImportError, subprocess.SubprocessError) as error:
        why = str(error).partition("\n")[0]
        logger.info("noise is made op by op, it cannot be compiled: %s", why)
        return words_at
    if not agrees:
        logger.warning("noise is made op by op, the compiled kernel gives other bits")
        return words_at
    logger.debug("noise is made by one kernel")
    return kernel


philox = Philox()
"""That of this process."""


def gumbel_from_bits(bits: Tensor) -> Tensor:
    """32 random bits (int64) -> standard Gumbel noise, float32.

    E = -log1p(-u) is a standard exponential whose small values, which win an argmax, are finely
    resolved. float64 throughout and one rounding at the end, so that last-bit differences between
    log implementations do not show.
    """
    uniform = bits.double().add_(0.5).mul_(2.0**-32)
    return uniform.neg_().log1p_().neg_().log_().neg_().float()


def gumbel(key: Tensor, *, position: Tensor, step: Tensor, token: Tensor) -> Tensor:
    """Noise at addresses: int64 tensors that broadcast together -> float32 of their common shape.

    `key` holds 64 bits a sample, `position` is absolute, `step` counts the commits so far in the
    block (`NO_STEP` for noise that ignores them).
    """
    words = philox(token >> 2, position, step, key)
    lane = (token & 3).expand(words.shape[:-1])
    return gumbel_from_bits(words.gather(-1, lane.unsqueeze(-1)).squeeze(-1))


def gumbel_rows(
    key: Tensor, *, position: Tensor, step: Tensor, vocab_size: int, first: int = 0
) -> Tensor:
    """Noise of whole vocabulary rows, or of their tokens from `first` on: three (n,) addresses ->
    (n, vocab_size - first) float32.

    The same values as `gumbel` gives, at a quarter of its work: one Philox call makes four tokens.
    """
    assert first % 4 == 0, f"one Philox call makes four tokens, not those from {first}"
    group = torch.arange(first // 4, (vocab_size + 3) // 4, device=key.device)
    words = philox(group, position[:, None], step[:, None], key[:, None])
    return gumbel_from_bits(words.flatten(1)[:, : vocab_size - first])
