"""A job before it runs: spec, input and target brought together, and its directory begun."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from spot_batch.checkpoints.hub import packaged_targets
from spot_batch.checkpoints.registry import ModelInfo
from spot_batch.checkpoints.tokenizer import load_tokenizer
from spot_batch.drafters.registry import DrafterChoice, choose_drafter
from spot_batch.inputs.pin import drop_sources, pin_input, recognised
from spot_batch.inputs.prepare import PreparedSample, SamplePreparer
from spot_batch.inputs.render import room_beside
from spot_batch.inputs.sources import with_pipes_kept
from spot_batch.inputs.template import with_template
from spot_batch.inputs.unchanged import check_unchanged
from spot_batch.job.fingerprint import diff_fields, fingerprint
from spot_batch.job.reading import check_spec, with_model_defaults
from spot_batch.job.spec import JobSpec, SpecError
from spot_batch.jobdir.directory import JobDirectory, SpecConflict
from spot_batch.jobdir.layout import Layout
from spot_batch.records.input import PinnedInput
from spot_batch.records.progress import LoadReport, RunFacts, unreported
from spot_batch.service.assemble import model_info, sample_preparer, wanted_drafter

_SAMPLING = ("temperature", "top_p", "top_k")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPlan:
    """All that is known of a job without loading a weight. `spec` is resolved; `from_checkpoint`
    are the sampling fields that it left to the checkpoint's generation_config; `threshold_of` says
    whose the threshold is."""

    spec: JobSpec
    info: ModelInfo
    drafter: DrafterChoice
    tokenizer: PreTrainedTokenizerFast
    pinned: PinnedInput
    fingerprint: str
    fields: dict[str, object]
    from_checkpoint: tuple[str, ...] = ()
    threshold_of: str = "the job's own"

    @property
    def num_samples(self) -> int:
        return self.pinned.num_rows * self.spec.generation.n

    @property
    def facts(self) -> RunFacts:
        return RunFacts(drafter=self.drafter.name, target=self.info.name)

    def preparer(self) -> SamplePreparer:
        return sample_preparer(self.spec, self.pinned, self.info, self.tokenizer)

    def first(self, count: int) -> list[PreparedSample]:
        """The first `count` samples as the engine would get them."""
        return self.preparer().prepare(range(min(count, self.num_samples)))


def plan_job(
    spec: JobSpec, out: Path, *, kept: Path | None = None, report: LoadReport = unreported
) -> JobPlan:
    """Look everything up that a new or resubmitted job needs; raises ValueError with the reason.

    What the spec leaves open is as the job in `out` has it, if there is one. Writes nothing but
    what of the input must be kept (a hub dataset's rows, unpacked and remote files), into the job
    directory or into `kept`.
    """
    given, spec = spec, _as_begun(with_template(spec), out)
    info = model_info(spec, report=report)
    hub_dir = Layout(out).hub_input if kept is None else kept
    spec = recognised(with_pipes_kept(spec, hub_dir), hub_dir=hub_dir)
    left_open = tuple(name for name in _SAMPLING if getattr(spec.generation, name) is None)
    threshold_of = _threshold_of(given, begun=spec, info=info)
    spec = _pinned_down(
        with_model_defaults(
            spec,
            temperature=info.temperature,
            top_p=info.top_p,
            top_k=info.top_k,
            threshold=info.threshold,
        ),
        info,
    )
    is_begun = Layout(out).exists
    if not is_begun:
        _check_length(spec, info)
    pinned = pin_input(spec, hub_dir=hub_dir, is_copied=kept is None and not is_begun)
    plan = _planned(spec, info, pinned)
    if is_begun:
        plan = replace(plan, pinned=_as_pinned_then(plan, JobDirectory.open(out)))
    return replace(plan, from_checkpoint=left_open, threshold_of=threshold_of)


def _check_length(spec: JobSpec, info: ModelInfo) -> None:
    """SpecError for a length that leaves no row a prompt; rows may bring lengths of their own."""
    length = spec.generation.max_new_tokens
    room = room_beside(length, block_length=info.block_length, max_context=info.max_context)
    own = "max_new_tokens" in spec.generation.per_row or spec.input.format == "openai-batch"
    if room < 1 and not own:
        raise SpecError(
            f"generation.max_new_tokens: {length:,} leave no room for a prompt: {info.name} has "
            f"{info.max_context:,} positions in blocks of {info.block_length}; at most "
            f"{length + room - 1:,} go"
        )


def _as_pinned_then(plan: JobPlan, job: JobDirectory) -> PinnedInput:
    """The input of a job that is gone on with: its own copy of the rows, where it has one.

    Another version may read other types out of the same bytes; those of data/ are settled.
    """
    if plan.fingerprint != job.fingerprint:
        return plan.pinned
    if job.pinned.copy:
        drop_sources(plan.pinned)
        return job.pinned
    return plan.pinned if plan.pinned.schema == job.pinned.schema else job.pinned


def plan_of(
    job: JobDirectory, *, report: LoadReport = unreported, check_input: bool = True
) -> JobPlan:
    """The plan of a job that was submitted before; its input must be what it was."""
    if check_input:
        check_unchanged(job.pinned)
    plan = _planned(job.spec, model_info(job.spec, report=report), job.pinned)
    if plan.fingerprint != job.fingerprint:
        # The one way to get here: the target's files are not what they were.
        now = json.loads(json.dumps(plan.fields))
        raise SpecConflict(str(job.root), tuple(diff_fields(job.fields, now)))
    return plan


def _planned(spec: JobSpec, info: ModelInfo, pinned: PinnedInput) -> JobPlan:
    print_, fields = fingerprint(spec, pinned.identity, info.identity())
    return JobPlan(
        spec=spec,
        info=info,
        drafter=choose_drafter(wanted_drafter(spec), info),
        tokenizer=load_tokenizer(info.path),
        pinned=pinned,
        fingerprint=print_,
        fields=fields,
    )


def _as_begun(spec: JobSpec, out: Path) -> JobSpec:
    """The spec with what it leaves open as the job in `out` settled it, if it is of this target:
    the same command goes on where it stopped though a branch moved on the hub meanwhile."""
    if not Layout(out).exists:
        return spec
    begun = JobDirectory.open(out).spec
    tree = spec.model_dump()
    target = tree["model"]["target"]
    if _full_path(target["path"]) != begun.model.target.path:
        return spec
    if target["revision"] is None:
        target["revision"] = begun.model.target.revision
    if tree["generation"]["threshold"] is None:
        tree["generation"]["threshold"] = begun.generation.threshold
    return check_spec(tree)


def _threshold_of(given: JobSpec, *, begun: JobSpec, info: ModelInfo) -> str:
    if given.generation.threshold is not None:
        return "the spec's"
    if begun.generation.threshold is not None:
        return "the job's own"
    if info.name in packaged_targets():
        return "the bundled targets'"
    return f"the {info.family.name} family's"


def _full_path(target: str) -> str:
    """A local folder from the root on; other targets as they are called."""
    return str(Path(target).expanduser().absolute()) if _is_folder(target) else target


def _is_folder(target: str) -> bool:
    return target not in packaged_targets() and Path(target).expanduser().is_dir()


def _pinned_down(spec: JobSpec, info: ModelInfo) -> JobSpec:
    """Local folders by full path, hub ids by their commit: actors need not start where or when the
    command was given."""
    tree = spec.model_dump()
    target, drafter = tree["model"]["target"], tree["model"]["drafter"]
    if _is_folder(target["path"]):
        target["path"] = _full_path(target["path"])
    elif info.commit is not None:
        target["revision"] = info.commit
    if drafter["path"] is not None:
        drafter["path"] = str(Path(drafter["path"]).expanduser().absolute())
    if spec.output.file is not None:
        tree["output"]["path"] = str(spec.output.file.expanduser().absolute())
    return check_spec(tree)
