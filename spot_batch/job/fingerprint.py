"""The fingerprint: what of a spec, its input and its model decides the bytes of data/."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from spot_batch.job.spec import JobSpec

NUMERICS_VERSION = 1  # raised whenever canonical numerics would give other bits


def fingerprint_fields(
    spec: JobSpec, input_identity: Mapping[str, object], model_identity: Mapping[str, object]
) -> dict[str, object]:
    """The fields that decide the bytes of data/, flat: nothing of drafter, budget or scheduling.

    `input_identity` must hold num_rows; both identities hold JSON values only.
    """
    of_input = {"keep", "system", "overlong"}
    if spec.input.template is not None:  # only then: jobs of before it keep their fingerprints
        of_input.add("template")
    num_rows = input_identity["num_rows"]
    assert isinstance(num_rows, int), f"input identity wants a whole num_rows, got {num_rows!r}"
    tree = {
        "input": {
            **input_identity,
            **spec.input.model_dump(mode="json", include=of_input),
        },
        "model": {
            **spec.model.target.model_dump(mode="json", include={"dtype"}),
            "chat_template": spec.model.chat_template,
            **model_identity,
        },
        "generation": spec.generation.model_dump(mode="json"),
        "speculation": {
            "numerics": spec.speculation.numerics,
            "numerics_version": NUMERICS_VERSION,
        },
        "resources": {"cpu_threads": spec.resources.num_threads},
        "output": {
            **spec.output.model_dump(
                mode="json", include={"compression", "prefix", "include", "trajectory_every"}
            ),
            "rows_per_part": spec.rows_per_part(num_rows * spec.generation.n),
        },
    }
    return dict(_flat(tree))


def fingerprint(
    spec: JobSpec, input_identity: Mapping[str, object], model_identity: Mapping[str, object]
) -> tuple[str, dict[str, object]]:
    """(sha256 of the deciding fields, the fields): equal fingerprints mean equal bytes of data/."""
    fields = fingerprint_fields(spec, input_identity, model_identity)
    return hash_fields(fields), fields


def hash_fields(fields: Mapping[str, object]) -> str:
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def diff_fields(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """One line a differing field: `generation.temperature: 0 (directory) != 1 (spec)`."""
    lines = []
    for key in sorted(old.keys() | new.keys()):
        mine, theirs = _shown(old, key), _shown(new, key)
        if mine != theirs:
            lines.append(f"{key}: {mine} (directory) != {theirs} (spec)")
    return lines


def _flat(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        inner = f"{path}.{key}" if path else key
        if isinstance(value, Mapping):
            yield from _flat(value, inner)
        else:
            yield inner, value


def _shown(fields: Mapping[str, object], key: str) -> str:
    return json.dumps(fields[key], ensure_ascii=False) if key in fields else "absent"
