"""Grading answers: numbers and formulas, programs, and the synthetic problems."""

from __future__ import annotations

import logging
import math
import os
import re
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from spot_batch.lab.bench.cells import TaskCell, cell_of

logger = logging.getLogger(__name__)

Grader = Callable[[Mapping[str, Any], str], bool]
"""(a task row's fields, an answer's text) -> whether it is right."""

RUN_TIMEOUT_S = 10.0
CPU_S, MEMORY_BYTES, FILE_BYTES = 5, 1 << 30, 1 << 20
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # they may not have more
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRow:
    """Scores of the same prompts draft-free and drafted.

    `prompts`: their digest; `num_differ`: texts that are not equal, 0 for an exact mode;
    `only_drafted`, `only_draft_free`:
    right in one of the two alone; `p_value`: of McNemar's exact test that the two are equally good.
    """

    task: str
    temperature: float
    seed: int
    method: str
    prompts: str
    num_prompts: int
    score: float
    draft_free_score: float
    num_differ: int
    only_drafted: int
    only_draft_free: int
    p_value: float

    @property
    def cell(self) -> TaskCell:
        return cell_of(TaskCell, self)


def score_row(
    cell: TaskCell,
    method: str,
    *,
    prompts: str,
    texts: tuple[Sequence[str], Sequence[str]],
    right: tuple[Sequence[bool], Sequence[bool]],
) -> ScoreRow:
    """The row of (draft-free, drafted) texts and their grades."""
    pairs = list(zip(*right, strict=True))
    only_drafted = sum(mine and not free for free, mine in pairs)
    only_free = sum(free and not mine for free, mine in pairs)
    return ScoreRow(
        **asdict(cell),
        method=method,
        prompts=prompts,
        num_prompts=len(pairs),
        score=sum(right[1]) / len(pairs),
        draft_free_score=sum(right[0]) / len(pairs),
        num_differ=sum(free != mine for free, mine in zip(*texts, strict=True)),
        only_drafted=only_drafted,
        only_draft_free=only_free,
        p_value=mcnemar(only_drafted, only_free),
    )


def mcnemar(only_one: int, only_other: int) -> float:
    """The two-sided exact p-value of McNemar's test: a fair coin over the pairs that differ."""
    num, least = only_one + only_other, min(only_one, only_other)
    tail = sum(math.comb(num, k) for k in range(least + 1))
    return min(1.0, 2 * tail / (1 << num))  # whole numbers: 2.0**1024 is no float


def find_grader(task: str, *, run_code: bool) -> Grader:
    """How a task is graded. Raises ValueError where that wants `run_code`, or a library."""
    if task == "synthetic":
        return grade_synthetic
    if task in ("gsm8k", "math500"):
        try:
            import math_verify  # noqa: F401
        except ImportError as error:
            raise ValueError(
                f"{task} is graded by math-verify: pip install 'spot-batch[bench]'"
            ) from error
        return grade_math
    if not run_code:
        raise ValueError(f"{task} is graded by running what the model wrote: give --run-code")
    return grade_mbpp if task == "mbpp" else grade_humaneval


def grade_synthetic(fields: Mapping[str, Any], text: str) -> bool:
    """Whether the program that made the problem accepts the answer."""
    from spot_batch.lab.bundled.corpus import check, problem_with_id

    return check(problem_with_id(str(fields["id"])), text)


def grade_math(fields: Mapping[str, Any], text: str) -> bool:
    """Whether the answer's last formula or number is the reference's."""
    from math_verify import parse, verify

    reference = str(fields["answer"])
    if "####" in reference:  # GSM8K's worked answers end in it
        reference = reference.rpartition("####")[2].strip().replace(",", "")
    marked = "$" in reference or "\\boxed" in reference
    gold = parse(reference if marked else f"${reference}$")
    return bool(verify(gold, parse(text)))


def grade_mbpp(fields: Mapping[str, Any], text: str) -> bool:
    """Whether the code passes the row's tests."""
    before = str(fields.get("test_setup_code") or "")
    tests = "\n".join(str(test) for test in fields["test_list"])
    return passes(f"{before}\n{code_of(text)}\n{tests}\n")


def grade_humaneval(fields: Mapping[str, Any], text: str) -> bool:
    """Whether the function passes the row's check; a bare body is put behind the prompt."""
    code, name = code_of(text), str(fields["entry_point"])
    if f"def {name}" not in code:
        code = str(fields["prompt"]) + code
    return passes(f"{fields['prompt']}\n    pass\n{code}\n{fields['test']}\ncheck({name})\n")


def code_of(text: str) -> str:
    """The first fenced block of an answer, or all of it."""
    found = _FENCE.search(text)
    return found.group(1) if found else text


def passes(program: str) -> bool:
    """Whether a program runs to its end, in processes of its own with little time, memory and disk.

    Its last statement, behind all that was written before, says a word that was drawn for this
    run: who leaves early has not passed. It sees an empty folder and no environment, and what it
    starts ends with it. That is no sandbox: the network is there.
    """
    word = secrets.token_hex(16).encode()
    folder = Path(tempfile.mkdtemp())
    try:
        with tempfile.TemporaryFile() as said:
            path = folder / "program.py"
            last = f"__import__('os').write({said.fileno()}, {word!r})"
            path.write_text(f"{program}\n{last}\n", encoding="utf-8", errors="replace")
            code = _run([sys.executable, "-I", str(path)], folder, said.fileno())
            said.seek(0)
            return code == 0 and said.read(len(word) + 1) == word
    finally:
        try:
            _remove(folder)
        except OSError as error:
            logger.warning("%s: cannot be removed (%s)", folder, error)


def _run(command: list[str], folder: Path, said: int) -> int | None:
    """The exit code of a command in its limits, None where time was up. All its group ends."""
    with subprocess.Popen(
        command,
        cwd=folder,
        env={"PATH": "", "HOME": str(folder), **_ONE_THREAD},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(said,),
        preexec_fn=_limit,
        start_new_session=True,
    ) as process:
        try:
            return process.wait(RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):  # nothing of it is left
                os.killpg(process.pid, signal.SIGKILL)


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))  # no process or thread more; not for root


def _remove(folder: Path) -> None:
    """Remove a folder however deep it is: what it holds is moved up, level by level.

    A path to the deepest is longer than the system takes, and `shutil.rmtree` recurses.
    """
    number = count()
    unique = secrets.token_hex(8)
    while entries := list(os.scandir(folder)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry)
                continue
            os.chmod(entry, 0o700)
            for inner in list(os.scandir(entry)):
                if inner.is_dir(follow_symlinks=False):
                    os.chmod(inner, 0o700)
                os.rename(inner, folder / f"{unique}-{next(number)}")
            os.rmdir(entry)
    folder.rmdir()
