"""What a job works with, made of its spec: model info, engine, sample preparer."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from tokenizers import decoders
from transformers import PreTrainedTokenizerFast

from spot_batch.checkpoints.registry import ModelInfo, resolve_model
from spot_batch.checkpoints.shapes import LOGITS_FILTERED, VISIT_BYTES
from spot_batch.checkpoints.tokenizer import load_tokenizer
from spot_batch.drafters.base import Drafter
from spot_batch.drafters.registry import choose_drafter, load_drafter
from spot_batch.engine.engine import Engine, EngineSettings
from spot_batch.engine.latency import LatencyTable
from spot_batch.engine.measure import measure_latency
from spot_batch.engine.memory import GIB, PrefixMemory, free_bytes, prefix_memory
from spot_batch.engine.stops import ByteDecode, Decode
from spot_batch.inputs.prepare import RowReader, SamplePreparer
from spot_batch.inputs.reader import InputReader
from spot_batch.inputs.render import PromptRenderer
from spot_batch.job.spec import JobSpec
from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.measured import claim_numerics, keep_latency, latency_path, read_latency
from spot_batch.models.device import GRAPH_BYTES
from spot_batch.records.input import PinnedInput
from spot_batch.records.progress import LoadProgress, LoadReport, unreported
from spot_batch.records.results import Begun, Ended, Rounds
from spot_batch.records.sampling import Request

if TYPE_CHECKING:
    from spot_batch.models.block import BlockTarget


logger = logging.getLogger(__name__)

# On a CPU more samples a forward bring no more tokens a second, only later first rows.
AUTO_MAX_SEQUENCES = {"cpu": 8, "cuda": 128}


class Decoder(Protocol):
    """What an actor asks of an engine."""

    @property
    def num_active(self) -> int: ...

    @property
    def has_work(self) -> bool: ...

    @property
    def rounds(self) -> Rounds: ...

    def add(self, request: Request) -> None: ...

    def step(self) -> list[Ended]: ...

    def begun(self) -> dict[int, Begun]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """What an actor works with. `text` makes the generation column of token ids; stop strings are
    looked for in the same. `too_large` says why a sample's prefix fits no memory here, if so."""

    engine: Decoder
    preparer: SamplePreparer
    text: Decode
    drafter: str
    too_large: Callable[[Request], str | None] = lambda request: None


EngineLoader = Callable[[JobDirectory, torch.device, LoadReport], Loaded]


def load_engine(job: JobDirectory, device: torch.device, report: LoadReport = unreported) -> Loaded:
    """The job's target and drafter on a device; refuses hardware that gives other bits."""
    from spot_batch.models.numerics import measure_numerics

    spec = job.spec
    # Weights are read for their hash by the plan, at each run: an actor need not read them again.
    info = model_info(spec, weight_hash=str(job.fields["model.weights"]), report=report)
    drafter = choose_drafter(wanted_drafter(spec), info)
    tokenizer = load_tokenizer(info.path)
    target = load_job_target(spec, info, device, report)
    if spec.speculation.numerics == "canonical":
        report(LoadProgress("measuring"))
        require_numerics(job, target)
    else:
        measure_numerics(target)  # for ModelError: fast or not, its forward must be finite
    proposer = load_drafter(drafter, block_length=info.block_length, device=device)
    settings = engine_settings(spec, device)
    memory, visit_bytes = _memory(spec, target, settings.max_sequences)
    settings = replace(
        settings, max_positions=max(1, memory.num_positions), visit_bytes=visit_bytes
    )
    latency = None
    if settings.budget == "auto" and proposer is not None:
        latency = _latency(job, target, proposer, info, settings)
    text = text_of(tokenizer)
    engine = Engine(
        target,
        proposer,
        settings,
        latency=latency,
        decode=text,
        record_every=spec.output.trajectory_every if "trajectory" in spec.output.include else 0,
    )
    return Loaded(
        engine=engine,
        # A tokenizer of its own: a fast one may not be asked by two threads at once.
        preparer=sample_preparer(spec, job.pinned, info, load_tokenizer(info.path)),
        text=text,
        drafter=drafter.name,
        too_large=partial(memory.fault, block_length=info.block_length),
    )


def load_job_target(
    spec: JobSpec, info: ModelInfo, device: torch.device, report: LoadReport = unreported
) -> BlockTarget:
    """The spec's target with its weights, in the numerics that the spec asks for."""
    # The model code of transformers takes seconds to import: only who loads weights waits for it.
    from spot_batch.models.block import load_target

    return load_target(
        info,
        dtype=spec.model.target.dtype,
        device=device,
        canonical=spec.speculation.numerics == "canonical",
        report=report,
    )


def require_numerics(job: JobDirectory, target: BlockTarget) -> None:
    """NumericsMismatch where the arithmetic here is not the job's; the first to come writes it
    down."""
    from spot_batch.models.numerics import measure_numerics

    numerics = measure_numerics(target)
    numerics.require(claim_numerics(job, asdict(numerics)))


def text_of(tokenizer: PreTrainedTokenizerFast) -> Decode:
    """What makes the generation column of token ids, without special tokens."""

    def text(token_ids: Sequence[int]) -> str:
        decoded = tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(decoded, str)
        return decoded

    decoder = tokenizer.backend_tokenizer.decoder
    return ByteDecode(text) if isinstance(decoder, decoders.ByteLevel) else text


def _memory(spec: JobSpec, target: BlockTarget, max_sequences: int) -> tuple[PrefixMemory, int]:
    """What an actor may fill with prefixes, and with what it computes of logits: the actors of a
    CPU share its memory, those of a GPU share it as they share the GPU."""
    resources = spec.resources
    if target.device.type == "cpu":
        at_most = max(1, len(os.sched_getaffinity(0)) // resources.num_threads)
        num_sharing = float(at_most if resources.actors == "auto" else resources.actors)
    else:
        part = resources.gpus_per_actor
        num_sharing = 1.0 if part == "auto" or part >= 1.0 or part == 0.0 else 1.0 / part
    state = LOGITS_FILTERED * 4 * target.block_length * target.vocab_size
    visit_bytes = min(VISIT_BYTES, int(free_bytes(target.device) / num_sharing / 4))
    graphs = GRAPH_BYTES if target.device.type == "cuda" else 0
    memory = prefix_memory(
        target.device,
        position_bytes=target.body.sizes.kv_bytes(target.dtype.itemsize),
        share=resources.prefix_share,
        gib=resources.prefix_gib,
        num_sharing=num_sharing,
        reserved=min(max_sequences * state, max(visit_bytes, state)) + graphs,
    )
    logger.info("%.1f GiB for prefixes", memory.num_bytes / GIB)
    return memory, visit_bytes


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
    stored = read_latency(job, of_what)
    if stored is not None:
        return LatencyTable.from_json(stored, f"{latency_path(job, of_what)}")
    table = measure_latency(
        target,
        drafter,
        max_slots=min(settings.max_slots, 4 * settings.max_sequences),
        max_positions=settings.max_positions,
    )
    logger.info("latency measured up to %d slots", table.slots[-1])
    return LatencyTable.from_json(keep_latency(job, of_what, table.to_json()))


def model_info(
    spec: JobSpec, *, weight_hash: str | None = None, report: LoadReport = unreported
) -> ModelInfo:
    """The spec's target, looked up; no weights are loaded, nor read where their hash is given."""
    target = spec.model.target
    return resolve_model(
        target.path,
        revision=target.revision,
        block_length=target.block_length,
        mask_id=target.mask_id,
        weight_hash=weight_hash,
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
