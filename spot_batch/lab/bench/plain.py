"""A plain loop over transformers' own model: what one writes first, and what a batch engine is for.

In the manner of the published script, in code of our own: prompts go in together, padded on the
left by whole blocks so that their blocks stand side by side; every forward commits one token of
each; a block that is full is run once more to store its KV; the batch goes on until its last sample
has ended. No slots, no tiles, no samples that join late, no drafts. What a forward commits is the
engine's own transition's, so at temperature 0 the tokens are the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import DynamicCache, Qwen3ForCausalLM

from spot_batch.checkpoints.json_files import read_json
from spot_batch.checkpoints.registry import ModelInfo
from spot_batch.engine.stops import find_end
from spot_batch.engine.transition import Rule, States, transition
from spot_batch.models.qwen3 import qwen3_config
from spot_batch.records.sampling import Request

FAMILY = "sdar"
"""The family whose body transformers has under its own name."""


class PlainLoop:
    """Draft-free decoding of whole batches by transformers' Qwen3.

    Raises ValueError for another family than SDAR.
    """

    def __init__(
        self,
        info: ModelInfo,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        if info.family.name != FAMILY:
            raise ValueError(f"the plain loop knows {FAMILY}, {info.name} is {info.family.name}")
        config = qwen3_config(read_json(info.path / "config.json"), info.sizes, where=info.name)
        model = Qwen3ForCausalLM.from_pretrained(
            info.path, config=config, dtype=dtype, attn_implementation="sdpa"
        )
        self._model = model.eval().to(device)
        self._device = torch.device(device)
        self._info = info
        self._width = info.block_length

    @torch.inference_mode()
    def decode(self, requests: Sequence[Request]) -> list[tuple[int, ...]]:
        """The tokens of each request; one batch, all of one rule and without stop strings."""
        batch = _Batch(requests, self._width, self._info.mask_id, self._device)
        cache = DynamicCache()
        if batch.num_prefix:
            prefix = slice(0, batch.num_prefix)
            self._rows(batch.ids[:, prefix], batch, 0, batch.prefix_mask(), cache)
        while not batch.is_done:
            start = batch.start
            while batch.open.any():
                block = batch.ids[:, start : start + self._width]
                rows = self._rows(block, batch, start, batch.block_mask(), cache)
                cache.crop(-self._width)  # a state that still holds masks is not kept
                batch.commit(self._logits(rows))
            block = batch.ids[:, start : start + self._width]
            self._rows(block, batch, start, batch.block_mask(), cache)
            batch.next_block()
        return batch.tokens()

    def _rows(
        self, ids: Tensor, batch: _Batch, start: int, mask: Tensor, cache: DynamicCache
    ) -> Tensor:
        """(B, n) ids at column `start` -> (B, n, d) final hidden rows; the cache grows by n."""
        column = start + torch.arange(ids.shape[1], device=self._device)
        rows: Tensor = self._model.model(
            input_ids=ids,
            position_ids=(column - batch.padding[:, None]).clamp_min(0),
            attention_mask={"full_attention": mask},
            cache=cache,
            use_cache=True,
        ).last_hidden_state
        return rows

    def _logits(self, rows: Tensor) -> Tensor:
        """(B, W, d) rows -> (B, W, V) float32 logits, ids that must not be written at -inf."""
        logits: Tensor = self._model.lm_head(rows).float()
        logits[..., list(self._info.forbidden_ids)] = float("-inf")
        return logits


class _Batch:
    """Samples side by side in columns: padding (B,), ids (B, columns), open (B, W) of the block.

    Column `start` is the first of the block that all of them decode; a sample's own position is
    its column less its padding, which is whole blocks.
    """

    def __init__(
        self, requests: Sequence[Request], width: int, mask_id: int, device: torch.device
    ) -> None:
        assert len({Rule.of(request.params) for request in requests}) == 1, "one rule a batch"
        assert not any(request.params.stop for request in requests), "no stop strings"
        self._requests = requests
        self._width = width
        self._rule = Rule.of(requests[0].params)
        whole = [len(request.prompt_ids) // width * width for request in requests]
        self.num_prefix = self.start = max(whole)
        self.padding = torch.tensor([self.num_prefix - each for each in whole], device=device)
        ends = [
            pad + len(request.prompt_ids) + request.params.max_new_tokens
            for pad, request in zip(self.padding.tolist(), requests, strict=True)
        ]
        num_columns = -(-max(ends) // width) * width
        self.ids = torch.full((len(requests), num_columns), mask_id, device=device)
        for row, (pad, request) in enumerate(zip(self.padding.tolist(), requests, strict=True)):
            prompt = torch.tensor(request.prompt_ids, device=device)
            self.ids[row, pad : pad + len(prompt)] = prompt
        self.open = self._open()
        self._ended: list[int | None] = [None] * len(requests)
        self._states = States.of(
            requests,
            masked=self.open,
            start=self.start - self.padding.cpu(),
            num_committed=[0] * len(requests),
        )

    @property
    def is_done(self) -> bool:
        return None not in self._ended

    def prefix_mask(self) -> Tensor:
        """(B, 1, n, n) bool: block-causal, without padding; padding sees itself alone."""
        column = torch.arange(self.num_prefix, device=self.ids.device)
        block = column // self._width
        seen = (block[:, None] >= block) & (column >= self.padding[:, None, None])
        return (seen | torch.eye(len(column), dtype=torch.bool, device=column.device))[:, None]

    def block_mask(self) -> Tensor:
        """(B, 1, W, start + W) bool: all that is before and the block itself, without padding."""
        column = torch.arange(self.start + self._width, device=self.ids.device)
        seen = column >= self.padding[:, None, None, None]
        return seen.expand(-1, 1, self._width, -1)

    def commit(self, logits: Tensor) -> None:
        """Write what the target fixes next in every sample whose block is not full."""
        states = replace(self._states, masked=self.open, start=self.start - self.padding.cpu())
        choice = transition(logits, states, self._rule)
        block = self.ids[:, self.start : self.start + self._width]
        block.copy_(torch.where(choice.commit, choice.token, block))
        commit = choice.commit.cpu()
        self._states = replace(states, num_committed=states.num_committed + commit.sum(1))
        self.open = self.open & ~commit

    def next_block(self) -> None:
        """See who has ended, and go on to the columns behind."""
        self.start += self._width
        for row, (pad, request) in enumerate(
            zip(self.padding.tolist(), self._requests, strict=True)
        ):
            if self._ended[row] is None:
                written = self.ids[row, pad + len(request.prompt_ids) : self.start].tolist()
                end = find_end(written, request.params, whole=True, decode=None)
                self._ended[row] = None if end is None else end.num_tokens
        if not self.is_done:
            self.open = self._open()
            self._states = replace(
                self._states, num_committed=torch.zeros(len(self._requests), dtype=torch.int64)
            )

    def tokens(self) -> list[tuple[int, ...]]:
        """What each sample has written, up to its end."""
        found: list[tuple[int, ...]] = []
        for pad, request, num in zip(
            self.padding.tolist(), self._requests, self._ended, strict=True
        ):
            assert num is not None, "the batch is not done"
            first = pad + len(request.prompt_ids)
            found.append(tuple(self.ids[len(found), first : first + num].tolist()))
        return found

    def _open(self) -> Tensor:
        """(B, W) bool, on the host: the block's columns that no prompt fills."""
        column = self.start + torch.arange(self._width)
        ends = [len(request.prompt_ids) for request in self._requests]
        first = self.padding.cpu() + torch.tensor(ends)
        return column >= first[:, None]
