"""An actor: one engine on one device. Leases go in, published segments come out.

A plain class without ray: `offer` and `collect` may be called from any thread while the engine's
own thread decodes, so that leases overlap in one batch.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from transformers import PreTrainedTokenizerFast

from spot_batch.decoding import Engine, EngineSettings, LatencyTable, measure_latency
from spot_batch.decoding.memory import GIB, PrefixMemory, prefix_memory
from spot_batch.drafters.base import Drafter
from spot_batch.drafters.registry import choose_drafter, load_drafter
from spot_batch.inputs import InputReader, PreparedSample, PromptRenderer, RowReader, SamplePreparer
from spot_batch.job import JobSpec
from spot_batch.records import (
    Begun,
    Completion,
    Lease,
    LoadProgress,
    LoadReport,
    Outcome,
    PinnedInput,
    Progress,
    Purpose,
    Receipt,
    Request,
    Rounds,
    RowError,
    unreported,
)
from spot_batch.store import JobDirectory, publish_segment
from spot_batch.store.checkpoints import Checkpoints
from spot_batch.store.files import Reach, unhindered
from spot_batch.targets.registry import ModelInfo, load_tokenizer, resolve_model
from spot_batch.targets.transfer import choose_device

if TYPE_CHECKING:
    from spot_batch.targets.block import BlockTarget

logger = logging.getLogger(__name__)

# On a CPU more samples a forward bring no more tokens a second, only later first rows.
AUTO_MAX_SEQUENCES = {"cpu": 8, "cuda": 128}
# Samples prepared and waiting in the engine, beside those in flight: all that an actor is lent, so
# that the longest of them go first and the last ones to fly are short.
READY_SHARE = 1.0
# An actor that holds fewer samples than so many times its slots says so, once a lease.
SHORT_SHARE = 1.5
# The first rows are published early: a person waits to see them.
FIRST_ROWS = 3
IDLE_WAIT_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorInfo:
    """What an actor is once its models are loaded."""

    index: int
    pid: int
    device: str
    max_sequences: int
    drafter: str
    load_s: float


@dataclass(slots=True)
class _Sample:
    """A sample that this actor owes: prepared, perhaps in flight, not finished."""

    purpose: Purpose
    prepared: PreparedSample


class Decoder(Protocol):
    """What an actor asks of an engine."""

    @property
    def num_active(self) -> int: ...

    @property
    def has_work(self) -> bool: ...

    @property
    def rounds(self) -> Rounds: ...

    def add(self, request: Request) -> None: ...

    def step(self) -> list[Completion]: ...

    def begun(self) -> dict[int, Begun]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """What an actor works with. `text` makes the generation column of token ids; stop strings are
    looked for in the same. `too_large` says why a sample's prefix fits no memory here, if so."""

    engine: Decoder
    preparer: SamplePreparer
    text: Callable[[Sequence[int]], str]
    drafter: str
    too_large: Callable[[Request], str | None] = lambda request: None


Load = Callable[[JobDirectory, torch.device], Loaded]


class Actor:
    """One engine thread over the target and drafter of a job. Call `stop` at the end.

    `load` and `reach` are for tests: another engine, and a call at each step of publication.
    """

    def __init__(
        self,
        out: Path,
        index: int,
        *,
        device: str = "auto",
        report: LoadReport = unreported,
        load: Load | None = None,
        reach: Reach = unhindered,
    ) -> None:
        started_s = time.monotonic()
        self._job = JobDirectory.open(out, reach=reach)
        self._name = f"actor-{index}"
        spec = self._job.spec
        torch.set_num_threads(spec.resources.num_threads)
        where = choose_device(device)
        loaded = load(self._job, where) if load else load_engine(self._job, where, report)
        self._text = loaded.text
        self._engine = loaded.engine
        self._preparer = loaded.preparer
        self._too_large = loaded.too_large
        self._max_sequences = engine_settings(spec, where).max_sequences
        # A trajectory is recorded from its beginning or not at all.
        self._checkpoint_s = (
            math.inf if "trajectory" in spec.output.include else spec.scheduling.checkpoint_seconds
        )
        self._checkpoints = Checkpoints(self._job)
        self._publish_s = spec.scheduling.publish_seconds
        self._queue: deque[tuple[Purpose, int]] = deque()
        self._samples: dict[int, _Sample] = {}
        self._finished: dict[Purpose, list[Outcome]] = {"data": [], "audit": []}
        self._receipts: list[Receipt] = []
        self._last_publish_s = self._last_checkpoint_s = time.monotonic()
        self._has_published = False
        self._stopping = False
        self._runs_short, self._has_asked = False, True
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self.info = ActorInfo(
            index=index,
            pid=os.getpid(),
            device=str(where),
            max_sequences=self._max_sequences,
            drafter=loaded.drafter,
            load_s=time.monotonic() - started_s,
        )
        self._started_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def offer(self, lease: Lease) -> None:
        """Take on a lease; its samples join the batch as there is room."""
        with self._changed:
            self._queue.extend((lease.purpose, sample_id) for sample_id in lease.sample_ids)
            self._has_asked = False
            self._changed.notify_all()

    def collect(self, timeout_s: float) -> Progress:
        """What was published since the last call; waits for something, or for samples to run short,
        until the time is up.

        Raises what ended the engine's thread, if anything did.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._receipts
                    or self._runs_short
                    or self._failure
                    or not self._thread.is_alive()
                ),
                timeout=timeout_s,
            )
            self._runs_short = False
            receipts, self._receipts = tuple(self._receipts), []
            if self._failure is not None and not receipts:
                raise self._failure
            num_owed, num_active = len(self._queue) + len(self._samples), self._engine.num_active
            return Progress(
                receipts=receipts,
                num_in_flight=num_active,
                num_waiting=max(0, num_owed - num_active),
                num_unpublished=sum(len(outcomes) for outcomes in self._finished.values()),
                elapsed_s=time.monotonic() - self._started_s,
                rounds=self._engine.rounds,
            )

    def stop(self) -> Progress:
        """Publish what is finished and end the thread; samples in flight are given up."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()
        return self.collect(0.0)

    # -- the engine's thread -----------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(self._job.spec.resources.num_threads)  # OpenMP counts by thread
        try:
            while not self._stopping:
                self._admit()
                for completion in self._engine.step() if self._engine.has_work else ():
                    self._finish(completion)
                self._ask_if_short()
                self._publish_if_due()
                self._checkpoint_if_due()
                self._wait_for_work()
            self._publish()
            self._checkpoint()
        except BaseException as error:  # handed to whoever calls collect
            logger.exception("%s: the engine stopped", self._name)
            with self._changed:
                self._failure = error
        with self._changed:
            self._changed.notify_all()

    def _admit(self) -> None:
        """Prepare queued samples until the engine has a few to spare."""
        room = int(self._max_sequences * (1 + READY_SHARE)) - len(self._samples)
        if room < 1 or not self._queue:
            return
        taken = self._take(room)
        for purpose in ("data", "audit"):
            ids = [sample_id for kind, sample_id in taken if kind == purpose]
            if not ids:
                continue
            begun = self._checkpoints.find(ids) if purpose == "data" else {}
            for prepared in self._preparer.prepare(ids, draft_free=purpose == "audit"):
                if prepared.request is None:
                    assert prepared.error is not None
                    self._finished[purpose].append(prepared.outcome(prepared.error))
                    continue
                request = replace(prepared.request, begun=begun.get(prepared.sample_id))
                too_large = self._too_large(request)
                if too_large is not None:
                    error = RowError(code="oom", stage="decode", message=too_large)
                    self._finished[purpose].append(prepared.outcome(error))
                    continue
                self._samples[prepared.sample_id] = _Sample(purpose, prepared)
                self._engine.add(request)
        self._job.reach("actor.admitted")

    def _take(self, room: int) -> list[tuple[Purpose, int]]:
        """Up to `room` queued samples; one that is in flight for the other purpose waits for it."""
        taken: list[tuple[Purpose, int]] = []
        held: list[tuple[Purpose, int]] = []
        ids = set(self._samples)
        with self._changed:
            while self._queue and len(taken) < room:
                purpose, sample_id = self._queue.popleft()
                (held if sample_id in ids else taken).append((purpose, sample_id))
                ids.add(sample_id)
            self._queue.extendleft(reversed(held))
        return taken

    def _finish(self, completion: Completion) -> None:
        sample = self._samples.pop(completion.sample_id)
        text = completion.text if completion.text is not None else self._text(completion.token_ids)
        self._finished[sample.purpose].append(sample.prepared.outcome(completion, text))
        self._job.reach("actor.finished")

    def _ask_if_short(self) -> None:
        """Wake whoever waits to lend more; once, for there may be nothing more to lend."""
        if not self._has_asked and runs_short(
            len(self._queue) + len(self._samples), self._max_sequences
        ):
            with self._changed:
                self._has_asked = self._runs_short = True
                self._changed.notify_all()

    def _publish_if_due(self) -> None:
        idle = not self._samples and not self._queue
        late = time.monotonic() - self._last_publish_s >= self._publish_s
        first = not self._has_published and len(self._finished["data"]) >= FIRST_ROWS
        if idle or late or first:
            self._publish()

    def _publish(self) -> None:
        receipts = []
        for purpose, outcomes in self._finished.items():
            if outcomes:
                receipts.append(
                    publish_segment(self._job, outcomes, purpose=purpose, actor=self._name)
                )
                self._finished[purpose] = []
        if receipts:
            self._last_publish_s = time.monotonic()
            self._has_published = True
            with self._changed:
                self._receipts += receipts
                self._changed.notify_all()
            self._job.reach("actor.published")

    def _checkpoint_if_due(self) -> None:
        if time.monotonic() - self._last_checkpoint_s >= self._checkpoint_s:
            self._checkpoint()

    def _checkpoint(self) -> None:
        """Whole blocks of what is in flight, for whoever goes on with it."""
        if self._checkpoint_s < math.inf:
            self._checkpoints.write(self._engine.begun())
        self._last_checkpoint_s = time.monotonic()

    def _wait_for_work(self) -> None:
        if self._engine.has_work:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._stopping, timeout=IDLE_WAIT_S)


def runs_short(num_owed: int, max_sequences: int) -> bool:
    """Whether an actor that owes so many samples should be lent more before it starves."""
    return num_owed <= SHORT_SHARE * max_sequences


def load_engine(job: JobDirectory, device: torch.device, report: LoadReport = unreported) -> Loaded:
    """The job's target and drafter on a device; refuses hardware that gives other bits."""
    # The model code of transformers takes seconds to import, and only actors need it.
    from spot_batch.targets.block import load_target
    from spot_batch.targets.numerics import measure_numerics

    spec = job.spec
    info = model_info(spec, report=report)
    drafter = choose_drafter(wanted_drafter(spec), info)
    tokenizer = load_tokenizer(info.path)
    canonical = spec.speculation.numerics == "canonical"
    target = load_target(
        info, dtype=spec.model.target.dtype, device=device, canonical=canonical, report=report
    )
    if canonical:
        report(LoadProgress("measuring"))
        numerics = measure_numerics(target)
        numerics.require(job.claim_numerics(asdict(numerics)))
    proposer = load_drafter(drafter, block_length=info.block_length, device=device)
    memory = _prefix_memory(spec, target)
    settings = replace(engine_settings(spec, device), max_positions=max(1, memory.num_positions))
    latency = None
    if settings.budget == "auto" and proposer is not None:
        latency = _latency(job, target, proposer, info, settings)

    def text(token_ids: Sequence[int]) -> str:
        decoded = tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(decoded, str)
        return decoded

    engine = Engine(
        target,
        proposer,
        settings,
        latency=latency,
        decode=text,
        record_every=spec.output.trajectory_every if "trajectory" in spec.output.include else 0,
    )
    preparer = sample_preparer(spec, job.pinned, info, tokenizer)
    return Loaded(
        engine=engine,
        preparer=preparer,
        text=text,
        drafter=drafter.name,
        too_large=partial(memory.fault, block_length=info.block_length),
    )


def _prefix_memory(spec: JobSpec, target: BlockTarget) -> PrefixMemory:
    """What an actor may fill with prefixes: the actors of a CPU share its memory, those of a GPU
    share it as they share the GPU."""
    resources = spec.resources
    if target.device.type == "cpu":
        at_most = max(1, len(os.sched_getaffinity(0)) // resources.num_threads)
        num_sharing = float(at_most if resources.actors == "auto" else resources.actors)
    else:
        part = resources.gpus_per_actor
        num_sharing = 1.0 if part == "auto" or part >= 1.0 or part == 0.0 else 1.0 / part
    memory = prefix_memory(
        target.device,
        position_bytes=target.body.sizes.kv_bytes(target.dtype.itemsize),
        share=resources.prefix_share,
        gib=resources.prefix_gib,
        num_sharing=num_sharing,
    )
    logger.info("%.1f GiB for prefixes", memory.num_bytes / GIB)
    return memory


def _latency(
    job: JobDirectory,
    target: BlockTarget,
    drafter: Drafter,
    info: ModelInfo,
    settings: EngineSettings,
) -> LatencyTable:
    """The device's latency table: the job's, if it has one of this kind of device."""
    device = target.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    of_what = {
        "weights": info.weight_hash,
        "canonical": target.tiles.sizes is not None,
        "dtype": str(target.dtype),
        "drafter": drafter.name,
        "device": f"{device.type} {name}",
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "max_sequences": settings.max_sequences,
    }
    stored = job.latency(of_what)
    if stored is not None:
        return LatencyTable.from_json(stored, f"{job.latency_path(of_what)}")
    table = measure_latency(
        target,
        drafter,
        max_slots=min(settings.max_slots, 4 * settings.max_sequences),
        max_positions=settings.max_positions,
    )
    logger.info("latency measured up to %d slots", table.slots[-1])
    return LatencyTable.from_json(job.keep_latency(of_what, table.to_json()))


def model_info(spec: JobSpec, *, report: LoadReport = unreported) -> ModelInfo:
    """The spec's target, looked up; no weights are loaded."""
    target = spec.model.target
    return resolve_model(
        target.path,
        revision=target.revision,
        block_length=target.block_length,
        mask_id=target.mask_id,
        report=report,
    )


def wanted_drafter(spec: JobSpec) -> str:
    """What `choose_drafter` is asked for; draft-free jobs load none."""
    if spec.speculation.budget == 0:
        return "none"
    return spec.model.drafter.path or spec.model.drafter.kind


def engine_settings(spec: JobSpec, device: torch.device) -> EngineSettings:
    budget, slots = spec.speculation.budget, spec.engine.max_sequences
    return EngineSettings(
        max_sequences=AUTO_MAX_SEQUENCES[device.type] if slots == "auto" else slots,
        budget=budget,
        gamma=spec.speculation.gamma,
        crossing=spec.speculation.crossing,
        longest_first=spec.scheduling.order == "longest_first",
    )


def sample_preparer(
    spec: JobSpec,
    pinned: PinnedInput,
    info: ModelInfo,
    tokenizer: PreTrainedTokenizerFast,
    *,
    reader: RowReader | None = None,
) -> SamplePreparer:
    """What turns a job's sample ids into requests; rows are the pinned input's unless given."""
    renderer = PromptRenderer(
        spec,
        pinned,
        tokenizer,
        max_context=info.max_context,
        block_length=info.block_length,
        mask_id=info.mask_id,
    )
    return SamplePreparer(
        spec,
        pinned,
        reader if reader is not None else InputReader(pinned),
        renderer,
        stop_ids=info.stop_ids,
        confidence=info.family.confidence,
    )
