"""How much of a device's memory the prefixes of the samples in flight may take."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from spot_batch.checkpoints.shapes import padded_length
from spot_batch.records.sampling import Request

logger = logging.getLogger(__name__)

GIB = 1 << 30

_MEMINFO = Path("/proc/meminfo")
_CGROUPS = Path("/sys/fs/cgroup")
_CGROUP_FILES = (  # of versions 2 and 1: limit, usage, and the pages in it that can be dropped
    ("memory.max", "memory.current", "memory.stat", ("inactive_file", "active_file")),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        ("total_inactive_file", "total_active_file"),
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixMemory:
    """Bytes that prefixes may take in all, and what one position of one sample takes."""

    num_bytes: int
    position_bytes: int

    @property
    def num_positions(self) -> int:
        """How many positions all samples together may have."""
        return self.num_bytes // self.position_bytes

    def fault(self, request: Request, *, block_length: int) -> str | None:
        """Why a sample cannot even fly alone; None where it can."""
        num_positions = longest_prefix(request, block_length)
        needed = num_positions * self.position_bytes
        if needed <= self.num_bytes:
            return None
        return (
            f"its {len(request.prompt_ids):,} prompt tokens and max_new_tokens "
            f"{request.params.max_new_tokens:,} take {needed:,} bytes of prefix memory, there are "
            f"{self.num_bytes:,} (resources.prefix_share, resources.prefix_gib)"
        )


@dataclass(slots=True)
class Ladder:
    """How many of `what` a call takes; half as many from then on where memory does not hold them,
    but `least` at the least."""

    what: str
    most: int
    least: int

    def step_down(self, error: BaseException, num: int) -> None:
        """A call with so many raised `error`. Raises it again unless memory ended and fewer are
        still a call."""
        if not is_out_of_memory(error) or min(self.most, num) <= self.least:
            raise error
        self.most = max(self.least, min(self.most, num) // 2)
        logger.warning("out of memory: at most %d %s now", self.most, self.what)


def longest_prefix(request: Request, block_length: int) -> int:
    """Positions that a sample's row of the cache holds at most, padding included."""
    begun = request.begun
    prompt = len(request.prompt_ids)
    end = prompt + request.params.max_new_tokens
    written = prompt + (len(begun.token_ids) if begun is not None else 0)
    return padded_length(max(-(-end // block_length) * block_length, written))


def prefix_memory(
    device: torch.device,
    *,
    position_bytes: int,
    share: float,
    gib: float | None = None,
    num_sharing: float = 1.0,
    reserved: int = 0,
) -> PrefixMemory:
    """What prefixes may take: so many GiB if given, else a share of what is free on the device now.

    `num_sharing` actors take as much each, and each has `reserved` something for other ends. It is
    to be called when the weights are loaded.
    """
    free = max(0.0, free_bytes(device) / num_sharing - reserved)
    num_bytes = gib * GIB if gib is not None else share * free
    return PrefixMemory(num_bytes=int(num_bytes), position_bytes=position_bytes)


def is_out_of_memory(error: BaseException) -> bool:
    """CUDA has a class for it; on a CPU the message of a RuntimeError tells."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(part in str(error) for part in ("not enough memory", "can't allocate memory"))


def free_bytes(device: torch.device) -> int:
    """Memory of a device that nobody uses; of a CPU what this process may still take."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = _available(_MEMINFO.read_text(encoding="ascii"))
    within = free_in_cgroup(_CGROUPS)
    return free if within is None else min(free, within)


def free_in_cgroup(folder: Path) -> int | None:
    """What a container may still take; None where it has no limit. Files that were read count as
    used there, and are dropped when something else wants their pages: they count as free here."""
    for limit_file, used_file, stat_file, droppable in _CGROUP_FILES:
        if not (folder / limit_file).is_file():
            continue
        limit, used, stat = (
            (folder / name).read_text(encoding="ascii").strip()
            for name in (limit_file, used_file, stat_file)
        )
        if limit == "max":
            return None
        pages = dict(line.split() for line in stat.splitlines())
        cached = sum(int(pages.get(name, 0)) for name in droppable)
        return max(0, int(limit) - max(0, int(used) - cached))
    return None


def _available(meminfo: str) -> int:
    for line in meminfo.splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise AssertionError("/proc/meminfo does not say MemAvailable")
