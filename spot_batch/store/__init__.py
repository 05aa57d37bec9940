"""The job directory is the job: segments in, parts out, everything rebuilt from files alone.

Pure pyarrow, numpy and the standard library; `datasets` is loaded by `load` only.
"""

from spot_batch.store.check import compare_audits, incomparable_ids
from spot_batch.store.directory import (
    JobDirectory,
    OutputError,
    SpecConflict,
    StorageFull,
)
from spot_batch.store.events import append_event, read_events, read_heartbeat, write_heartbeat
from spot_batch.store.finalize import finalize, write_card
from spot_batch.store.intervals import IntervalSet
from spot_batch.store.lease import DriverAlive, DriverLease, acquire_driver_lease, read_driver
from spot_batch.store.load import load
from spot_batch.store.mirror import Mirror, address_of, folder_of, is_driven_from, mirrored
from spot_batch.store.parts import compact, delete_covered_segments
from spot_batch.store.retry import begin_retry, retried_parts
from spot_batch.store.scan import PartInfo, Published, fault_of_parts, scan
from spot_batch.store.schema import completion_schema
from spot_batch.store.segments import SegmentInfo, publish_segment
from spot_batch.store.summary import Summary, Totals

__all__ = [
    "DriverAlive",
    "DriverLease",
    "IntervalSet",
    "JobDirectory",
    "Mirror",
    "OutputError",
    "PartInfo",
    "Published",
    "SegmentInfo",
    "SpecConflict",
    "StorageFull",
    "Summary",
    "Totals",
    "acquire_driver_lease",
    "address_of",
    "append_event",
    "begin_retry",
    "compact",
    "compare_audits",
    "completion_schema",
    "delete_covered_segments",
    "fault_of_parts",
    "finalize",
    "folder_of",
    "incomparable_ids",
    "is_driven_from",
    "load",
    "mirrored",
    "publish_segment",
    "read_driver",
    "read_events",
    "read_heartbeat",
    "retried_parts",
    "scan",
    "write_card",
    "write_heartbeat",
]
