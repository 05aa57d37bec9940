"""README.md of the output: a dataset card that the Hub and `load_dataset` read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath

import pyarrow as pa
import yaml  # type: ignore[import-untyped, unused-ignore]

from spot_batch.job.spec import JobSpec
from spot_batch.jobdir.schema import completion_schema, opens_in_datasets
from spot_batch.jobdir.summary import Summary, Totals
from spot_batch.records.input import PinnedInput
from spot_batch.records.results import CheckResult


@dataclass(frozen=True, kw_only=True, slots=True)
class CardFacts:
    """What a card says. Without a summary it is the card of a job that still runs."""

    spec: JobSpec
    fingerprint: str
    fields: Mapping[str, object]
    pinned: PinnedInput
    has_errors: bool = False
    summary: Summary | None = None


def render_card(facts: CardFacts) -> str:
    """The card as Markdown; text that came from outside cannot break out of its place."""
    parts = [
        _front_matter(facts),
        f"# {_plain(facts.spec.name)}",
        _opening(facts),
        "## Load it",
        _loading(facts),
        "## Where it comes from",
        _provenance(facts),
    ]
    if facts.summary is not None:
        parts += ["## Counts", _counts(facts.summary.totals, facts.summary.num_rows)]
        parts += ["## Check", _check(facts.summary)]
        parts += ["## This run", _run(facts.summary)]
    return "\n\n".join(parts) + "\n"


def _front_matter(facts: CardFacts) -> str:
    configs: list[dict[str, object]] = [
        {
            "config_name": "default",
            "data_files": [{"split": "train", "path": "data/*.arrow"}],
            "default": True,
        }
    ]
    if facts.has_errors:
        configs.append(
            {
                "config_name": "errors",
                "data_files": [{"split": "train", "path": "errors/*.arrow"}],
            }
        )
    head: dict[str, object] = {"configs": configs, "tags": ["spot-batch", "synthetic"]}
    if facts.spec.output.license is not None:
        head["license"] = facts.spec.output.license
    return "---\n" + yaml.safe_dump(head, sort_keys=False, allow_unicode=True) + "---"


def _opening(facts: CardFacts) -> str:
    text = "Written by spot-batch: exact batch inference for a block-diffusion language model."
    if facts.summary is None:
        return text + "\n\n**Not complete yet.** Parts in `data/` are final; more follow."
    if facts.summary.reproducible:
        return text + (
            " The same spec on the same kind of hardware gives the same bytes of `data/`, "
            "whatever drafter, budget, batch and number of actors."
        )
    return text + " **Not reproducible**: `speculation.numerics` is `fast`."


def _loading(facts: CardFacts) -> str:
    input_schema = pa.ipc.read_schema(pa.py_buffer(facts.pinned.schema))
    lines = ["```python", "import datasets, polars, pyarrow.dataset"]
    if opens_in_datasets(completion_schema(input_schema, facts.spec)):
        lines.append('datasets.load_dataset("OUT")                         # copies into its cache')
    lines += [
        'pyarrow.dataset.dataset("OUT/data", format="ipc")',
        'polars.scan_ipc("OUT/data/*.arrow")',
        'import spot_batch; spot_batch.load("OUT")            # a datasets.Dataset',
    ]
    if facts.has_errors:
        lines.append('spot_batch.load("OUT", "errors")')
    return "\n".join([*lines, "```"])


def _provenance(facts: CardFacts) -> str:
    spec, pinned = facts.spec, facts.pinned
    names = [_without_folder(source) for source in spec.input.source]
    rows = [
        ("fingerprint", facts.fingerprint),
        ("input", ", ".join(names)),
        ("input rows", str(pinned.num_rows)),
        (f"{pinned.prompt_kind} column", pinned.prompt_column or "input.template"),
    ]
    return (
        _table(rows)
        + "\n\nWhat decides the output, field by field (the fingerprint is its hash):\n\n"
        + _fenced(_fields_as_yaml(facts.fields), "yaml")
    )


def _counts(totals: Totals, num_rows: int) -> str:
    rows = [
        ("input rows", str(num_rows)),
        ("samples", str(totals.num_samples)),
        ("completions (data/)", str(totals.num_completions)),
        ("error rows (errors/)", str(totals.num_errors)),
    ]
    rows += [(f"error {code}", str(count)) for code, count in totals.error_codes.items()]
    rows += [(f"finished by {why}", str(count)) for why, count in totals.finish_reasons.items()]
    rows += [
        ("generated tokens", str(totals.num_tokens)),
        ("forwards", str(totals.num_forwards)),
        ("forwards of draft-free decoding", str(totals.num_draft_free_forwards)),
        ("forwards saved", f"{totals.forwards_saved:.1%}"),
    ]
    return _table(rows)


def _check(summary: Summary) -> str:
    check = summary.check
    if check is None:
        return "No samples were decoded again."
    return describe_check(check)


def describe_check(check: CheckResult) -> str:
    """One sentence: how many samples were compared, and how many differed."""
    if not check.num_compared:
        return "No sample was compared: none has both a completion and its draft-free decode."
    text = (
        f"{check.num_compared} samples, chosen by hash, were decoded again draft-free: "
        f"{check.num_differed} differed."
    )
    if check.differing:
        shown = ", ".join(map(str, check.differing[:20]))
        more = len(check.differing) - 20
        text += f" Sample ids: {shown}" + (f" and {more} more." if more > 0 else ".")
    return text


def _run(summary: Summary) -> str:
    text = "Facts of the run that do not decide the output.\n\n"
    facts = summary.facts
    rows = [("spot-batch", summary.version)]
    if facts is not None:
        rows += [
            ("target", _without_folder(facts.target)),
            ("drafter", facts.drafter),
            ("device", facts.device),
            ("actors", str(facts.num_actors)),
            ("seconds", f"{facts.elapsed_s:.1f}"),
            ("drafted slots a sample a round", f"{facts.drafted_per_round:.2f}"),
            ("rounds with drafts", f"{facts.drafting_share:.0%}"),
        ]
    totals = summary.totals
    rows += [
        ("states drafted", str(totals.num_drafted)),
        ("states accepted", str(totals.num_accepted)),
        ("clean passes", str(totals.num_clean_passes)),
    ]
    return text + _table(rows)


# -- text that came from outside -------------------------------------------------------------------


def _without_folder(name: str) -> str:
    """A hub id or a bare name stays; of a path, only its last part is anybody's business."""
    is_hub_id = name.startswith("hf://") or re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name)
    return name if is_hub_id else PurePath(name).name or name


def _plain(text: str) -> str:
    """One line without control characters and without Markdown or HTML meaning."""
    return re.sub(r"([\\`*_{}\[\]<>()#+!|~&])", r"\\\1", _printable(text))


def _printable(text: str) -> str:
    line = "".join(each if each.isprintable() else " " for each in text)
    return line[:500] + ("…" if len(line) > 500 else "")


def _span(text: str) -> str:
    """A code span, safe within a table cell."""
    text = _printable(text).replace("|", "¦")
    ticks = "`" * (1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{pad}{text}{pad}{ticks}" if text.strip() else "(empty)"


def _fenced(text: str, language: str) -> str:
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    ticks = "`" * max(3, longest + 1)
    return f"{ticks}{language}\n{text}{ticks}"


def _fields_as_yaml(fields: Mapping[str, object]) -> str:
    """JSON values, one a line: no control character and no line break gets through."""
    return "".join(f"{_printable(key)}: {json.dumps(fields[key])}\n" for key in sorted(fields))


def _table(rows: list[tuple[str, str]]) -> str:
    lines = ["| | |", "|---|---|"]
    lines += [f"| {_plain(name)} | {_span(value)} |" for name, value in rows]
    return "\n".join(lines)
