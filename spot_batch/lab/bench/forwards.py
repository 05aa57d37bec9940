"""Forwards that a drafter needs, counted on what draft-free decoding did.

Draft-free decoding visits every state that drafted decoding can stand on, and its commits do not
depend on the drafter. So one recorded trajectory, with the stale distributions of every step, tells
how many forwards any drafter needs at any budget, without the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from spot_batch.drafters.base import Drafter
from spot_batch.drafters.distributions import StaleStore
from spot_batch.engine.drafting import Root, grow
from spot_batch.engine.tree import ROOT, DraftTree, Key
from spot_batch.lab.bench.recording import RecordedBlock, RecordedSample
from spot_batch.models.device import CPU


@dataclass(slots=True)
class Needed:
    """What a drafter needed for a sample: `num_forwards`, of which `num_rooted` had a drafted tree
    with anything in it; `num_drafted` and `num_accepted` states; `num_right` trees whose best first
    guess was the position committed next."""

    num_forwards: int = 0
    num_rooted: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_right: int = 0


@dataclass(slots=True)
class _Cursor:
    """Where counting stands in a sample. `stale`: the state of its block that was read last."""

    sample: RecordedSample
    row: int
    found: Needed
    block: int = 0
    done: int = 0
    stale: int | None = None

    @property
    def here(self) -> RecordedBlock:
        return self.sample.blocks[self.block]

    @property
    def finished(self) -> bool:
        return self.block == len(self.sample.blocks)

    def masked(self, done: int) -> list[bool]:
        """Which positions of the block are masked after so many commits."""
        open_now = list(self.here.masked)
        for position, _ in self.here.commits[:done]:
            open_now[position] = False
        return open_now

    def root(self, *, crossing: bool) -> Root | None:
        if self.stale is None:
            return None
        request, block = self.sample.request, self.here
        end = len(request.prompt_ids) + request.params.max_new_tokens
        return Root(
            row=self.row,
            start=block.start,
            masked=self.masked(self.done),
            stale_masked=self.masked(self.stale),
            num_committed=self.done,
            noise_key=request.noise_key,
            params=request.params,
            crossing=crossing and block.start + len(block.masked) < end,
        )


def forwards_needed(
    samples: Sequence[RecordedSample],
    drafter: Drafter,
    *,
    budget: int,
    gamma: float = 0.0,
    crossing: bool = True,
    in_flight: int = 64,
    device: torch.device = CPU,
) -> list[Needed]:
    """The forwards that a drafter would have needed for each sample, as the engine counts them.

    `device`: the drafter's.
    """
    results: list[Needed] = []
    for at in range(0, len(samples), in_flight):
        some = samples[at : at + in_flight]
        results += _count(some, drafter, budget, gamma, crossing=crossing, device=device)
    return results


@torch.inference_mode()
def _count(
    samples: Sequence[RecordedSample],
    drafter: Drafter,
    budget: int,
    gamma: float,
    *,
    crossing: bool,
    device: torch.device,
) -> list[Needed]:
    width = len(samples[0].blocks[0].masked)
    entries = [len(s.ids) // width for one in samples for b in one.blocks for s in b.states]
    stale = StaleStore(len(samples), width, max(entries, default=1), device)
    cursors = [_Cursor(sample, row, Needed()) for row, sample in enumerate(samples)]
    going = list(cursors)
    while going:
        rooted = [(cursor, cursor.root(crossing=crossing)) for cursor in going]
        roots = [(cursor, root) for cursor, root in rooted if root is not None]
        trees = grow(drafter, stale, [root for _, root in roots], budget=budget, gamma=gamma)
        by_row = {cursor.row: tree for (cursor, _), tree in zip(roots, trees, strict=True)}
        for cursor in going:
            _walk(cursor, by_row.get(cursor.row))
            if cursor.stale is not None and not cursor.finished:
                _put(stale, cursor)
        going = [cursor for cursor in going if not cursor.finished]
    return [cursor.found for cursor in cursors]


def _put(stale: StaleStore, cursor: _Cursor) -> None:
    """What the target said at the state that the walk rested on."""
    assert cursor.stale is not None
    state = cursor.here.states[cursor.stale]
    shape = (stale.log_prob.shape[1], -1)
    stale.log_prob[cursor.row] = torch.from_numpy(state.log_prob).float().view(shape)
    stale.ids[cursor.row] = torch.from_numpy(state.ids).long().view(shape)
    stale.num_committed[cursor.row] = cursor.stale


def _walk(cursor: _Cursor, tree: DraftTree | None) -> None:
    """One forward: from the current state on, as far as the drafted states reach."""
    found, drafted = cursor.found, set(tree.drafted()) if tree is not None else set()
    found.num_forwards += 1
    found.num_drafted += len(drafted)
    if tree is not None and drafted:
        edges = tree.nodes[ROOT].edges or ()
        best = max(edges, key=lambda edge: edge[1])[0]
        found.num_rooted += 1
        found.num_right += best[0][0] == cursor.here.commits[cursor.done][0]
    key: Key = ROOT
    while True:
        commits = cursor.here.commits
        key = tuple(sorted((*key, commits[cursor.done])))
        cursor.done += 1
        if cursor.done == len(commits):
            break
        if key not in drafted:
            cursor.stale = cursor.done - 1
            return
        found.num_accepted += 1
    # The block is done, and the sample perhaps; the next block's first state may be drafted too.
    cursor.block, cursor.done, cursor.stale = cursor.block + 1, 0, None
    if cursor.finished or key not in drafted:
        return
    found.num_accepted += 1
    cursor.done = 1
    if cursor.done == len(cursor.here.commits):
        cursor.block, cursor.done = cursor.block + 1, 0
    else:
        cursor.stale = 0
