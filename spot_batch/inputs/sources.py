"""From what a person wrote as `input.source` to the files it means."""

from __future__ import annotations

import difflib
import glob
import hashlib
import json
import os
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from spot_batch.inputs.copies import COMPRESSED, JOB_STATE, Origin, keep, list_remote, num_files
from spot_batch.inputs.errors import InputError
from spot_batch.job.reading import check_spec
from spot_batch.job.secrets import redacted
from spot_batch.job.spec import InputSpec, JobSpec

_BY_SUFFIX = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonlines": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".csv": "csv",
    ".tsv": "csv",
}
_BUNDLED = "bundled:"
_HUB = "hf://datasets/"
_SPLIT = re.compile(r"(train|test|valid|dev|eval)(?:idation|uation)?(?=[-_.\d])", re.IGNORECASE)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to read. `digest` is given where content has a better name than its bytes; `origin`
    is what `path` was unpacked or copied from, if it was."""

    path: Path
    format: str
    digest: str | None = None
    origin: Origin | None = None

    @property
    def name(self) -> str:
        """What a person calls it."""
        return self.origin.name if self.origin is not None else str(self.path)


def find_files(spec: InputSpec, *, hub_dir: Path | None) -> list[SourceFile]:
    """The files of every source, in the order given; those of a folder or pattern by name."""
    files = [file for source in spec.source for file in _files_of(source, spec, hub_dir)]
    formats = sorted({file.format for file in files})
    if len(formats) > 1:
        examples = [next(f for f in files if f.format == each) for each in formats]
        names = " and ".join(f"{each.path.name} ({each.format})" for each in examples)
        raise InputError(f"input.source: files of one format make a job, got {names}")
    seen: set[Path] = set()
    for file in files:
        if file.path in seen:
            raise InputError(f"input.source: {file.path} is named twice")
        seen.add(file.path)
    return files


def _files_of(source: str, spec: InputSpec, hub_dir: Path | None) -> Iterator[SourceFile]:
    if source.startswith(_HUB):
        yield _from_hub(source.removeprefix(_HUB), spec, hub_dir)
        return
    if source.startswith(_BUNDLED):
        yield _bundled(source)
        return
    if source.startswith("file://"):
        source = unquote(urlsplit(source).path)
    if "://" in source:
        origins = list_remote(source, readable=lambda name: _suffix(name) in _BY_SUFFIX)
        if not glob.has_magic(source):
            names = [origin.name.rpartition("/")[2] for origin in origins]
            _check_one_split(redacted(source.rstrip("/")), names)
        for origin in origins:
            yield _kept(origin, spec, hub_dir)
        return
    path = Path(source).absolute()
    if path.is_dir():
        yield from _from_folder(path, spec, hub_dir)
    elif path.exists():
        yield _local(path, spec, hub_dir)
    elif glob.has_magic(source):
        matches = sorted(glob.glob(source, recursive=True))
        plain = takewhile(lambda part: not glob.has_magic(part), Path(source).parts)
        files = [Path(each).absolute() for each in matches if Path(each).is_file()]
        found = _without_jobs(files, Path(*plain).absolute())
        if not found:
            raise InputError(
                f"input.source: no file matches {source!r}{_left_out(len(files) - len(found))}"
            )
        for each in found:
            yield _local(each, spec, hub_dir)
    elif (
        _HUB_ID.fullmatch(source)
        and _suffix(source) not in _BY_SUFFIX
        and not Path(source).parent.is_dir()  # a path that is mistyped
    ):
        yield _from_hub(source, spec, hub_dir)
    else:
        raise InputError(f"input.source: no such file: {source}{_nearby(path)}")


def with_pipes_kept(spec: JobSpec, folder: Path) -> JobSpec:
    """The spec with a copy in `folder` in the place of each source that can be read only once:
    `-`, the standard input, and named pipes."""
    sources = [_piped(source, folder) for source in spec.input.source]
    if tuple(sources) == spec.input.source:
        return spec
    tree = spec.model_dump()
    tree["input"]["source"] = sources
    return check_spec(tree)


def _piped(source: str, folder: Path) -> str:
    if source != "-" and not Path(source).is_fifo():
        return source
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{os.getpid()}.partial"
    digest = hashlib.sha256()
    try:
        with _opened_pipe(source) as stream, partial.open("wb") as file:
            while block := stream.read(1 << 20):
                digest.update(block)
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        suffix = Path(source).suffix or _suffix_of_content(partial)
        name = "stdin" if source == "-" else "pipe"
        kept = folder / f"{name}-{digest.hexdigest()[:8]}{suffix}"
        partial.replace(kept)
    finally:
        partial.unlink(missing_ok=True)
    return str(kept)


def _opened_pipe(source: str) -> AbstractContextManager[IO[bytes]]:
    return nullcontext(sys.stdin.buffer) if source == "-" else Path(source).open("rb")


def _suffix_of_content(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(4_096)
    for start, suffix in ((b"PAR1", ".parquet"), (b"ARROW1", ".arrow"), (b"\xff" * 4, ".arrow")):
        if head.startswith(start):
            return suffix
    return ".json" if head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"[") else ""


def _bundled(source: str) -> SourceFile:
    """`bundled:prompts` is prompts.jsonl of the package's own files."""
    folder = Path(__file__).parent.parent / "assets"
    names = [path.stem for path in sorted(folder.glob("*.jsonl"))]
    if source.removeprefix(_BUNDLED) not in names:
        raise InputError(
            f"input.source: the package has no {source!r}; it has "
            f"{', '.join(_BUNDLED + name for name in names)}"
        )
    return SourceFile(folder / f"{source.removeprefix(_BUNDLED)}.jsonl", "jsonl")


def _from_folder(folder: Path, spec: InputSpec, hub_dir: Path | None) -> Iterator[SourceFile]:
    if any((folder / name).exists() for name in ("state.json", "dataset_dict.json")):
        yield _as_parquet(_saved(folder, spec), hub_dir)
        return
    if spec.format == "hf":
        yield _as_parquet(_prepared(str(folder), spec)[0], hub_dir)
        return
    files = [
        path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and not path.name.startswith((".", "_"))
        and _suffix(path.name) in _BY_SUFFIX
    ]
    found = _without_jobs(files, folder)
    _check_one_of(folder, found)
    if not found:
        raise InputError(
            f"input.source: the folder {folder} holds no file that can be read "
            f"({', '.join(_BY_SUFFIX)}){_left_out(len(files) - len(found))}"
        )
    for path in found:
        yield _local(path, spec, hub_dir)


def _check_one_of(folder: Path, files: list[Path]) -> None:
    """InputError where a folder's files are not all that are in it, or are several splits of one
    dataset: what is meant is for a person to say."""
    deeper = [
        path
        for path in sorted(folder.glob("*/**/*"))
        if _suffix(path.name) in _BY_SUFFIX
        and not any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)
        and path.is_file()
    ]
    deeper = _without_jobs(deeper, folder)
    if deeper:
        own = f"'{folder}/*{_suffix(files[0].name)}*' or " if files else ""
        raise InputError(
            f"input.source: {folder} holds {num_files(len(files))} to read and its folders "
            f"{len(deeper):,} more ({deeper[0].relative_to(folder)}); say which: "
            f"{own}'{folder}/**/*{_suffix(deeper[0].name)}*'"
        )
    _check_one_split(str(folder), [path.name for path in files])


def _check_one_split(folder: str, names: list[str]) -> None:
    splits = {match[1].lower(): name for name in names if (match := _SPLIT.match(name))}
    if len(splits) > 1:
        shown = " and ".join(splits.values())
        first = next(iter(splits.values()))
        raise InputError(
            f"input.source: {folder} holds several splits of a dataset ({shown}); say which: "
            f"'{folder}/{first[: len(next(iter(splits)))]}*', or input.format: hf with input.split"
        )


def _without_jobs(files: list[Path], named: Path) -> list[Path]:
    """The files that are no part of a job directory at or below `named`.

    A job's output may stand among its input: what the job writes must not change what it reads.
    A folder inside a job that is itself named (out/data) is read, as input of the next job.
    """
    is_job: dict[Path, bool] = {}

    def is_of_a_job(file: Path) -> bool:
        for folder in file.parents:
            if folder.name == JOB_STATE:  # also before the job's first file says that it is one
                return True
            if folder not in is_job:
                is_job[folder] = (folder / JOB_STATE / "format").is_file()
            if is_job[folder]:
                return True
            if folder == named:
                break
        return False

    return [file for file in files if not is_of_a_job(file)]


def _left_out(count: int) -> str:
    if not count:
        return ""
    return f"; {count} left out as files of a job directory (name its data folder to read it)"


def _local(path: Path, spec: InputSpec, hub_dir: Path | None) -> SourceFile:
    """A file as it stands, or unpacked once: rows of a compressed one have no place in it."""
    if path.suffix.lower() in COMPRESSED:
        return _kept(Origin.of_file(path), spec, hub_dir)
    return SourceFile(path, _format_of(path, spec))


def _kept(origin: Origin, spec: InputSpec, hub_dir: Path | None) -> SourceFile:
    assert hub_dir is not None, "a compressed or remote file wants a folder to be kept in"
    path = keep(origin, hub_dir)
    return SourceFile(path, _format_of(path, spec, shown=origin.name), origin=origin)


def _suffix(name: str) -> str:
    """What a file is by its name, under its compression: `.jsonl` of rows.jsonl.gz."""
    path = Path(name.lower())
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def _format_of(path: Path, spec: InputSpec, *, shown: str = "") -> str:
    suffix = path.suffix.lower()
    if spec.format == "hf":
        raise InputError(
            f"input.format: hf reads a folder or a hub dataset, got the file {shown or path}"
        )
    if spec.format != "auto":
        return spec.format
    kind = _BY_SUFFIX.get(suffix)
    if kind is None:
        raise InputError(
            f"input.source: the format of {shown or path} does not show in its name; give "
            "input.format (jsonl, json, parquet, arrow, csv or openai-batch)"
        )
    if kind == "json" and not _is_array(path):
        return "jsonl"
    return kind


def _is_array(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4_096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _nearby(path: Path) -> str:
    if not path.parent.is_dir():
        return f" (nor is there a folder {path.parent})"
    near = difflib.get_close_matches(path.name, [each.name for each in path.parent.iterdir()], n=1)
    return f"; did you mean {near[0]}?" if near else ""


# -- datasets --------------------------------------------------------------------------------------


def _from_hub(name: str, spec: InputSpec, hub_dir: Path | None) -> SourceFile:
    """A hub dataset, downloaded once: a resume finds it beside the job and asks nobody."""
    assert hub_dir is not None, "a hub dataset wants a folder to be kept in"
    key = json.dumps([name, spec.config, spec.split, spec.revision])
    note = hub_dir / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    if note.exists():
        stored = json.loads(note.read_text())
        path = hub_dir / stored["file"]
        if path.exists():
            return SourceFile(path, "parquet", stored["digest"])
    dataset, commit = _prepared(name, spec)
    file = _as_parquet(dataset, hub_dir)
    digest = f"hub:{name}@{commit}:{spec.config}:{spec.split}" if commit else None
    note.write_text(json.dumps({"file": file.path.name, "digest": digest}))
    return SourceFile(file.path, "parquet", digest)


def _saved(folder: Path, spec: InputSpec) -> Any:
    """The rows of a dataset that was saved to a folder, of one split where it has several."""
    import datasets

    splits = folder / "dataset_dict.json"
    if splits.exists():
        names = json.loads(splits.read_text(encoding="utf-8"))["splits"]
        _check_split(names, spec, str(folder))
        folder = folder / spec.split
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    if not state["_data_files"]:  # of no rows: the library cannot load what it saved
        features = datasets.DatasetInfo.from_directory(str(folder)).features
        return datasets.Dataset(features.arrow_schema.empty_table())
    return datasets.load_from_disk(str(folder))


def _prepared(name: str, spec: InputSpec) -> tuple[Any, str | None]:
    """(the split of a hub dataset or a dataset folder, the commit it was resolved to)."""
    import datasets

    try:
        builder = datasets.load_dataset_builder(name, spec.config, revision=spec.revision)
        builder.download_and_prepare()
        loaded = builder.as_dataset()
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise InputError(
            f"input.source: neither a file nor a dataset that can be read: {name!r} "
            f"({' '.join(str(error).split())[:300]})"
        ) from error
    resolved = re.search(r"@([0-9a-f]{40})/", str(builder.config.data_files))
    return _one_split(loaded, spec, name), resolved[1] if resolved else None


def _one_split(loaded: Any, spec: InputSpec, name: str) -> Any:
    if not isinstance(loaded, dict):
        return loaded
    _check_split(loaded, spec, name)
    return loaded[spec.split]


def _check_split(splits: Collection[str], spec: InputSpec, name: str) -> None:
    if spec.split not in splits:
        raise InputError(
            f"input.split: {name} has no split {spec.split!r}; "
            f"it has {', '.join(map(repr, splits))}"
        )


def _as_parquet(dataset: Any, hub_dir: Path | None) -> SourceFile:
    """Writes a Dataset as Parquet under a name made of its content."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    assert hub_dir is not None, "a dataset folder wants a folder to be kept in"
    hub_dir.mkdir(parents=True, exist_ok=True)
    table: pa.Table = dataset.with_format("arrow")[:]
    partial = hub_dir / f"{os.getpid()}.partial"
    try:
        pq.write_table(table, partial, row_group_size=8_192, compression="zstd")
        with partial.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        path = hub_dir / f"{digest[:16]}.parquet"
        if not path.exists():
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return SourceFile(path, "parquet")
