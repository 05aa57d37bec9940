"""What the exactness tests share: drafters of every temper, an engine run to its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

import torch
from torch import Tensor

from spot_batch.drafters.base import Drafter, Proposals
from spot_batch.drafters.distributions import Queries, StaleStore
from spot_batch.drafters.order import OrderConfig, OrderDrafter, OrderModel
from spot_batch.drafters.ranking import RankingDrafter
from spot_batch.engine.engine import Engine, EngineSettings
from spot_batch.engine.latency import LatencyTable
from spot_batch.engine.stops import Decode
from spot_batch.models.slots import Target
from spot_batch.records.results import Completion, Trajectory
from spot_batch.records.sampling import NoiseRule, Request, SamplingParams
from tests.exact.reference import Commits
from tests.slots import NUM_LETTERS

DRAFTERS = ("none", "random", "adversarial", "oracle", "ranking", "order")

Trace = Sequence[tuple[int, Commits]]
"""Per forward of draft-free decoding: the block's start and what was fixed."""


class RandomDrafter:
    """Any tokens at any positions, masked or not; other ones each time it is asked."""

    name = "random"

    def __init__(self, vocab_size: int, seed: int, num_edges: int = 5) -> None:
        self._vocab_size, self._num_edges = vocab_size, num_edges
        self._generator = torch.Generator().manual_seed(seed)

    def propose(self, stale: StaleStore, queries: Queries, noise_rule: NoiseRule) -> Proposals:
        num_queries, width = queries.status.shape
        shape = (num_queries, self._num_edges)
        weight = torch.rand(shape, generator=self._generator)
        position = torch.randint(width, shape, generator=self._generator)
        token = torch.randint(self._vocab_size, shape, generator=self._generator)
        return Proposals(position, token, weight / weight.sum(dim=1, keepdim=True))


class OracleDrafter:
    """Knows what is committed next: at every state on its sample's way, one guess of weight 1."""

    name = "oracle"

    def __init__(self, traces: Mapping[int, Trace]) -> None:
        self._next: dict[tuple[int, int, int], tuple[int, int]] = {}
        for noise_key, trace in traces.items():
            done: dict[int, int] = {}
            for start, commits in trace:
                for commit in commits:
                    num_committed = done.get(start, 0)
                    self._next[noise_key, start, num_committed] = commit
                    done[start] = num_committed + 1

    def propose(self, stale: StaleStore, queries: Queries, noise_rule: NoiseRule) -> Proposals:
        following = self.following(queries)
        known = [(0, 0) if commit is None else commit for commit in following]
        position, token = torch.tensor(known).unbind(dim=1)
        weight = torch.tensor([float(commit is not None) for commit in following])
        return Proposals(position[:, None], token[:, None], weight[:, None])

    def following(self, queries: Queries) -> list[tuple[int, int] | None]:
        """Of each query the commit that follows so many, None behind the sample's end."""
        addresses = zip(
            queries.noise_key.tolist(),
            queries.start.tolist(),
            queries.num_committed.tolist(),
            strict=True,
        )
        return [self._next.get((key % 2**64, start, done)) for key, start, done in addresses]


class AdversarialDrafter:
    """Breaks what it can: near misses of the truth, and what no drafter may return.

    The right position with a wrong token (or the mask id, or two tokens at once), the right commit
    from a state that is already wrong, positions that are committed, the same guess twice, weights
    above one, infinite, negative or not a number.
    """

    name = "adversarial"

    def __init__(self, traces: Mapping[int, Trace], *, vocab_size: int, mask_id: int) -> None:
        self._oracle = OracleDrafter(traces)
        self._vocab_size, self._mask_id = vocab_size, mask_id
        self._turn = 0

    def propose(self, stale: StaleStore, queries: Queries, noise_rule: NoiseRule) -> Proposals:
        self._turn += 1
        width = queries.status.shape[1]
        edges = [
            self._edges(commit or (0, 0), (self._turn + index) % 5, width)
            for index, commit in enumerate(self._oracle.following(queries))
        ]
        position = torch.tensor([[edge[0] for edge in row] for row in edges])
        token = torch.tensor([[edge[1] for edge in row] for row in edges])
        weight = torch.tensor([[edge[2] for edge in row] for row in edges])
        return Proposals(position, token, weight)

    def _edges(self, right: tuple[int, int], turn: int, width: int) -> list[tuple[int, int, float]]:
        """Four guesses beside a right one: (position, token, weight)."""
        position, token = right
        wrong, beside = (token + 1) % self._vocab_size, (position + 1) % width
        if turn == 0:  # a wrong token, and every position of the block in its turn
            return [(position, wrong, 0.9), (beside, token, 0.4), (beside, wrong, 0.3), (0, 0, 0.2)]
        if turn == 1:  # the mask id as a token
            return [(position, self._mask_id, 0.9), (beside, self._mask_id, 0.8)] * 2
        if turn == 2:  # all is right, and all is there twice, from a state that may be anything
            return [(position, token, 0.9)] * 2 + [(position, wrong, 0.9)] * 2
        if turn == 3:  # no probabilities at all
            return [
                (position, token, float("nan")),
                (position, wrong, float("inf")),
                (beside, token, -1.0),
                (beside, wrong, 7.0),
            ]
        return [(at % width, token, 0.5) for at in range(position, position + 4)]


def make_drafter(
    name: str, target: Target, traces: Mapping[int, Trace], *, seed: int
) -> Drafter | None:
    """One of `DRAFTERS` for a target; oracle and adversary are told the truth."""
    if name == "none":
        return None
    if name == "random":
        return RandomDrafter(target.vocab_size, seed)
    if name == "oracle":
        return OracleDrafter(traces)
    if name == "adversarial":
        return AdversarialDrafter(traces, vocab_size=target.vocab_size, mask_id=target.mask_id)
    if name == "ranking":
        return RankingDrafter()
    assert name == "order", name
    return random_order_drafter(target.block_length, seed=seed)


def random_order_drafter(block_length: int, *, seed: int) -> OrderDrafter:
    """An order model that nobody has trained."""
    config = OrderConfig(block_length=block_length, num_layers=1, hidden_size=16, num_heads=2)
    model = OrderModel(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return OrderDrafter(model)


def decode_all(
    target: Target,
    drafter: Drafter | None,
    settings: EngineSettings,
    requests: Sequence[Request],
    *,
    at_once: int | None = None,
    decode: Decode | None = None,
    record_every: int = 0,
    latency: LatencyTable | None = None,
) -> list[Completion]:
    """Run an engine until all is done; returns what was done in the order in which it was.

    `at_once`: how many requests arrive before the first round; one more comes after each round.
    """
    engine = Engine(
        target, drafter, settings, latency=latency, decode=decode, record_every=record_every
    )
    first = len(requests) if at_once is None else at_once
    for request in requests[:first]:
        engine.add(request)
    late = list(requests[first:])
    done: list[Completion] = []
    while engine.has_work or late:
        done += engine.step()
        if late:
            engine.add(late.pop(0))
    assert len(done) == len(requests), f"{len(requests)} went in, {len(done)} came out"
    return done


def mixed_requests(*, num: int, max_new_tokens: int, lengths: Sequence[int]) -> list[Request]:
    """Prompts of these lengths; every temperature, filter and rule has its turn."""
    rng = Random(8)
    rules = ("max", "sampled", "sampled_tempered", "sampled_filtered")
    return [
        Request(
            sample_id=index,
            prompt_ids=tuple(rng.randrange(NUM_LETTERS) for _ in range(lengths[index])),
            noise_key=rng.getrandbits(64),
            params=SamplingParams(
                max_new_tokens=max_new_tokens,
                temperature=(0.0, 1.0, 0.6)[index % 3],
                top_p=(1.0, 0.9)[index % 2],
                confidence=rules[index % 4],
                unmasking=("single", "single", "single", "threshold")[index % 4],
                threshold=0.5,
                stop_at="never",
            ),
        )
        for index in range(num)
    ]


def trace_of(done: Completion, *, width: int) -> Trace:
    """How an untrimmed sample came about, read off its commit steps."""
    steps: dict[int, list[tuple[int, int]]] = {}
    for index, (token, step) in enumerate(zip(done.token_ids, done.commit_step, strict=True)):
        steps.setdefault(step, []).append((done.num_prompt_tokens + index, token))
    return [
        (
            steps[step][0][0] // width * width,
            tuple((position % width, token) for position, token in steps[step]),
        )
        for step in sorted(steps)
    ]


def same_sample(ours: Completion, theirs: Completion) -> bool:
    """Everything that a job's output is made of."""
    return (
        ours.token_ids == theirs.token_ids
        and ours.commit_step == theirs.commit_step
        and ours.finish_reason == theirs.finish_reason
        and ours.text == theirs.text
        and ours.num_draft_free_forwards == theirs.num_draft_free_forwards
        and ours.num_prompt_tokens == theirs.num_prompt_tokens
        and same_trajectory(ours.trajectory, theirs.trajectory)
    )


def same_trajectory(ours: Trajectory | None, theirs: Trajectory | None) -> bool:
    """The same states were visited, and the target said the same there, to the bit."""
    if ours is None or theirs is None:
        return ours is theirs
    return (ours.noise_key, ours.temperature, len(ours.states)) == (
        theirs.noise_key,
        theirs.temperature,
        len(theirs.states),
    ) and all(
        (a.start, a.num_committed, a.masked, a.positions, a.tokens)
        == (b.start, b.num_committed, b.masked, b.positions, b.tokens)
        and a.log_prob.tobytes() == b.log_prob.tobytes()
        and a.ids.tobytes() == b.ids.tobytes()
        for a, b in zip(ours.states, theirs.states, strict=True)
    )


def bits_equal(left: Tensor, right: Tensor) -> bool:
    """Same shape, same dtype, same bits (a NaN equals itself, 0.0 is not -0.0)."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    return torch.equal(left.contiguous().view(words), right.contiguous().view(words))
