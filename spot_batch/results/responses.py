"""Results as OpenAI's and vLLM's batch output has them: one response or error a request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.scan import read_part_of


def responses(job: JobDirectory) -> Iterator[dict[str, Any]]:
    """One response or error a request, in the order of the input."""
    for _, samples in groupby(_outcomes(job), key=lambda row: row["row_index"]):
        yield _response(job, list(samples))


def _outcomes(job: JobDirectory) -> Iterator[dict[str, Any]]:
    """Rows of data/ and errors/ in the order of the input, under our names without the prefix."""
    prefix = job.spec.output.prefix
    wanted = ("custom_id", "row_index", "sample_index", "generation", "finish_reason", "usage")
    names = [name for name in wanted if prefix + name in job.schema.names]
    for part in range(job.num_parts):
        done = read_part_of(job, "data", part)
        if done is None:
            continue
        rows = done.select([prefix + name for name in names]).rename_columns(names).to_pylist()
        failed = read_part_of(job, "errors", part)
        rows += failed.to_pylist() if failed is not None else []
        yield from sorted(rows, key=lambda row: (row["row_index"], row["sample_index"]))


def _response(job: JobDirectory, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    first = samples[0]
    stem = f"{job.fingerprint[:12]}-{first['row_index']}"
    answer: dict[str, Any] = {"id": f"batch_req_{stem}", "custom_id": first["custom_id"]}
    errors = [sample for sample in samples if "code" in sample]
    if errors:
        error = {"code": errors[0]["code"], "message": errors[0]["message"]}
        return {**answer, "response": None, "error": error}
    usages = [sample.get("usage") or {} for sample in samples]
    completion = sum(usage.get("completion_tokens", 0) for usage in usages)
    prompt = usages[0].get("prompt_tokens", 0)
    body = {
        "id": f"chatcmpl-{stem}",
        "object": "chat.completion",
        "created": 0,  # no clock: the same job writes the same bytes
        "model": str(job.fields.get("model.name", job.spec.model.target.path)),
        "choices": [
            {
                "index": sample["sample_index"],
                "message": {"role": "assistant", "content": sample["generation"]},
                "logprobs": None,
                "finish_reason": sample["finish_reason"],
            }
            for sample in samples
        ],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        },
    }
    response = {"status_code": 200, "request_id": f"req_{stem}", "body": body}
    return {**answer, "response": response, "error": None}
