"""Trajectories: what decoding saw and committed, state by state; what drafters learn from.

A job with `output.include: trajectory` records them. Here they become tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from pyarrow.dataset import dataset
from torch import Tensor

from spot_batch.drafters.distributions import TOP_K
from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.mirror import folder_of
from spot_batch.jobdir.scan import damaged, fault_of_parts
from spot_batch.records.sampling import NoiseRule


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedFrom:
    """What trajectories were recorded from; jobs are read together where all but `jobs` is equal.

    `weights` is the target's hash, `jobs` the fingerprints of what was read.
    """

    target: str
    weights: str
    block_length: int
    noise_rule: NoiseRule
    jobs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Trajectories:
    """Recorded states, N of them.

    job (N,) int64: which of the source's jobs; place (N,) float64: where the state's prompt falls
    in [0, 1), by its id alone; start, num_committed, noise_key, top_k (N,) int64; temperature,
    top_p (N,) float32; masked (N, W) bool; log_prob (N, W, K) float16; ids (N, W, K) int32; and per
    state its commits, padded with -1: positions, tokens (N, W) int64.
    """

    job: Tensor
    place: Tensor
    start: Tensor
    num_committed: Tensor
    noise_key: Tensor
    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    masked: Tensor
    log_prob: Tensor
    ids: Tensor
    positions: Tensor
    tokens: Tensor
    source: RecordedFrom

    def __len__(self) -> int:
        return len(self.start)

    @property
    def block_length(self) -> int:
        return self.masked.shape[1]

    @property
    def num_ahead(self) -> Tensor:
        """(N,) commits known after the state's own: how deep it can be queried."""
        return (self.positions >= 0).sum(dim=1) - 1

    @property
    def num_prompts(self) -> int:
        return len(self.place.unique())

    @property
    def temperatures(self) -> list[float]:
        """The temperatures of its states, ascending."""
        return sorted({round(heat, 4) for heat in self.temperature.unique().tolist()})

    def take(self, index: Tensor) -> Trajectories:
        """The states at `index` (int64 or bool)."""
        taken: dict[str, Any] = {name: getattr(self, name)[index] for name in _TENSORS}
        return replace(self, **taken)

    def to(self, device: torch.device) -> Trajectories:
        """The same on another device."""
        moved: dict[str, Any] = {name: getattr(self, name).to(device) for name in _TENSORS}
        return replace(self, **moved)

    def split(self, *, share: float) -> tuple[Trajectories, Trajectories]:
        """(the rest, about `share` of the prompts): whole prompts to one side, those of one id to
        the same side whatever the job. At least one prompt is set apart.
        """
        apart = self.place < share
        if not bool(apart.any()):
            apart = self.place == self.place.min()
        return self.take(~apart), self.take(apart)

    def halves(self) -> tuple[Trajectories, Trajectories]:
        """Two halves by whole prompts; the first one has none where there is one prompt only."""
        places = self.place.unique()
        first = torch.isin(self.place, places[: len(places) // 2])
        return self.take(first), self.take(~first)

    def some(self, most: int, *, seed: int) -> Trajectories:
        """At most so many of its states, drawn by the seed."""
        if len(self) <= most:
            return self
        generator = torch.Generator().manual_seed(seed)
        return self.take(torch.randperm(len(self), generator=generator)[:most])


_TENSORS = tuple(field.name for field in fields(Trajectories) if field.name != "source")


def load_trajectories(paths: Sequence[Path | str]) -> Trajectories:
    """Read the recorded states of finished jobs of one model, which may be at URLs.

    Raises ValueError naming the path where it is no finished job, recorded nothing, or is of
    another model than the first.
    """
    if not paths:
        raise ValueError("no job to read trajectories from")
    jobs = [JobDirectory.open(folder_of(path)) for path in paths]
    sources = [_source(path, job) for path, job in zip(paths, jobs, strict=True)]
    for path, source in zip(paths, sources, strict=True):
        compared = {"weights": "weights", "block_length": "block_length", "noise_key": "noise_rule"}
        for name, field in compared.items():  # people know them by the spec's keys
            first, other = getattr(sources[0], field), getattr(source, field)
            if other != first:
                raise ValueError(
                    f"{path}: recorded from another model than {paths[0]} "
                    f"({name} {other} against {first})"
                )
    names = [job.fingerprint for job in jobs]
    for path, name in zip(paths, names, strict=True):
        if names.count(name) > 1:
            raise ValueError(f"{path}: the same job is given twice")
    parts = [
        _read_job(path, job, source, index)
        for index, (path, job, source) in enumerate(zip(paths, jobs, sources, strict=True))
    ]
    if len(parts) == 1:
        return parts[0]
    joined: dict[str, Any] = {
        name: torch.cat([getattr(part, name) for part in parts]) for name in _TENSORS
    }
    return replace(parts[0], **joined, source=replace(sources[0], jobs=tuple(names)))


def _source(path: Path | str, job: JobDirectory) -> RecordedFrom:
    """What a job recorded from. Raises ValueError where it cannot be read from."""
    if not job.is_complete:
        raise ValueError(f"{path}: the job is not complete; resume it first")
    if job.spec.output.prefix + "trajectory" not in job.schema.names:
        raise ValueError(f"{path}: no trajectories; record them with output.include: trajectory")
    fault = fault_of_parts(job, verify=False)
    if fault is not None:
        raise damaged(job, fault)
    return RecordedFrom(
        target=Path(job.spec.model.target.path).name,
        weights=str(job.fields["model.weights"]),
        block_length=cast(int, job.fields["model.block_length"]),
        noise_rule=job.spec.generation.advanced.noise_key,
        jobs=(job.fingerprint,),
    )


def _read_job(
    path: Path | str, job: JobDirectory, source: RecordedFrom, index: int
) -> Trajectories:
    prefix, generation = job.spec.output.prefix, job.spec.generation
    try:
        table = dataset(job.data, format="ipc").to_table(
            columns=[prefix + "trajectory", prefix + "custom_id"]
        )
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"{path}: its parts cannot be read ({error})") from error
    column = table[prefix + "trajectory"].combine_chunks()
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
    if width != source.block_length or ids.shape[2] > TOP_K:
        raise ValueError(
            f"{path}: recorded {width} positions of top-{ids.shape[2]}; "
            f"want {source.block_length} of at most top-{TOP_K}"
        )
    places = np.array([_place(each) for each in table[prefix + "custom_id"].to_pylist()])
    keys = pc.struct_field(column, "noise_key").fill_null(0).to_numpy().astype(np.int64)
    heat = pc.struct_field(column, "temperature").fill_null(0.0).to_numpy().astype(np.float32)
    top_p = 1.0 if generation.top_p is None else generation.top_p
    return Trajectories(
        job=torch.full((num,), index, dtype=torch.int64),
        place=torch.from_numpy(places[sample]),
        start=_integers(pc.struct_field(flat, "start")),
        num_committed=_integers(pc.struct_field(flat, "num_committed")),
        noise_key=torch.from_numpy(keys[sample]),
        temperature=torch.from_numpy(heat[sample]),
        top_p=torch.full((num,), top_p, dtype=torch.float32),
        top_k=torch.full((num,), generation.top_k or 0, dtype=torch.int64),
        masked=torch.from_numpy(masked),
        log_prob=torch.from_numpy(log_prob),
        ids=torch.from_numpy(ids),
        positions=_padded(pc.struct_field(flat, "positions"), width),
        tokens=_padded(pc.struct_field(flat, "tokens"), width),
        source=source,
    )


def _place(custom_id: str) -> float:
    """A prompt's place in [0, 1), from its id alone."""
    digest = hashlib.blake2b(custom_id.encode(), digest_size=6, person=b"spot-split")
    return int.from_bytes(digest.digest(), "little") / 2.0**48


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
