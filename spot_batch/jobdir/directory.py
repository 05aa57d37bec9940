"""The job directory: where everything stands, and whose it is."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pyarrow as pa
import yaml  # type: ignore[import-untyped, unused-ignore]

from spot_batch.job.fingerprint import diff_fields
from spot_batch.job.reading import check_spec, dump_spec
from spot_batch.job.spec import JobSpec, SpecError
from spot_batch.jobdir.card import CardFacts, render_card
from spot_batch.jobdir.files import (
    OutputError,
    Reach,
    StorageFull,
    clear_folder,
    link_whole,
    speaking_plainly,
    staged,
    sync_folder,
    unhindered,
    write_atomically,
    write_durably,
)
from spot_batch.jobdir.schema import BATCH_ROWS, completion_schema, kept_columns
from spot_batch.records.input import InputChunk, InputFile, PinnedInput
from spot_batch.version import __version__

__all__ = ["BATCH_ROWS", "JobDirectory", "OutputError", "SpecConflict", "StorageFull"]

FORMAT = "1"
TOOL_VERSION = __version__

_INDEX_SCHEMA = pa.schema(
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


@dataclass(frozen=True, slots=True)
class _State:
    spec: JobSpec
    fingerprint: str
    fields: Mapping[str, object]
    pinned: PinnedInput
    schema: pa.Schema


class JobDirectory:
    """Every path of a job, and what the job is once it has been created.

    A `JobDirectory(root)` may point at nothing yet; `create_or_open` or `open` give one whose
    `spec`, `fingerprint`, `pinned` and `schema` are there. `reach` is for tests: it is called with
    the name of each step of publication, so that a test can stop the process there.
    """

    def __init__(self, root: Path | str, *, reach: Reach = unhindered) -> None:
        self.root = Path(os.path.abspath(root))
        self.reach = reach
        self._loaded: _State | None = None

    @classmethod
    def open(cls, root: Path | str, *, reach: Reach = unhindered) -> JobDirectory:
        """The job in `root`; OutputError where there is none."""
        job = cls(root, reach=reach)
        if not job.exists:
            from spot_batch.jobdir.mirror import address_of

            raise OutputError(
                f"{address_of(job.root)}: is not a job directory (no _spot/fingerprint.json)"
            )
        job._check_format()
        job._loaded = job._read_state()
        return job

    def create_or_open(
        self,
        spec: JobSpec,
        *,
        fingerprint: str,
        fields: Mapping[str, object],
        pinned: PinnedInput,
    ) -> JobDirectory:
        """The job of this fingerprint, begun here or gone on with.

        Raises SpecConflict for a directory of another fingerprint, OutputError for one that is not
        ours. What does not decide the output (actors, scheduling) is written anew.
        """
        self.check_usable()
        if self.exists:
            self._check_format()
            stored = json.loads(self.fingerprint_path.read_text())
            if stored["fingerprint"] != fingerprint:
                lines = tuple(diff_fields(stored["fields"], json.loads(json.dumps(dict(fields)))))
                raise SpecConflict(str(self.root), lines)
            self._write_spec_and_input(spec, pinned)
        else:
            if (self.spot / "format").exists():  # a creation cut short, maybe of a later version
                self._check_format()
            self._create(spec, fingerprint=fingerprint, fields=fields, pinned=pinned)
        return JobDirectory.open(self.root, reach=self.reach)

    def check_usable(self) -> None:
        """OutputError unless the folder is absent, empty or a job's, and can be written to."""
        root = self.root
        if root.exists() and not root.is_dir():
            raise OutputError(f"{root}: is a file; the output is a folder")
        if (root / "_spot").is_symlink():
            raise OutputError(f"{root}/_spot: is a link; refused")
        if root.is_dir() and not (self.spot / "format").exists():
            strangers = sorted(e.name for e in os.scandir(root) if not self._is_begun(e))
            if strangers:
                raise OutputError(
                    f"{root}: is not empty and not a job directory (it holds {strangers[0]!r}); "
                    "give another output folder"
                )
        with speaking_plainly(root):
            self.tmp.mkdir(parents=True, exist_ok=True)
        probe = self.tmp / f"{os.getpid()}-probe"
        write_durably(probe, b"")
        probe.unlink(missing_ok=True)

    @contextmanager
    def as_it_was_if_refused(self) -> Iterator[None]:
        """A ValueError before a job is begun here leaves the folder as it was, or not there.

        Nothing is taken from a folder that held job state before, or that another process drives.
        """
        root_was, spot_was = self.root.exists(), self.spot.exists()
        try:
            yield
        except ValueError:
            begun = (self.spot / "format").exists() or self.driver_path.exists()
            if not (spot_was or begun):
                clear_folder(self.hub_input)
                folders = (self.hub_input, self.tmp, self.spot)
                for folder in (*folders, *(() if root_was else (self.root,))):
                    with suppress(OSError):  # not there, or not empty: somebody's
                        folder.rmdir()
            raise

    def _is_begun(self, entry: os.DirEntry[str]) -> bool:
        """Whether an entry is what a creation that was cut short leaves: our names, no content."""
        if entry.name == self.spot.name:
            return True
        ours = {self.data.name, self.stats.name, self.audit.name}
        is_folder = entry.is_dir(follow_symlinks=False)
        return entry.name in ours and is_folder and not os.listdir(entry.path)

    @property
    def exists(self) -> bool:
        """Whether a job was created here (its last file is there)."""
        return self.fingerprint_path.is_file()

    # -- what the job is ---------------------------------------------------------------------------

    @property
    def spec(self) -> JobSpec:
        return self._state.spec

    @property
    def fingerprint(self) -> str:
        return self._state.fingerprint

    @property
    def fields(self) -> Mapping[str, object]:
        return self._state.fields

    @property
    def pinned(self) -> PinnedInput:
        return self._state.pinned

    @property
    def schema(self) -> pa.Schema:
        """The frozen schema of data/, with the metadata that every part carries."""
        return self._state.schema

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
        return f"part-{part:05d}-of-{self.num_parts:05d}.arrow"

    @property
    def is_complete(self) -> bool:
        return self.success.exists()

    # -- where things stand ------------------------------------------------------------------------

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def errors(self) -> Path:
        return self.root / "errors"

    @property
    def stats(self) -> Path:
        return self.root / "stats"

    @property
    def audit(self) -> Path:
        return self.root / "audit"

    @property
    def readme(self) -> Path:
        return self.root / "README.md"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def summary_path(self) -> Path:
        return self.root / "summary.json"

    @property
    def success(self) -> Path:
        return self.root / "_SUCCESS"

    @property
    def spot(self) -> Path:
        return self.root / "_spot"

    @property
    def segments(self) -> Path:
        return self.spot / "segments"

    @property
    def tmp(self) -> Path:
        return self.spot / "tmp"

    @property
    def logs(self) -> Path:
        return self.spot / "logs"

    @property
    def control(self) -> Path:
        return self.spot / "control"

    @property
    def retry(self) -> Path:
        """A marker for each part that is being revised and does not count meanwhile."""
        return self.spot / "retry"

    @property
    def checkpoints(self) -> Path:
        """Whole blocks of samples in flight."""
        return self.spot / "checkpoints"

    @property
    def hub_input(self) -> Path:
        """Where a hub dataset is kept as Parquet."""
        return self.spot / "input"

    @property
    def spec_path(self) -> Path:
        return self.spot / "spec.yaml"

    @property
    def fingerprint_path(self) -> Path:
        return self.spot / "fingerprint.json"

    @property
    def input_path(self) -> Path:
        return self.spot / "input.json"

    @property
    def input_index_path(self) -> Path:
        return self.spot / "input-index.arrow"

    @property
    def schema_path(self) -> Path:
        return self.spot / "schema.arrow"

    def claim_numerics(self, mine: Mapping[str, object]) -> dict[str, object]:
        """The arithmetic that the job was begun with: `mine` where this actor is the first.

        What comes back is for the actor to compare with its own.
        """
        with staged(self.tmp) as path:
            write_durably(path, json.dumps(mine, indent=2).encode() + b"\n")
            link_whole(path, self.numerics_path)
        first: dict[str, object] = json.loads(self.numerics_path.read_text())
        return first

    @property
    def numerics_path(self) -> Path:
        return self.spot / "numerics.json"

    def latency(self, of_what: Mapping[str, object]) -> str | None:
        """The latency table that an actor on such a device has kept here."""
        path = self.latency_path(of_what)
        return path.read_text(encoding="utf-8") if path.exists() else None

    def keep_latency(self, of_what: Mapping[str, object], table: str) -> str:
        """Keep a table, unless another actor was first: its table comes back then."""
        path = self.latency_path(of_what)
        with staged(self.tmp) as aside:
            write_durably(aside, table.encode())
            link_whole(aside, path)
        return path.read_text(encoding="utf-8")

    def latency_path(self, of_what: Mapping[str, object]) -> Path:
        """Where the table of one kind of device, model and settings is."""
        digest = hashlib.sha256(json.dumps(of_what, sort_keys=True).encode()).hexdigest()
        return self.spot / f"latency-{digest[:16]}.json"

    @property
    def driver_path(self) -> Path:
        return self.spot / "driver.json"

    @property
    def heartbeat_path(self) -> Path:
        return self.spot / "heartbeat.json"

    @property
    def events_path(self) -> Path:
        return self.spot / "events.jsonl"

    # -- reading and writing it --------------------------------------------------------------------

    @property
    def _state(self) -> _State:
        if self._loaded is None:
            self._loaded = JobDirectory.open(self.root)._loaded
        assert self._loaded is not None
        return self._loaded

    def _check_format(self) -> None:
        path = self.spot / "format"
        found = path.read_text().strip() if path.exists() else ""
        if found != FORMAT:
            raise OutputError(
                f"{self.root}: written in format {found or 'unknown'}; this version reads {FORMAT}"
            )

    def _create(
        self,
        spec: JobSpec,
        *,
        fingerprint: str,
        fields: Mapping[str, object],
        pinned: PinnedInput,
    ) -> None:
        input_schema = pa.ipc.read_schema(pa.py_buffer(pinned.schema))
        schema = completion_schema(input_schema, spec).with_metadata(
            _schema_metadata(fingerprint, fields)
        )
        folders = (self.data, self.stats, self.audit, self.segments, self.control, self.logs)
        with speaking_plainly(self.root):
            self.tmp.mkdir(parents=True, exist_ok=True)
        # Before anything that a person sees: a stop from here on leaves a folder known as ours.
        self._write(self.spot / "format", FORMAT + "\n")
        sync_folder(self.root)
        with speaking_plainly(self.root):
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
        facts = CardFacts(spec=spec, fingerprint=fingerprint, fields=fields, pinned=pinned)
        self._write(self.readme, render_card(facts))
        self._write_spec_and_input(spec, pinned)
        write_atomically(self.schema_path, schema.serialize().to_pybytes(), tmp=self.tmp)
        stored = {"fingerprint": fingerprint, "fields": dict(fields)}
        self._write(self.fingerprint_path, json.dumps(stored, indent=1, sort_keys=True) + "\n")

    def _write_spec_and_input(self, spec: JobSpec, pinned: PinnedInput) -> None:
        self._write(self.spec_path, dump_spec(spec))
        columns = {
            name: [getattr(chunk, name) for chunk in pinned.chunks] for name in _INDEX_SCHEMA.names
        }
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, _INDEX_SCHEMA) as writer:
            writer.write_table(pa.table(columns, schema=_INDEX_SCHEMA))
        write_atomically(self.input_index_path, sink.getvalue().to_pybytes(), tmp=self.tmp)
        tree = asdict(replace(pinned, chunks=()))
        del tree["chunks"]
        tree["schema"] = pinned.schema.hex()
        for file in tree["files"]:
            path = Path(file["path"])
            if path.is_relative_to(self.root):  # a folder that is moved keeps its own input
                file["path"] = str(path.relative_to(self.root))
        if pinned.copy:
            tree["copy"] = str(Path(pinned.copy).relative_to(self.root))
        self._write(self.input_path, json.dumps(tree, indent=1) + "\n")

    def _read_state(self) -> _State:
        stored = json.loads(self.fingerprint_path.read_text())
        try:
            spec = check_spec(yaml.safe_load(self.spec_path.read_text(encoding="utf-8")))
        except SpecError as error:
            raise OutputError(f"{self.spec_path}: {error}") from error
        return _State(
            spec=spec,
            fingerprint=stored["fingerprint"],
            fields=stored["fields"],
            pinned=self._read_pinned(),
            schema=pa.ipc.read_schema(pa.py_buffer(self.schema_path.read_bytes())),
        )

    def _read_pinned(self) -> PinnedInput:
        tree = json.loads(self.input_path.read_text(encoding="utf-8"))
        with pa.ipc.open_file(self.input_index_path.read_bytes()) as reader:
            index = reader.read_all().to_pylist()
        for file in tree["files"]:
            file["path"] = str(self.root / file["path"])
        if tree.get("copy"):  # newer than format 1
            tree["copy"] = str(self.root / tree["copy"])
        tree["files"] = tuple(InputFile(**file) for file in tree["files"])
        tree["schema"] = bytes.fromhex(tree["schema"])
        tree["faults"] = tuple(tree["faults"])
        tree["template_columns"] = tuple(tree.get("template_columns", ()))  # newer than format 1
        return PinnedInput(chunks=tuple(InputChunk(**row) for row in index), **tree)

    def _write(self, path: Path, text: str) -> None:
        write_atomically(path, text.encode(), tmp=self.tmp)


def _schema_metadata(fingerprint: str, fields: Mapping[str, object]) -> dict[str, str]:
    model = {
        key.removeprefix("model."): value
        for key, value in fields.items()
        if key.startswith("model.")
    }
    return {
        "spot_batch.fingerprint": fingerprint,
        "spot_batch.model": json.dumps(model, sort_keys=True, separators=(",", ":")),
        "spot_batch.version": TOOL_VERSION,
    }
