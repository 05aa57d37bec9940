"""The corpus is addressable, its answers check, and its sides do not overlap."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from spot_batch.lab.bundled.corpus import (
    FUNCTIONS,
    KINDS,
    LIST_FAMILIES,
    Problem,
    call_function,
    check,
    held_out_problems,
    is_held_out,
    problem_at,
    problem_with_id,
    runs_as_asked,
    tells_as_asked,
    write_prompts,
)

NUM_PROBLEMS = 600
PROBLEMS = [
    problem_at(index, split="train", seed=3, level=level)
    for level in ("easy", "hard")
    for index in range(NUM_PROBLEMS)
]


def spoilt(problem: Problem) -> str:
    """The problem's response with a wrong result in the right form."""
    if problem.kind == "code":
        head, body = problem.response.rsplit("return ", 1)
        return f"{head}return [{body}]"
    if problem.kind == "story":
        return problem.response.replace(problem.answer.split(", ")[-1], "stone")
    return problem.response.replace(f"answer is {problem.answer}.", f"answer is {problem.answer}1.")


def test_a_problem_is_a_function_of_its_address_alone() -> None:
    again = problem_at(17, split="train", seed=3, level="easy")
    assert again == PROBLEMS[17]
    assert again != problem_at(17, split="train", seed=4, level="easy")


def test_an_id_names_its_problem() -> None:
    for problem in [*PROBLEMS[:5], *held_out_problems(5, seed=2)]:
        assert problem_with_id(problem.id) == problem
    with pytest.raises(ValueError, match="no problem has the id"):
        problem_with_id("test-0-easy-1")


@pytest.mark.parametrize("kind", KINDS)
def test_the_written_response_passes_and_a_spoilt_one_fails(kind: str) -> None:
    problems = [problem for problem in PROBLEMS if problem.kind == kind]
    assert len(problems) > 60
    for problem in problems:
        assert check(problem, problem.response), problem
        assert not check(problem, spoilt(problem)), problem
        assert not check(problem, "")


def test_every_family_is_drawn() -> None:
    families = {problem.family for problem in PROBLEMS}
    assert families >= {function.family for function in FUNCTIONS}
    assert families >= set(LIST_FAMILIES)
    assert families >= {"chain", "boxes", "together", "price", "share", "age"}


def test_every_equation_of_a_word_problem_holds() -> None:
    signs = {
        "+": lambda a, b: a + b,
        "-": lambda a, b: a - b,
        "*": lambda a, b: a * b,
        "/": lambda a, b: a / b,
    }
    for problem in PROBLEMS:
        if problem.kind != "math":
            continue
        equations = [line for line in problem.response.splitlines() if " = " in line]
        assert equations, problem
        for line in equations:
            words = line.replace(".", " ").split()
            at = words.index("=")
            left, sign, right, result = words[at - 3], words[at - 2], words[at - 1], words[at + 1]
            assert signs[sign](int(left), int(right)) == int(result), line


def test_easy_numbers_stay_within_twenty() -> None:
    for problem in PROBLEMS[:NUM_PROBLEMS]:
        if problem.kind != "math":
            continue
        numbers = "".join(c if c.isdigit() else " " for c in problem.response).split()
        assert max(map(int, numbers)) <= 20, problem


@pytest.mark.parametrize(
    ("story", "fits"),
    [
        ("Once Tom saw a cup at home. It was old and big. Then he took it home.\nThe end.", True),
        ("Once Tom saw a cup at home. It was old and big. Then he took it home.", False),
        ("Once Tom saw a hat at home. It was old and big. Then he took it home.\nThe end.", False),
        ("Once Tom saw a cup at home. It was old and big. It was old and big.\nThe end.", False),
        ("Once Tom saw a cup at home. It was old and zig. Then he took it home.\nThe end.", False),
        ("Once Tom saw a cup at home.\nThe end.", False),
    ],
)
def test_a_story_is_told_as_asked_or_not(story: str, fits: bool) -> None:
    assert tells_as_asked(story, ["Tom", "cup"]) == fits


def test_held_out_questions_are_never_trained_on() -> None:
    assert not any(is_held_out(problem.question) for problem in PROBLEMS)
    assert all(is_held_out(problem.question) for problem in held_out_problems(50, seed=0))


@pytest.mark.parametrize(
    "code",
    [
        "import os",
        "def f(x):\n    return x.__class__",
        "def f(x):\n    return open(x)",
        "def f(x):\n    return x ** 9 ** 9 ** 9",
        "def f(x):\n    return x * 999 * 999",
        "def f(x):\n    return f(x)",
        "def f(x, y):\n    return x",
        "def f(x):\n    while x: x",
        "not python at all",
    ],
)
def test_code_outside_the_small_language_is_wrong_and_not_run(code: str) -> None:
    problem = next(problem for problem in PROBLEMS if problem.family == "plus")
    assert not runs_as_asked(code, problem.cases)


def test_another_function_that_gives_the_same_values_is_right() -> None:
    problem = next(problem for problem in PROBLEMS if problem.family == "mirror")
    assert call_function("def other(t):\n    return t[::-1]", ("abc",)) == "cba"
    assert check(problem, "def other(t):\n    return t[::-1]")
    assert not check(replace(problem, cases=problem.cases), "def other(t):\n    return t")


def test_prompts_are_written_as_rows_that_can_be_checked(tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl", count=20)
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert len({row["question"] for row in rows}) == 20
    for row in rows:
        problem = problem_with_id(row["id"])
        assert row == {
            "id": problem.id,
            "question": problem.question,
            "kind": problem.kind,
            "answer": problem.answer,
        }
    write_prompts(tmp_path / "mixed.jsonl", count=3, temperatures=(0.0, 1.5))
    lines = (tmp_path / "mixed.jsonl").read_text().splitlines()
    assert [json.loads(line)["temperature"] for line in lines] == [0.0, 1.5, 0.0]
