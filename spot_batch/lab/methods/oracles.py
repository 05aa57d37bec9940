"""Drafters that know the future: what is left to gain, and which knowledge gains it.

They are given what draft-free decoding of the same requests commits, so they exist in benchmarks
alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from spot_batch.drafters.base import Proposals, best_edges
from spot_batch.drafters.distributions import MASKED, Candidates, Queries, StaleStore, candidates
from spot_batch.lab.methods.baselines import confidence_shares
from spot_batch.records.sampling import NoiseRule

Future = Mapping[tuple[int, int], Sequence[tuple[int, int]]]
"""(noise key as int64, start of a block) -> its commits in their order: position, token."""

OracleKind = Literal["position", "token", "full"]


class OracleDrafter:
    """`position` knows which position is next, and guesses the stale token there; `token` knows the
    token of every position, and guesses the order by stale confidence to the power of `sharpness`;
    `full` knows both, so that all that it drafts is accepted."""

    def __init__(self, kind: OracleKind, future: Future, *, sharpness: float = 1.0) -> None:
        self._kind = kind
        self._sharpness = sharpness
        self._future = future
        self.name = f"{kind}-oracle"

    def propose(self, stale: StaleStore, queries: Queries, noise_rule: NoiseRule) -> Proposals:
        """What is known to come, as far as it is known; see `Drafter`."""
        found = candidates(stale, queries, noise_rule)
        order, tokens = self._known(queries)
        masked = queries.status == MASKED
        if self._kind == "token":
            weight = confidence_shares(found, queries.status, self._sharpness)
        else:
            weight = torch.nn.functional.one_hot(order.clamp_min(0), masked.shape[1]).float()
            weight = weight.masked_fill(~masked | (order < 0)[:, None], 0.0)
        if self._kind != "position":
            token = torch.where(tokens >= 0, tokens, found.token)
            found = Candidates(token, found.second, found.log_odds, found.log_prob)
        return best_edges(weight, found)

    def _known(self, queries: Queries) -> tuple[Tensor, Tensor]:
        """(q,) the position committed next and (q, W) the token of each position; -1: unknown."""
        num, width = queries.status.shape
        order, tokens = [-1] * num, [[-1] * width for _ in range(num)]
        keys, starts = queries.noise_key.tolist(), queries.start.tolist()
        for index, done in enumerate(queries.num_committed.tolist()):
            commits = self._future.get((keys[index], starts[index]), ())
            for position, token in commits:
                tokens[index][position] = token
            if done < len(commits):
                order[index] = commits[done][0]
        device = queries.status.device
        return torch.tensor(order, device=device), torch.tensor(tokens, device=device)
