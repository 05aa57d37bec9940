"""Trajectories: what decoding saw and committed, state by state; what drafters learn from.

A job with `output.include: trajectory` records them. Here they become tensors.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from pyarrow.dataset import dataset
from torch import Tensor

from spot_batch.store import JobDirectory


@dataclass(frozen=True, slots=True)
class Trajectories:
    """Recorded states, N of them: log_prob (N, W, K) float16, ids (N, W, K) int32, masked (N, W)
    bool, and per state its commits, padded with -1: positions, tokens (N, W) int64."""

    sample_id: Tensor
    start: Tensor
    num_committed: Tensor
    noise_key: Tensor
    temperature: Tensor
    masked: Tensor
    log_prob: Tensor
    ids: Tensor
    positions: Tensor
    tokens: Tensor
    metadata: dict[str, str]

    def __len__(self) -> int:
        return len(self.start)

    @property
    def block_length(self) -> int:
        return self.masked.shape[1]

    @property
    def num_ahead(self) -> Tensor:
        """(N,) commits known after the state's own: how deep it can be queried."""
        return (self.positions >= 0).sum(dim=1) - 1

    def take(self, index: Tensor) -> Trajectories:
        """The states at `index` (int64 or bool)."""
        return Trajectories(
            self.sample_id[index],
            self.start[index],
            self.num_committed[index],
            self.noise_key[index],
            self.temperature[index],
            self.masked[index],
            self.log_prob[index],
            self.ids[index],
            self.positions[index],
            self.tokens[index],
            self.metadata,
        )

    def split(self, *, held_out: float) -> tuple[Trajectories, Trajectories]:
        """Train and held-out states, whole samples to one side."""
        samples = self.sample_id.unique()
        num_held_out = max(1, round(len(samples) * held_out))
        outside = torch.isin(self.sample_id, samples[-num_held_out:])
        return self.take(~outside), self.take(outside)


def load_trajectories(paths: Sequence[Path]) -> Trajectories:
    """Read the recorded states of finished jobs of one model.

    Raises ValueError naming the path where it is no finished job, recorded nothing, or is of
    another model than the first.
    """
    parts = [_read_job(path) for path in paths]
    if not parts:
        raise ValueError("no job to read trajectories from")
    metadata = parts[0].metadata
    for path, part in zip(paths, parts, strict=True):
        for name in ("weights", "block_length"):
            if part.metadata[name] != metadata[name]:
                raise ValueError(
                    f"{path}: recorded from another model than {paths[0]} "
                    f"({name} {part.metadata[name]} against {metadata[name]})"
                )
    offset = 0
    sample_ids = []
    for part in parts:  # sample ids of different jobs are different samples
        sample_ids.append(part.sample_id + offset)
        offset += int(part.sample_id.max()) + 1
    return Trajectories(
        sample_id=torch.cat(sample_ids),
        start=torch.cat([part.start for part in parts]),
        num_committed=torch.cat([part.num_committed for part in parts]),
        noise_key=torch.cat([part.noise_key for part in parts]),
        temperature=torch.cat([part.temperature for part in parts]),
        masked=torch.cat([part.masked for part in parts]),
        log_prob=torch.cat([part.log_prob for part in parts]),
        ids=torch.cat([part.ids for part in parts]),
        positions=torch.cat([part.positions for part in parts]),
        tokens=torch.cat([part.tokens for part in parts]),
        metadata=metadata,
    )


def _read_job(path: Path) -> Trajectories:
    job = JobDirectory.open(path)
    if not job.is_complete:
        raise ValueError(f"{path}: the job is not complete; resume it first")
    name = job.spec.output.prefix + "trajectory"
    if name not in job.schema.names:
        raise ValueError(f"{path}: no trajectories; record them with output.include: trajectory")
    fields = json.loads(job.fingerprint_path.read_text(encoding="utf-8"))["fields"]
    table = dataset(job.data, format="ipc").to_table(columns=[name])
    column = table[name].combine_chunks()
    states = pc.struct_field(column, "states")
    per_sample = pc.list_value_length(states).fill_null(0).to_numpy().astype(np.int64)
    flat = pc.list_flatten(states)
    num = len(flat)
    if not num:
        raise ValueError(f"{path}: holds no states; record more prompts, or longer answers")
    sample = np.repeat(np.arange(len(per_sample)), per_sample)
    masked = _even(pc.struct_field(flat, "masked"), num)
    width = masked.shape[1]
    log_prob = _even(pc.struct_field(flat, "log_prob"), num).reshape(num, width, -1)
    ids = _even(pc.struct_field(flat, "ids"), num).reshape(num, width, -1)
    keys = pc.struct_field(column, "noise_key").fill_null(0).to_numpy().astype(np.int64)
    heat = pc.struct_field(column, "temperature").fill_null(0.0).to_numpy()
    return Trajectories(
        sample_id=torch.from_numpy(sample),
        start=_integers(pc.struct_field(flat, "start")),
        num_committed=_integers(pc.struct_field(flat, "num_committed")),
        noise_key=torch.from_numpy(keys[sample]),
        temperature=torch.from_numpy(heat[sample]),
        masked=torch.from_numpy(masked),
        log_prob=torch.from_numpy(log_prob),
        ids=torch.from_numpy(ids),
        positions=_padded(pc.struct_field(flat, "positions"), width),
        tokens=_padded(pc.struct_field(flat, "tokens"), width),
        metadata={
            "target": Path(job.spec.model.target.path).name,
            "weights": str(fields["model.weights"]),
            "block_length": str(width),
        },
    )


def _even(column: pa.Array, num: int) -> NDArray[Any]:
    """A column of equally long lists -> (num, length)."""
    flat = np.array(pc.list_flatten(column).to_numpy(zero_copy_only=False))
    return flat.reshape(num, -1)


def _integers(column: pa.Array) -> Tensor:
    return torch.tensor(column.to_numpy(), dtype=torch.int64)


def _padded(column: pa.Array, width: int) -> Tensor:
    """A column of lists -> (N, width), -1 behind each one's end."""
    length = pc.list_value_length(column).to_numpy().astype(np.int64)
    out = np.full((len(column), width), -1, dtype=np.int64)
    out[np.arange(width) < length[:, None]] = pc.list_flatten(column).to_numpy()
    return torch.from_numpy(out)
