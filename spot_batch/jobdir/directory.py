"""The job directory: what its job is, once it has been created."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pyarrow as pa
import yaml  # type: ignore[import-untyped, unused-ignore]

from spot_batch.job.reading import check_spec
from spot_batch.job.spec import JobSpec, SpecError
from spot_batch.jobdir.files import OutputError, Reach, unhindered
from spot_batch.jobdir.layout import Layout
from spot_batch.jobdir.mirror import address_of
from spot_batch.jobdir.schema import kept_columns
from spot_batch.records.input import InputChunk, InputFile, PinnedInput
from spot_batch.version import __version__

FORMAT = "1"
TOOL_VERSION = __version__

INDEX_SCHEMA = pa.schema(
    [
        ("file", pa.int32()),
        ("first_row", pa.int64()),
        ("num_rows", pa.int64()),
        ("offset", pa.int64()),
        ("num_bytes", pa.int64()),
        ("line", pa.int64()),
    ]
)


class SpecConflict(ValueError):
    """The directory holds a job of another spec; the message says what differs, field by field."""

    def __init__(self, root: str, differences: tuple[str, ...]) -> None:
        super().__init__(root, differences)
        self.root = root
        self.differences = differences

    def __str__(self) -> str:
        lines = "\n".join(f"  {line}" for line in self.differences)
        return (
            f"{self.root} holds a job of another spec:\n{lines}\n"
            "Give another output folder, or undo the change to go on with this one "
            "(`spot-batch resume` takes it as it was begun)."
        )


class JobDirectory(Layout):
    """A job that has been created, and where everything of it stands. Nothing of it changes.

    `reach` is for tests: it is called with the name of each step of publication, so that a test
    can stop the process there.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        spec: JobSpec,
        fingerprint: str,
        fields: Mapping[str, object],
        pinned: PinnedInput,
        schema: pa.Schema,
        reach: Reach,
    ) -> None:
        super().__init__(layout.root)
        self.spec: Final = spec
        self.fingerprint: Final = fingerprint
        self.fields: Final = fields
        self.pinned: Final = pinned
        self.schema: Final = schema  # of data/, with the metadata that every part carries
        self.reach: Final = reach

    @classmethod
    def open(cls, root: Path | str, *, reach: Reach = unhindered) -> JobDirectory:
        """The job in `root`; OutputError where there is none."""
        layout = Layout(root)
        if not layout.exists:
            raise OutputError(
                f"{address_of(layout.root)}: is not a job directory (no _spot/fingerprint.json)"
            )
        check_format(layout)
        stored = json.loads(layout.fingerprint_path.read_text())
        try:
            spec = check_spec(yaml.safe_load(layout.spec_path.read_text(encoding="utf-8")))
        except SpecError as error:
            raise OutputError(f"{layout.spec_path}: {error}") from error
        return cls(
            layout,
            spec=spec,
            fingerprint=stored["fingerprint"],
            fields=stored["fields"],
            pinned=_read_pinned(layout),
            schema=pa.ipc.read_schema(pa.py_buffer(layout.schema_path.read_bytes())),
            reach=reach,
        )

    @property
    def kept(self) -> list[str]:
        """The input columns that pass through, in order."""
        return kept_columns(pa.ipc.read_schema(pa.py_buffer(self.pinned.schema)), self.spec)

    @property
    def num_samples(self) -> int:
        return self.pinned.num_rows * self.spec.generation.n

    @property
    def rows_per_part(self) -> int:
        return self.spec.rows_per_part(self.num_samples)

    @property
    def num_parts(self) -> int:
        """At least one: a job of no rows has one part of no rows."""
        return max(1, math.ceil(self.num_samples / self.rows_per_part))

    def part_ids(self, part: int) -> range:
        """The sample ids that part `part` always holds."""
        assert 0 <= part < self.num_parts, f"want a part below {self.num_parts}, got {part}"
        start = part * self.rows_per_part
        return range(start, min(start + self.rows_per_part, self.num_samples))

    def part_of(self, sample_id: int) -> int:
        return sample_id // self.rows_per_part

    def part_name(self, part: int) -> str:
        """Names sort as parts do, also where there are more than 100,000."""
        width = max(5, len(str(self.num_parts - 1)))
        return f"part-{part:0{width}d}-of-{self.num_parts:05d}.arrow"


def check_format(layout: Layout) -> None:
    """OutputError for a directory that a version of another format wrote."""
    path = layout.format_path
    found = path.read_text().strip() if path.exists() else ""
    if found != FORMAT:
        raise OutputError(
            f"{layout.root}: written in format {found or 'unknown'}; this version reads {FORMAT}"
        )


def _read_pinned(layout: Layout) -> PinnedInput:
    tree = json.loads(layout.input_path.read_text(encoding="utf-8"))
    with pa.ipc.open_file(layout.input_index_path.read_bytes()) as reader:
        index = reader.read_all().to_pylist()
    for file in tree["files"]:
        file["path"] = str(layout.root / file["path"])
    if tree.get("copy"):  # newer than format 1
        tree["copy"] = str(layout.root / tree["copy"])
    tree["files"] = tuple(InputFile(**file) for file in tree["files"])
    tree["schema"] = bytes.fromhex(tree["schema"])
    tree["faults"] = tuple(tree["faults"])
    for name in ("template_columns", "json_columns"):  # newer than format 1
        tree[name] = tuple(tree.get(name, ()))
    return PinnedInput(chunks=tuple(InputChunk(**row) for row in index), **tree)
