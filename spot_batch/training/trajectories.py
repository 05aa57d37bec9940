"""Trajectories: what draft-free decoding saw and committed, state by state; drafters learn from it.

One row a visited state with its whole future inside the block, so that any row can be shuffled,
filtered or split off without its neighbours. Rows are Arrow; nothing in them names a token's text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from spot_batch.decoding.engine import Visit
from spot_batch.drafters.stale import TOP_K

_BATCH_ROWS = 1024


def trajectory_schema(block_length: int, width: int) -> pa.Schema:
    """One visited state: its stale distributions (W * K flat), and the commits that followed in its
    block, this state's own first."""
    size = block_length * width
    return pa.schema(
        [
            ("sample_id", pa.int64()),
            ("start", pa.int32()),
            ("num_committed", pa.int16()),
            ("noise_key", pa.uint64()),
            ("temperature", pa.float32()),
            ("masked", pa.list_(pa.bool_(), block_length)),
            ("log_prob", pa.list_(pa.float16(), size)),
            ("ids", pa.list_(pa.int32(), size)),
            ("positions", pa.list_(pa.int16())),
            ("tokens", pa.list_(pa.int32())),
        ]
    )


@dataclass(slots=True)
class TrajectoryRecorder:
    """Collects visits of `single` decoding and writes the rows of each block once it is left.

    Give it to an `Engine` without a drafter; call `close` at the end.
    """

    path: Path
    block_length: int
    width: int
    metadata: dict[str, str]
    num_rows: int = 0
    _open: dict[int, list[Visit]] = field(default_factory=dict)
    _rows: list[dict[str, object]] = field(default_factory=list)
    _writer: pa.RecordBatchFileWriter | None = None

    def visit(self, visit: Visit) -> None:
        """Take note of a state; see `decoding.engine.Recorder`."""
        visits = self._open.setdefault(visit.request.sample_id, [])
        if visits and visits[-1].start != visit.start:
            self._emit(visits)
            visits.clear()
        visits.append(visit)

    def close(self) -> None:
        """Write what is left and make the file whole."""
        for visits in self._open.values():
            self._emit(visits)
        self._open.clear()
        self._flush()
        if self._writer is not None:
            self._writer.close()
            self._partial.replace(self.path)

    @property
    def _partial(self) -> Path:
        return self.path.with_name(self.path.name + ".partial")

    def _emit(self, visits: Sequence[Visit]) -> None:
        commits = [visit.commits for visit in visits]
        assert all(len(commit) == 1 for commit in commits), "trajectories are of single unmasking"
        positions = [commit[0][0] for commit in commits]
        tokens = [commit[0][1] for commit in commits]
        for index, visit in enumerate(visits[:-1]):  # the last state has no commit to predict
            self._rows.append(
                {
                    "sample_id": visit.request.sample_id,
                    "start": visit.start,
                    "num_committed": visit.num_committed,
                    "noise_key": visit.request.noise_key,
                    "temperature": visit.request.params.temperature,
                    "masked": visit.masked,
                    "log_prob": visit.log_prob.half().flatten().cpu().numpy(),
                    "ids": visit.ids.int().flatten().cpu().numpy(),
                    "positions": positions[index:],
                    "tokens": tokens[index:],
                }
            )
        if len(self._rows) >= _BATCH_ROWS:
            self._flush()

    def _flush(self) -> None:
        schema = trajectory_schema(self.block_length, self.width).with_metadata(self.metadata)
        if self._writer is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pa.ipc.new_file(self._partial, schema)
        self._writer.write_table(pa.Table.from_pylist(self._rows, schema=schema))
        self.num_rows += len(self._rows)
        self._rows = []


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
    """Read recorded states of one model.

    Raises ValueError naming the file where it is torn, of another model, or where all are empty.
    """
    tables = [_read(path) for path in paths]
    metadata = _metadata(tables[0])
    for path, table in zip(paths, tables, strict=True):
        other = _metadata(table)
        for name in ("weights", "block_length"):
            if other.get(name) != metadata.get(name):
                raise ValueError(
                    f"{path}: recorded from another model than {paths[0]} "
                    f"({name} {other.get(name)} against {metadata.get(name)})"
                )
    table = pa.concat_tables(tables)
    if not table.num_rows:
        raise ValueError(f"{paths[0]}: holds no states; record more prompts")
    width = int(metadata["block_length"])
    offset = 0
    shifted: list[NDArray[np.int64]] = []
    for part in tables:  # sample ids of different files are different samples
        ids = part["sample_id"].to_numpy()
        shifted.append(ids + offset)
        offset += int(ids.max(initial=-1)) + 1
    num = table.num_rows
    return Trajectories(
        sample_id=torch.from_numpy(np.concatenate(shifted)),
        start=torch.tensor(table["start"].to_numpy(), dtype=torch.int64),
        num_committed=torch.tensor(table["num_committed"].to_numpy(), dtype=torch.int64),
        noise_key=torch.from_numpy(table["noise_key"].to_numpy().astype(np.int64)),
        temperature=torch.tensor(table["temperature"].to_numpy()),
        masked=torch.from_numpy(_flat(table["masked"], bool).reshape(num, width)),
        log_prob=torch.from_numpy(_flat(table["log_prob"], np.float16).reshape(num, width, -1)),
        ids=torch.from_numpy(_flat(table["ids"], np.int32).reshape(num, width, -1)),
        positions=_padded(table["positions"], width),
        tokens=_padded(table["tokens"], width),
        metadata=metadata,
    )


def _read(path: Path) -> pa.Table:
    try:
        with pa.OSFile(str(path)) as file:
            return pa.ipc.open_file(file).read_all()
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"{path}: not a whole trajectory file ({error})") from error


def _metadata(table: pa.Table) -> dict[str, str]:
    found = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    if "block_length" not in found or "weights" not in found:
        raise ValueError("not a trajectory file: block_length or weights are not in its metadata")
    return found


def _flat(column: pa.ChunkedArray, dtype: type) -> NDArray[np.generic]:
    chunks = [np.asarray(chunk.flatten().to_numpy(zero_copy_only=False)) for chunk in column.chunks]
    return np.concatenate(chunks).astype(dtype)


def _padded(column: pa.ChunkedArray, width: int) -> Tensor:
    out = torch.full((len(column), width), -1, dtype=torch.int64)
    for row, values in enumerate(_lists(column)):
        out[row, : len(values)] = torch.as_tensor(values)
    return out


def _lists(column: pa.ChunkedArray) -> Iterator[NDArray[np.int64]]:
    for chunk in column.chunks:
        values, offsets = chunk.values.to_numpy(), chunk.offsets.to_numpy()
        for first, last in pairwise(offsets):
            yield values[first:last].astype(np.int64)


def trajectory_metadata(*, weights: str, block_length: int) -> dict[str, str]:
    """What a trajectory file says of its model."""
    return {"weights": weights, "block_length": str(block_length), "top_k": str(TOP_K)}
