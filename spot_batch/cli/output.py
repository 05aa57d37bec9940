"""Whether a job's results can go where its spec says, before anything is started."""

from __future__ import annotations

import json

import pyarrow as pa

from spot_batch.job.fingerprint import diff_fields
from spot_batch.job.spec import JobSpec
from spot_batch.jobdir.creation import check_free
from spot_batch.jobdir.directory import JobDirectory, SpecConflict
from spot_batch.jobdir.files import OutputError
from spot_batch.jobdir.layout import Layout
from spot_batch.jobdir.schema import completion_schema
from spot_batch.results.export import ExportFormat, check_holds, format_of
from spot_batch.service.plan import JobPlan


def check_output(spec: JobSpec) -> Layout:
    """The job directory that a spec names, which is neither made nor changed.

    Raises OutputError where it is somebody else's or cannot be written to, and where the one file
    that a job is to write is there already.
    """
    directory = Layout(spec.directory)
    file = spec.output.file
    if file is not None and file.exists() and not directory.exists:
        raise OutputError(f"{file}: is there already; give another output")
    check_free(directory)
    return directory


def check_planned(directory: Layout, plan: JobPlan) -> None:
    """Raises SpecConflict where the directory holds another job, and ValueError where the one file
    that a job is to write cannot hold its columns."""
    check_same(directory, plan)
    if plan.spec.output.file is not None:
        check_holds(columns_of(plan), file_format(plan.spec))


def check_same(directory: Layout, plan: JobPlan) -> None:
    """SpecConflict where the job in a directory is another one."""
    if not directory.exists:
        return
    job = JobDirectory.open(directory.root)
    if job.fingerprint != plan.fingerprint:
        now = json.loads(json.dumps(plan.fields))
        raise SpecConflict(str(directory.root), tuple(diff_fields(job.fields, now)))


def columns_of(plan: JobPlan) -> pa.Schema:
    """The columns of a job's data."""
    of_input = pa.ipc.read_schema(pa.py_buffer(plan.pinned.schema))
    return completion_schema(of_input, plan.spec)


def file_format(spec: JobSpec) -> ExportFormat:
    """The format of the one file that a job writes; of requests it holds their responses."""
    assert spec.output.file is not None, "the job writes no single file"
    is_batch = spec.input.format == "openai-batch"
    return "openai-batch" if is_batch else format_of(spec.output.file)
