"""The rows of a job's input, copied once into its directory.

One Arrow file holds every row in the pinned types, 1,024 to a batch, beside its line and
what is wrong with it. Whoever reads rows reads batches of this file: what becomes of the files that
the job was submitted with, and how they were laid out, no longer matters.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from spot_batch.inputs.errors import InputError, RowFault
from spot_batch.inputs.in_place import Chunk, stream_chunks
from spot_batch.inputs.unchanged import used_bytes
from spot_batch.records.input import CHUNK_ROWS, InputChunk, PinnedInput

GIB = 1 << 30

_LAYOUT = 1  # raised whenever the same input would be copied in another way
_FAULT = pa.struct(
    [
        ("code", pa.string()),
        ("message", pa.string()),
        ("custom_id", pa.string()),
        ("raw", pa.string()),
    ]
)
_BESIDE = (("line", pa.int64()), ("fault", _FAULT))  # behind the input's own columns, in this order
_ZSTD = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)


def num_copied_bytes(pinned: PinnedInput) -> int:
    """How many bytes of its files a copy of the input would be made of."""
    total = 0
    for number, file in enumerate(pinned.files):
        used = used_bytes(pinned, number)
        total += file.size if used is None else used
    return total


def copy_rows(pinned: PinnedInput, folder: Path) -> PinnedInput:
    """The same input, read from a copy of its rows in `folder`, which is made once and whole.

    The copy is named by what it holds: a job whose submission was cut short finds it again.
    Raises InputError where a file cannot be read or the disk is full.
    """
    schema = pa.ipc.read_schema(pa.py_buffer(pinned.schema))
    types = [pinned.schema.hex(), pinned.json_columns]
    key = json.dumps([_LAYOUT, pinned.identity, types], sort_keys=True)
    path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.arrow"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _remove_left_over(folder)
        partial = folder / f"{os.getpid()}.partial"
        try:
            _write(pinned, schema, partial)
            partial.replace(path)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise InputError(
                f"{folder}: no room for a copy of the input ({error.strerror}); with "
                "input.copy_limit_gib: 0 it is read where it stands"
            ) from error
        finally:
            partial.unlink(missing_ok=True)
    return replace(pinned, copy=str(path), chunks=_chunks(pinned, path, schema))


def _remove_left_over(folder: Path) -> None:
    """Remove what processes that are no longer there had begun to write."""
    for partial in folder.glob("*.partial"):
        try:
            os.kill(int(partial.stem), 0)
        except ProcessLookupError:
            partial.unlink(missing_ok=True)
        except OSError:  # somebody else's process
            pass


class CopiedRows:
    """Reads a copy batch by batch; only the columns of `schema` are unpacked."""

    def __init__(self, pinned: PinnedInput, schema: pa.Schema) -> None:
        self._path = pinned.copy
        self._schema = pa.schema([field.with_nullable(True) for field in schema])
        names = pa.ipc.read_schema(pa.py_buffer(pinned.schema)).names
        self._places = sorted(names.index(name) for name in schema.names)
        self._order = [self._places.index(names.index(name)) for name in schema.names]
        self._reader = _opened(Path(self._path), [*self._places, len(names), len(names) + 1])

    def read(self, number: int) -> Chunk:
        """The chunk of a batch. Raises InputError where the copy is damaged."""
        try:
            batch = self._reader.get_batch(number)
        except (pa.ArrowInvalid, OSError) as error:
            raise InputError(f"{self._path}: damaged: {str(error)[:200]}") from error
        columns = [batch.column(place) for place in self._order]
        lines, faulty = batch.column(len(columns)), batch.column(len(columns) + 1)
        faults, raw = {}, {}
        if faulty.null_count < len(faulty):
            for place, each in enumerate(faulty.to_pylist()):
                if each is not None:
                    code, message = each["code"], each["message"]
                    faults[place] = RowFault(code, message, custom_id=each["custom_id"])
                    raw[place] = each["raw"]
        return Chunk(
            pa.Table.from_arrays(columns, schema=self._schema), faults, raw, lines.to_pylist()
        )


def _write(pinned: PinnedInput, schema: pa.Schema, path: Path) -> None:
    with path.open("wb") as file:
        with pa.ipc.new_file(file, _with_beside(schema), options=_ZSTD) as writer:
            for table in _in_batches(_as_copied(chunk) for chunk in stream_chunks(pinned, schema)):
                writer.write_table(table)
        file.flush()
        os.fsync(file.fileno())


def _with_beside(schema: pa.Schema) -> pa.Schema:
    nullable = [field.with_nullable(True) for field in schema]
    return pa.schema([*nullable, *(pa.field(name, kind) for name, kind in _BESIDE)])


def _in_batches(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The same rows, CHUNK_ROWS at a time."""
    held: list[pa.Table] = []
    num_held = 0
    for table in tables:
        held.append(table)
        num_held += table.num_rows
        if num_held >= CHUNK_ROWS:
            whole = pa.concat_tables(held)
            yield whole.slice(0, CHUNK_ROWS).combine_chunks()
            held, num_held = [whole.slice(CHUNK_ROWS)], num_held - CHUNK_ROWS
    if num_held:
        yield pa.concat_tables(held).combine_chunks()


def _as_copied(chunk: Chunk) -> pa.Table:
    """The rows as they are copied: nulls for a faulty one, whose bytes may be no text at all."""
    num_rows = chunk.table.num_rows
    table, faults = chunk.table, pa.nulls(num_rows, _FAULT)
    if chunk.faults:
        sound = [None if place in chunk.faults else place for place in range(num_rows)]
        table = table.take(pa.array(sound, pa.int64()))
        faults = pa.array([_told(chunk, place) for place in range(num_rows)], _FAULT)
    columns = [*table.columns, pa.array(chunk.lines, pa.int64()), faults]
    return pa.Table.from_arrays(columns, schema=_with_beside(table.schema))


def _told(chunk: Chunk, place: int) -> dict[str, str | None] | None:
    if place not in chunk.faults:
        return None
    fault, raw = chunk.faults[place], chunk.raw.get(place, "")
    return {
        "code": fault.code,
        "message": fault.message,
        "custom_id": fault.custom_id,
        "raw": raw,
    }


def _chunks(pinned: PinnedInput, path: Path, schema: pa.Schema) -> tuple[InputChunk, ...]:
    """The batches of a copy."""
    reader = _opened(path, [len(schema)])
    chunks: list[InputChunk] = []
    first_row = 0
    for number in range(reader.num_record_batches):
        num_rows = reader.get_batch(number).num_rows
        chunks.append(
            InputChunk(
                file=0,
                first_row=first_row,
                num_rows=num_rows,
                offset=number,
                num_bytes=0,
                line=0,
            )
        )
        first_row += num_rows
    if first_row != pinned.num_rows:
        raise InputError(f"{path}: damaged: {first_row} rows of {pinned.num_rows}")
    return tuple(chunks)


def _opened(path: Path, places: Sequence[int]) -> pa.ipc.RecordBatchFileReader:
    try:
        options = pa.ipc.IpcReadOptions(included_fields=list(places), use_threads=False)
        return pa.ipc.open_file(pa.memory_map(str(path)), options=options)
    except FileNotFoundError:
        raise InputError(f"{path}: gone since the job was submitted") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"{path}: damaged: {str(error)[:200]}") from error
