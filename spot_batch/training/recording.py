"""Recording trajectories in this process: prompts decoded draft-free, every state written down."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spot_batch.decoding import Engine, EngineSettings
from spot_batch.inputs.ids import noise_key
from spot_batch.records import Request, SamplingParams
from spot_batch.targets.qwen3 import BlockTarget
from spot_batch.targets.registry import ModelInfo, load_tokenizer
from spot_batch.training.trajectories import TrajectoryRecorder, trajectory_metadata

logger = logging.getLogger(__name__)

_LOG_EVERY = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordingSettings:
    """What is recorded: each prompt once, the temperatures in turn."""

    temperatures: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5)
    max_new_tokens: int = 128
    max_sequences: int = 16
    seed: int = 0


def record_trajectories(
    target: BlockTarget,
    info: ModelInfo,
    questions: Sequence[str],
    path: Path,
    settings: RecordingSettings,
) -> int:
    """Decode questions draft-free and write their states to `path`; returns how many."""
    tokenizer = load_tokenizer(info.path)
    recorder = TrajectoryRecorder(
        path,
        info.block_length,
        min(32, info.vocab_size),
        trajectory_metadata(weights=info.weight_hash, block_length=info.block_length),
    )
    engine = Engine(
        target, None, EngineSettings(max_sequences=settings.max_sequences), recorder=recorder
    )
    for index, question in enumerate(questions):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        assert isinstance(prompt, str)
        engine.add(
            Request(
                sample_id=index,
                prompt_ids=tuple(tokenizer.encode(prompt, add_special_tokens=False)),
                noise_key=noise_key(settings.seed, str(index), 0),
                params=SamplingParams(
                    max_new_tokens=settings.max_new_tokens,
                    temperature=settings.temperatures[index % len(settings.temperatures)],
                    stop_ids=info.stop_ids,
                    stop_at="block",
                    confidence=info.family.confidence,
                ),
            )
        )
    num_done = 0
    while engine.has_work:
        for _ in engine.step():
            num_done += 1
            if num_done % _LOG_EVERY == 0:
                logger.info("%d of %d prompts recorded", num_done, len(questions))
    recorder.close()
    return recorder.num_rows
