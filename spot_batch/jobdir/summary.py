"""Every number of a finished job, as `summary.json` holds it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from spot_batch.records.progress import RunFacts
from spot_batch.records.results import SKIP_CODES, CheckResult


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Counts over samples; they add up, part by part."""

    num_samples: int = 0
    num_completions: int = 0
    num_errors: int = 0
    num_tokens: int = 0
    num_forwards: int = 0
    num_clean_passes: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_draft_free_forwards: int = 0
    finish_reasons: Mapping[str, int] = field(default_factory=dict)
    error_codes: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: Totals) -> Totals:
        sums: dict[str, int] = {}
        tallies: dict[str, Mapping[str, int]] = {}
        for item in dataclasses.fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if isinstance(mine, Mapping):
                names = sorted(mine.keys() | theirs.keys())
                tallies[item.name] = {n: mine.get(n, 0) + theirs.get(n, 0) for n in names}
            else:
                sums[item.name] = mine + theirs
        return Totals(**sums, **tallies)  # type: ignore[arg-type]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Totals:
        return cls(**json.loads(text))

    @property
    def num_skipped(self) -> int:
        """Error rows that the spec asked for (`overlong: skip`)."""
        return sum(self.error_codes.get(code, 0) for code in SKIP_CODES)

    @property
    def num_failed(self) -> int:
        return self.num_errors - self.num_skipped

    @property
    def forwards_saved(self) -> float:
        """The share of draft-free decoding's forwards that were not needed."""
        if self.num_draft_free_forwards == 0:
            return 0.0
        return 1.0 - self.num_forwards / self.num_draft_free_forwards


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    name: str
    fingerprint: str
    version: str
    num_rows: int
    totals: Totals
    reproducible: bool
    check: CheckResult | None
    facts: RunFacts | None

    def to_json(self) -> str:
        tree = asdict(self)
        totals = self.totals
        tree["totals"]["num_skipped"] = totals.num_skipped
        tree["totals"]["num_failed"] = totals.num_failed
        tree["totals"]["forwards_saved"] = totals.forwards_saved
        return json.dumps(tree, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, path: Path) -> Summary:
        tree = json.loads(path.read_text(encoding="utf-8"))
        known = {item.name for item in dataclasses.fields(Totals)}
        tree["totals"] = Totals(**{k: v for k, v in tree["totals"].items() if k in known})
        if tree["check"] is not None:
            differing = tuple(tree["check"].pop("differing"))
            tree["check"] = CheckResult(differing=differing, **tree["check"])
        if tree["facts"] is not None:
            tree["facts"] = RunFacts(**tree["facts"])
        return cls(**tree)
