"""Draft-free decoding, recorded with every state: what drafters are held against afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from spot_batch.checkpoints.registry import ModelInfo
from spot_batch.engine.engine import Engine, EngineSettings
from spot_batch.engine.transition import noise_keys
from spot_batch.engine.tree import Key
from spot_batch.lab.methods.oracles import Future
from spot_batch.learning.trajectories import RecordedFrom, Trajectories
from spot_batch.models.block import BlockTarget
from spot_batch.records.results import Completion, VisitedState
from spot_batch.records.sampling import Request


@dataclass(frozen=True, slots=True)
class RecordedBlock:
    """A block's commits in their order, and its states but for the last one."""

    start: int
    masked: tuple[bool, ...]
    commits: Key
    states: tuple[VisitedState, ...]


@dataclass(frozen=True, slots=True)
class RecordedSample:
    """A sample as draft-free decoding wrote it; `num_commits` forwards of one commit each."""

    request: Request
    blocks: tuple[RecordedBlock, ...]
    completion: Completion

    @property
    def num_commits(self) -> int:
        return sum(len(block.commits) for block in self.blocks)


def recorded_sample(request: Request, completion: Completion, width: int) -> RecordedSample:
    """A sample from a completion that was recorded with every state.

    A block of one commit has no recorded state: the first one where the prompt leaves one position
    open, and the last one where its first commit ended the sample.
    """
    assert completion.trajectory is not None, "record every state"
    prompt = len(request.prompt_ids)
    first = prompt // width * width
    states: dict[int, list[VisitedState]] = {}
    for state in completion.trajectory.states:
        states.setdefault(state.start, []).append(state)
    blocks = [
        RecordedBlock(
            start=start,
            masked=of_block[0].masked,
            commits=tuple(zip(of_block[0].positions, of_block[0].tokens, strict=True)),
            states=tuple(of_block),
        )
        for start, of_block in states.items()
    ]
    if first not in states:
        masked = tuple(at >= prompt - first for at in range(width))
        blocks.insert(0, RecordedBlock(first, masked, ((width - 1, -1),), ()))
    missing = completion.num_draft_free_forwards - sum(len(block.commits) for block in blocks)
    if missing:
        assert missing == 1, f"{missing} commits are not recorded"
        blocks.append(RecordedBlock(blocks[-1].start + width, (True,) * width, ((-1, -1),), ()))
    return RecordedSample(request, tuple(blocks), completion)


def record(
    target: BlockTarget, requests: Sequence[Request], *, in_flight: int = 32
) -> list[RecordedSample]:
    """Draft-free decoding of these requests, with every state."""
    settings = EngineSettings(max_sequences=in_flight, budget=0)
    engine = Engine(target, None, settings, record_every=1)
    for request in requests:
        engine.add(request)
    done = {completion.sample_id: completion for completion in engine.run()}
    return [
        recorded_sample(request, done[request.sample_id], target.block_length)
        for request in requests
    ]


def as_trajectories(samples: Sequence[RecordedSample], info: ModelInfo) -> Trajectories:
    """Recorded samples as the tensors that training and calibration read."""
    width = info.block_length
    states = [
        (sample, state) for sample in samples for block in sample.blocks for state in block.states
    ]
    num = len(states)

    def padded(values: Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor([[*one, *[-1] * (width - len(one))] for one in values])

    params = [sample.request.params for sample, _ in states]
    return Trajectories(
        job=torch.zeros(num, dtype=torch.int64),
        place=torch.tensor([s.request.sample_id / len(samples) for s, _ in states]).double(),
        start=torch.tensor([state.start for _, state in states]),
        num_committed=torch.tensor([state.num_committed for _, state in states]),
        noise_key=noise_keys([s.request.noise_key for s, _ in states]),
        temperature=torch.tensor([each.temperature for each in params]),
        top_p=torch.tensor([each.top_p for each in params]),
        top_k=torch.tensor([each.top_k for each in params]),
        masked=torch.tensor([state.masked for _, state in states]),
        log_prob=torch.from_numpy(np.stack([s.log_prob for _, s in states])).view(num, width, -1),
        ids=torch.from_numpy(np.stack([s.ids for _, s in states])).view(num, width, -1),
        positions=padded([state.positions for _, state in states]),
        tokens=padded([state.tokens for _, state in states]),
        source=RecordedFrom(
            target=info.name,
            weights=info.weight_hash,
            block_length=width,
            noise_rule=params[0].noise_rule,
            jobs=(),
        ),
    )


def future_of(samples: Sequence[RecordedSample]) -> Future:
    """What the oracles know."""
    future: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {}
    for sample in samples:
        key = sample.request.noise_key
        key = key - (1 << 64) if key >= 1 << 63 else key
        future |= {(key, block.start): block.commits for block in sample.blocks}
    return future
