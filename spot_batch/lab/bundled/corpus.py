"""A synthetic instruction corpus: seeded, addressable, every answer checked by program.

Problem `index` of a (split, seed, difficulty) is a pure function of that address. Held-out and
train never share a question: a question belongs to the side that its checksum names, and a
draw that falls on the other side is drawn again.
"""

import ast
import json
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Split = Literal["train", "held-out"]
Level = Literal["easy", "hard"]
Kind = Literal["math", "code", "list", "story"]
Value = int | bool | str | list[int] | list[str]

KINDS: tuple[Kind, ...] = ("math", "code", "list", "story")
KIND_SHARES = (0.50, 0.13, 0.22, 0.15)
HELD_OUT_ONE_IN = 16

NAMES = (
    ("Tom", "he"),
    ("Anna", "she"),
    ("Ben", "he"),
    ("Mia", "she"),
    ("Sam", "he"),
    ("Lily", "she"),
    ("Max", "he"),
    ("Rosa", "she"),
)
OBJECTS = ("apples", "books", "pens", "cards", "coins", "shells", "stamps", "marbles")
BOXES = (("boxes", "box"), ("bags", "bag"), ("jars", "jar"), ("trays", "tray"))
GOODS = ("pen", "cup", "book", "ball", "hat", "kite")
WORDS = (
    "red", "sun", "dog", "tree", "fish", "blue", "lamp", "road", "bird", "rain", "gold", "moon",
    "apple", "river", "green", "bread", "stone", "cloud", "tiger", "banana", "pepper", "garden",
)  # fmt: skip
FUNCTION_NAMES = ("f", "g", "h", "solve", "compute", "run")
RESULT_NAMES = ("result", "value", "out", "answer")

# No question says which of these words its response uses: what comes next is then not always forced
# by the template, as in the models that the bundled target stands for.
OPENERS = (
    "Let us work it out.",
    "We go step by step.",
    "Here is how it goes.",
    "We look at what we know.",
    "This is not hard.",
)
FIRST = ("First", "To begin", "At the start")
NEXT = ("Then", "Next", "After that")
CLOSERS = (
    "That makes {result}{unit}.",
    "So we end with {result}{unit}.",
    "In the end it is {result}{unit}.",
)


@dataclass(frozen=True, slots=True)
class Case:
    """One call a written function must answer."""

    arguments: tuple[Value, ...]
    expected: Value


@dataclass(frozen=True, slots=True)
class Problem:
    """A question, a response worth imitating, and what makes any response right."""

    id: str
    kind: Kind
    level: Level
    family: str
    question: str
    response: str
    answer: str
    cases: tuple[Case, ...] = ()


@dataclass(frozen=True, slots=True)
class Draft:
    """A problem that has no address yet."""

    family: str
    question: str
    response: str
    answer: str
    cases: tuple[Case, ...] = ()


def problem_at(index: int, *, split: Split, seed: int, level: Level) -> Problem:
    """The problem at an address; no other problem is drawn on the way."""
    rng = random.Random(f"{split}/{seed}/{level}/{index}")
    while True:
        kind = rng.choices(KINDS, KIND_SHARES)[0]
        draft = WRITERS[kind](rng, level)
        if is_held_out(draft.question) == (split == "held-out"):
            break
    return Problem(
        id=f"{split}-{seed}-{level}-{index}",
        kind=kind,
        level=level,
        family=draft.family,
        question=draft.question,
        response=draft.response,
        answer=draft.answer,
        cases=draft.cases,
    )


def problem_with_id(problem_id: str) -> Problem:
    """The problem that an id of `problem_at` names."""
    split, seed, level, index = problem_id.rsplit("-", 3)
    if split not in ("train", "held-out") or level not in ("easy", "hard"):
        raise ValueError(f"no problem has the id {problem_id!r}")
    return problem_at(
        int(index),
        split="train" if split == "train" else "held-out",
        seed=int(seed),
        level="easy" if level == "easy" else "hard",
    )


def is_held_out(question: str) -> bool:
    """Whether a question belongs to the held-out side."""
    return zlib.crc32(question.encode()) % HELD_OUT_ONE_IN == 0


def check(problem: Problem, answer_text: str) -> bool:
    """Whether a response answers its problem: by its last line, its function or its sentences."""
    text = answer_text.strip()
    if problem.kind == "story":
        return tells_as_asked(text, problem.answer.split(", "))
    if problem.kind == "code":
        return runs_as_asked(text, problem.cases)
    return bool(text) and text.splitlines()[-1].strip() == f"The answer is {problem.answer}."


# --------------------------------------------------------------------------- word problems


def write_math(rng: random.Random, level: Level) -> Draft:
    """A word problem; its response works it out one operation a line."""
    story = rng.choice(STORIES)(rng, level)
    show = rng.random() < 0.25
    question = story.question + (" Show each step." if show else "")
    if show:
        lines = [f"Step {i}: {step}." for i, step in enumerate(story.steps, start=1)]
    elif rng.random() < 0.1:
        lines = list(story.steps)
    else:
        worked = zip(story.leads, story.steps, strict=True)
        lines = [f"{lead} {step}{story.unit}." for lead, step in worked]
        if rng.random() < 0.5:
            heads = (rng.choice(NEXT if i else FIRST) for i in range(len(lines)))
            lines = [f"{head}, {continued(line)}" for head, line in zip(heads, lines, strict=True)]
        if rng.random() < 0.5:
            lines.insert(0, rng.choice(OPENERS))
        if rng.random() < 0.5:
            lines.append(rng.choice(CLOSERS).format(result=story.result, unit=story.unit))
    lines.append(f"The answer is {story.result}.")
    return Draft(story.family, question, "\n".join(lines), str(story.result))


def continued(line: str) -> str:
    """A sentence as it goes on behind another word: in lower case unless it begins with a name."""
    if any(line.startswith(name) for name, _ in NAMES):
        return line
    return line[0].lower() + line[1:]


@dataclass(frozen=True, slots=True)
class Story:
    """A word problem's question, and its working: equations, the words before and after each."""

    family: str
    question: str
    leads: tuple[str, ...]
    steps: tuple[str, ...]
    unit: str
    result: int


def limit_of(level: Level) -> int:
    """The largest number a problem of this level speaks of."""
    return 20 if level == "easy" else 99


def chain_story(rng: random.Random, level: Level) -> Story:
    """Somebody has some, then gets and loses some."""
    (name, pronoun), (friend, _) = rng.sample(NAMES, 2)
    he = pronoun.capitalize()
    obj = rng.choice(OBJECTS)
    limit = limit_of(level)
    total = rng.randint(2, limit - 2)
    sentences = [f"{name} has {total} {obj}."]
    leads, steps = [], []
    for _ in range(rng.choice((1, 2, 3)) if level == "easy" else rng.choice((2, 3, 4))):
        if total >= limit - 1 or (total > 2 and rng.random() < 0.5):
            change = rng.randint(1, total - 1)
            verb = rng.choice(("loses {n}", "sells {n}", "gives {n} to " + friend))
            steps.append(f"{total} - {change} = {total - change}")
            total -= change
        else:
            change = rng.randint(1, limit - total)
            verb = rng.choice(("buys {n} more", "finds {n} more", "gets {n} from " + friend))
            steps.append(f"{total} + {change} = {total + change}")
            total += change
        event = verb.format(n=change)
        sentences.append(f"{he} {event}.")
        leads.append(f"{name} {event}:")
    leads[0] = f"{sentences[0]}\n{leads[0]}"
    sentences.append(f"How many {obj} does {name} have now?")
    return Story("chain", " ".join(sentences), tuple(leads), tuple(steps), f" {obj}", total)


def boxes_story(rng: random.Random, level: Level) -> Story:
    """Equal groups, then some are taken away or added."""
    name, _ = rng.choice(NAMES)
    obj = rng.choice(OBJECTS)
    many, one = rng.choice(BOXES)
    limit = limit_of(level)
    groups = rng.randint(2, 4 if level == "easy" else 9)
    each = rng.randint(2, min(9, limit // groups))
    total = groups * each
    question = f"{name} has {groups} {many} with {each} {obj} in each {one}."
    leads, steps = ["There are"], [f"{groups} * {each} = {total}"]
    if level == "hard" or rng.random() < 0.5:
        if total >= limit - 1 or rng.random() < 0.5:
            change = rng.randint(1, total - 1)
            question += f" Then {change} of them are sold."
            steps.append(f"{total} - {change} = {total - change}")
            leads.append("That leaves")
            total -= change
        else:
            change = rng.randint(1, limit - total)
            question += f" Then {change} more are added."
            steps.append(f"{total} + {change} = {total + change}")
            leads.append("Now there are")
            total += change
    question += f" How many {obj} are there now?"
    return Story("boxes", question, tuple(leads), tuple(steps), f" {obj}", total)


def together_story(rng: random.Random, level: Level) -> Story:
    """One has more or fewer than another; how many together?"""
    (first, _), (second, _) = rng.sample(NAMES, 2)
    obj = rng.choice(OBJECTS)
    limit = limit_of(level)
    mine = rng.randint(2, limit // 2 - 1)
    if rng.random() < 0.5:
        change = rng.randint(1, limit - 2 * mine)
        theirs, sign, word = mine + change, "+", "more"
    else:
        change = rng.randint(1, mine - 1)
        theirs, sign, word = mine - change, "-", "fewer"
    question = (
        f"{first} has {mine} {obj}. {second} has {change} {word} than {first}. "
        f"How many {obj} do they have together?"
    )
    steps = (f"{mine} {sign} {change} = {theirs}", f"{mine} + {theirs} = {mine + theirs}")
    leads = (f"{second} has", "Together they have")
    return Story("together", question, leads, steps, f" {obj}", mine + theirs)


def price_story(rng: random.Random, level: Level) -> Story:
    """Several of one thing and one of another."""
    name, pronoun = rng.choice(NAMES)
    good, other = rng.sample(GOODS, 2)
    limit = limit_of(level)
    count = rng.randint(2, 4 if level == "easy" else 9)
    price = rng.randint(2, min(9, (limit - 2) // count))
    extra = rng.randint(1, min(limit - count * price, 50))
    first, total = count * price, count * price + extra
    question = (
        f"A {good} costs {price} dollars and a {other} costs {extra} dollars. "
        f"{name} buys {count} {good}s and one {other}. How many dollars does {pronoun} pay?"
    )
    steps = (f"{count} * {price} = {first}", f"{first} + {extra} = {total}")
    leads = (f"The {good}s cost", f"With the {other} it is")
    return Story("price", question, leads, steps, " dollars", total)


def share_story(rng: random.Random, level: Level) -> Story:
    """An equal share, then more or less of it."""
    name, pronoun = rng.choice(NAMES)
    obj = rng.choice(OBJECTS)
    friends = rng.randint(2, 4 if level == "easy" else 9)
    each = rng.randint(2, 5 if level == "easy" else 9)
    total = friends * each
    question = f"{name} shares {total} {obj} equally among {friends} friends."
    leads, steps, result = ["Each friend gets"], [f"{total} / {friends} = {each}"], each
    if level == "hard" or rng.random() < 0.4:
        extra = rng.randint(1, 10)
        question += f" Then {pronoun} gives each friend {extra} more."
        steps.append(f"{each} + {extra} = {each + extra}")
        leads.append("Now each has")
        result = each + extra
    question += f" How many {obj} does each friend have?"
    return Story("share", question, tuple(leads), tuple(steps), f" {obj}", result)


def age_story(rng: random.Random, level: Level) -> Story:
    """Ages that differ."""
    (first, _), (second, _), (third, _) = rng.sample(NAMES, 3)
    limit = limit_of(level)
    age = rng.randint(4, limit - 6)
    change = rng.randint(1, min(limit - age, 30) - 2)
    question = f"{first} is {age} years old. {second} is {change} years older than {first}."
    leads, steps, result = [f"{second} is"], [f"{age} + {change} = {age + change}"], age + change
    asked = second
    if level == "hard" or rng.random() < 0.5:
        change = rng.randint(1, result - 2)
        question += f" {third} is {change} years younger than {second}."
        leads.append(f"{third} is")
        steps.append(f"{result} - {change} = {result - change}")
        result -= change
        asked = third
    question += f" How old is {asked}?"
    return Story("age", question, tuple(leads), tuple(steps), " years old", result)


STORIES: tuple[Callable[[random.Random, Level], Story], ...] = (
    chain_story,
    chain_story,
    boxes_story,
    together_story,
    price_story,
    share_story,
    age_story,
)


# ---------------------------------------------------------------------------- lists and words


def write_list(rng: random.Random, level: Level) -> Draft:
    """An instruction about a list or a word."""
    family = rng.choice(LIST_FAMILIES)
    size = rng.randint(3, 4) if level == "easy" else rng.randint(4, 6)
    numbers = rng.sample(range(1, limit_of(level) + 1), size)
    words = rng.sample(WORDS, size if level == "easy" else min(size, 5))
    task = LIST_TASKS[family](rng, Drawn(level, numbers, words))
    working = task.working
    if working and rng.random() < 0.4:
        working = f"{rng.choice(OPENERS)}\n{working}"
    return Draft(family, task.question, f"{working}The answer is {task.answer}.", task.answer)


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a question about a list may ask of."""

    level: Level
    numbers: list[int]
    words: list[str]

    @property
    def listed(self) -> str:
        return listed(self.numbers)

    @property
    def spaced(self) -> str:
        return " ".join(self.words)


@dataclass(frozen=True, slots=True)
class ListTask:
    """A question about a list, its answer, and the lines that lead to it."""

    question: str
    answer: str
    working: str = ""


def listed(numbers: Iterable[int]) -> str:
    """Numbers as a sentence has them."""
    return ", ".join(map(str, numbers))


def reverse_task(rng: random.Random, drawn: Drawn) -> ListTask:
    """The list from its end."""
    working = f"{rng.choice(LIST_LEADS)} {drawn.listed}.\n"
    answer = listed(reversed(drawn.numbers))
    return ListTask(f"Reverse this list: {drawn.listed}.", answer, working)


def sort_task(rng: random.Random, drawn: Drawn) -> ListTask:
    """The list in order, mostly with a line for each number."""
    working = f"{rng.choice(LIST_LEADS)} {drawn.listed}.\n"
    if rng.random() < 0.7:
        working += "\n".join(ranked(drawn.numbers)) + "\n"
    question = f"Sort these numbers from small to large: {drawn.listed}."
    return ListTask(question, listed(sorted(drawn.numbers)), working)


def best_task(name: str, better: Callable[..., int]) -> Callable[[random.Random, Drawn], ListTask]:
    """The number that beats all others."""

    def task(rng: random.Random, drawn: Drawn) -> ListTask:
        del rng
        working = "\n".join(compared(drawn.numbers, better)) + "\n"
        question = f"What is the {name} of these numbers: {drawn.listed}?"
        return ListTask(question, str(better(drawn.numbers)), working)

    return task


def even_task(rng: random.Random, drawn: Drawn) -> ListTask:
    """The even numbers; each number is looked at."""
    del rng
    parity = [f"{n} is {'even' if n % 2 == 0 else 'odd'}." for n in drawn.numbers]
    answer = listed(n for n in drawn.numbers if n % 2 == 0) or "none"
    question = f"Which of these numbers are even: {drawn.listed}?"
    return ListTask(question, answer, " ".join(parity) + "\n")


def add_task(rng: random.Random, drawn: Drawn) -> ListTask:
    """The same number added to each, with a line for each sum."""
    step = rng.randint(1, 5)
    numbers = [n for n in drawn.numbers if n + step <= 99][:4] or [7]
    working = "\n".join(f"{n} + {step} = {n + step}" for n in numbers) + "\n"
    question = f"Add {step} to each number: {listed(numbers)}."
    return ListTask(question, listed(n + step for n in numbers), working)


def repeat_task(rng: random.Random, drawn: Drawn) -> ListTask:
    """One word, so many times."""
    word, times = rng.choice(WORDS), rng.randint(2, 4 if drawn.level == "easy" else 7)
    return ListTask(f"Repeat the word {word} {times} times.", " ".join([word] * times))


def backwards_task(rng: random.Random, drawn: Drawn) -> ListTask:
    """The words from the last to the first."""
    working = f"{rng.choice(WORD_LEADS)} {drawn.spaced}.\n"
    question = f"Write these words in reverse order: {drawn.spaced}."
    return ListTask(question, " ".join(reversed(drawn.words)), working)


def count_task(rng: random.Random, drawn: Drawn) -> ListTask:
    """How often a word stands in a row, with a line for each time."""
    target = rng.choice(drawn.words)
    row = [target, *(rng.choice((target, *drawn.words)) for _ in drawn.numbers)]
    rng.shuffle(row)
    hits = [word for word in row if word == target]
    working = "".join(f"{i} {word}\n" for i, word in enumerate(hits, start=1))
    question = f"How many times is {target} in this row: {' '.join(row)}?"
    return ListTask(question, str(len(hits)), working)


def last_task(rng: random.Random, drawn: Drawn) -> ListTask:
    """The last of the words."""
    working = f"{rng.choice(WORD_LEADS)} {drawn.spaced}.\n"
    return ListTask(f"What is the last word here: {drawn.spaced}?", drawn.words[-1], working)


def spell_task(rng: random.Random, drawn: Drawn) -> ListTask:
    """A word, letter by letter."""
    word = rng.choice([word for word in WORDS if drawn.level == "hard" or len(word) <= 4])
    return ListTask(f"Spell the word {word}.", "-".join(word))


def letter_task(rng: random.Random, drawn: Drawn) -> ListTask:
    """How often a letter stands in a word, which is spelled out first."""
    word = rng.choice(drawn.words)
    letter = rng.choice(word)
    working = f"{rng.choice(LETTER_LEADS)} {'-'.join(word)}.\n"
    question = f"How many times is the letter {letter} in {word}?"
    return ListTask(question, str(word.count(letter)), working)


def ranked(numbers: list[int]) -> list[str]:
    """A line for each number, smallest first."""
    places = ("Smallest", *(["Next"] * (len(numbers) - 2)), "Largest")
    return [f"{place}: {n}" for place, n in zip(places, sorted(numbers), strict=True)]


def compared(numbers: list[int], better: Callable[[int, int], int]) -> list[str]:
    """A line for each comparison of the best number so far with the next one."""
    lines, best = [], numbers[0]
    for n in numbers[1:]:
        lines.append(f"Of {best} and {n} it is {better(best, n)}.")
        best = better(best, n)
    return lines


LIST_LEADS = ("The numbers are", "We have", "Here are")
WORD_LEADS = ("The words are", "We have", "Here are")
LETTER_LEADS = ("The letters are", "It is spelled", "One by one")
LIST_TASKS: dict[str, Callable[[random.Random, Drawn], ListTask]] = {
    "reverse": reverse_task,
    "sort": sort_task,
    "largest": best_task("largest", max),
    "smallest": best_task("smallest", min),
    "even": even_task,
    "add": add_task,
    "repeat": repeat_task,
    "backwards": backwards_task,
    "count": count_task,
    "last": last_task,
    "spell": spell_task,
    "letters": letter_task,
}
LIST_FAMILIES = tuple(LIST_TASKS)


# ------------------------------------------------------------------------------------- code


@dataclass(frozen=True, slots=True)
class Function:
    """A function to be asked for: how to say it, how to write it, what to call it with."""

    family: str
    ask: str
    parameters: str
    body: str
    inputs: tuple[tuple[Value, ...], ...]


INTS: tuple[tuple[Value, ...], ...] = ((3,), (10,), (-4,), (12,), (7,))
PAIRS: tuple[tuple[Value, ...], ...] = ((3, 5), (9, 2), (4, 4), (-1, 6))
LISTS: tuple[tuple[Value, ...], ...] = (([3, 1, 2],), ([9, 4, 7, 7],), ([12],), ([5, 30, 8],))
TEXTS: tuple[tuple[Value, ...], ...] = (("red",), ("Sun dog",), ("level",), ("Tea",))

FUNCTIONS: tuple[Function, ...] = (
    Function("plus", "the sum of x and {k}", "x", "x + {k}", INTS),
    Function("minus", "x minus {k}", "x", "x - {k}", INTS),
    Function("times", "x times {k}", "x", "x * {k}", INTS),
    Function("square", "the square of x", "x", "x * x", INTS),
    Function("even", "whether x is even", "x", "x % 2 == 0", INTS),
    Function("odd", "whether x is odd", "x", "x % 2 == 1", INTS),
    Function("divisible", "whether x is divisible by {k}", "x", "x % {k} == 0", INTS),
    Function("above", "whether x is larger than {k}", "x", "x > {k}", INTS),
    Function("absolute", "the absolute value of x", "x", "abs(x)", INTS),
    Function("sum", "the sum of a and b", "a, b", "a + b", PAIRS),
    Function("difference", "the difference of a and b", "a, b", "a - b", PAIRS),
    Function("product", "the product of a and b", "a, b", "a * b", PAIRS),
    Function("larger", "the larger of a and b", "a, b", "max(a, b)", PAIRS),
    Function("smaller", "the smaller of a and b", "a, b", "min(a, b)", PAIRS),
    Function("first", "the first item of items", "items", "items[0]", LISTS),
    Function("final", "the last item of items", "items", "items[-1]", LISTS),
    Function("length", "the number of items", "items", "len(items)", LISTS),
    Function("total", "the sum of items", "items", "sum(items)", LISTS),
    Function("sorted", "items in sorted order", "items", "sorted(items)", LISTS),
    Function("reversed", "items in reverse order", "items", "items[::-1]", LISTS),
    Function("keep", "the items larger than {k}", "items", "[i for i in items if i > {k}]", LISTS),
    Function("raise", "each item plus {k}", "items", "[i + {k} for i in items]", LISTS),
    Function("scale", "each item times {k}", "items", "[i * {k} for i in items]", LISTS),
    Function("upper", "the text s in upper case", "s", "s.upper()", TEXTS),
    Function("mirror", "the text s backwards", "s", "s[::-1]", TEXTS),
    Function("again", "the text s repeated {k} times", "s", "s * {k}", TEXTS),
)


def write_code(rng: random.Random, level: Level) -> Draft:
    """A one-expression Python function, in one of two shapes."""
    function = rng.choice(FUNCTIONS)
    name = rng.choice(FUNCTION_NAMES)
    k = rng.randint(2, 9 if level == "easy" else 30)
    ask, body = function.ask.format(k=k), function.body.format(k=k)
    verb = rng.choice(("returns", "gives"))
    question = f"Write a function {name}({function.parameters}) that {verb} {ask}."
    head = f"def {name}({function.parameters}):\n"
    if rng.random() < 0.5:
        name = rng.choice(RESULT_NAMES)
        code = f"{head}    {name} = {body}\n    return {name}"
    else:
        code = f"{head}    return {body}"
    cases = tuple(Case(given, call_function(code, given)) for given in function.inputs)
    return Draft(function.family, question, code, code, cases)


# ---------------------------------------------------------------------------------- stories


VERBS = ("found", "saw", "got", "made", "lost")
PLACES = ("in the garden", "by the river", "on the road", "at home", "under a tree", "in the rain")
LOOKS = ("old", "new", "big", "small", "green", "nice", "odd", "warm", "soft", "dark")
DEEDS = (
    "{he} took it home",
    "{he} put it in a box",
    "{he} gave it to {friend}",
    "{he} showed it to {friend}",
    "{friend} wanted it too",
    "{he} looked at it for a long time",
)
MOODS = ("happy", "sad", "tired", "proud", "calm", "glad")
LAST_LINE = "The end."


def write_story(rng: random.Random, level: Level) -> Draft:
    """A few sentences about somebody and one thing or two; the request leaves the rest open."""
    (name, he), (friend, _) = rng.sample(NAMES, 2)
    things = rng.sample(GOODS, 1 if level == "easy" else 2)
    subject = " and ".join((name, *(f"a {thing}" for thing in things)))
    question = rng.choice(("Write a short story about {}.", "Tell me a story about {}."))
    deeds = rng.sample(DEEDS, rng.choice((1, 2)))
    sentences = [f"{rng.choice(('One day', 'Last week', 'Once'))} {name} {rng.choice(VERBS)}"]
    sentences[0] += f" a {things[0]} {rng.choice(PLACES)}."
    sentences.append("It was {} and {}.".format(*rng.sample(LOOKS, 2)))
    if level == "hard":
        sentences.append(f"There was a {things[1]} {rng.choice(PLACES)} too.")
    for deed in deeds:
        told = deed.format(he=he, friend=friend)
        sentences.append(f"{rng.choice(NEXT)} {told}.")
    sentences.append(f"{rng.choice((name, friend))} was {rng.choice(MOODS)}.")
    response = " ".join(sentences) + f"\n{LAST_LINE}"
    return Draft("story", question.format(subject), response, ", ".join((name, *things)))


def tells_as_asked(text: str, subjects: list[str]) -> bool:
    """Whether a story speaks of its subjects in known words, repeats nothing and ends."""
    body, _, last = text.rpartition("\n")
    sentences = [sentence.strip() for sentence in body.split(".") if sentence.strip()]
    words = body.replace(".", " ").split()
    told = 3 <= len(sentences) == len(set(sentences)) <= 8 and body.endswith(".")
    return (
        told
        and last == LAST_LINE
        and all(subject in words for subject in subjects)
        and all(word in STORY_WORDS for word in words)
    )


STORY_WORDS = frozenset(
    " ".join(
        (
            *VERBS, *PLACES, *LOOKS, *DEEDS, *MOODS, *NEXT, *GOODS, *(name for name, _ in NAMES),
            "he she One day Last week Once a It was and There too",
        )
    ).split()
)  # fmt: skip


WRITERS: dict[Kind, Callable[[random.Random, Level], Draft]] = {
    "math": write_math,
    "code": write_code,
    "list": write_list,
    "story": write_story,
}

CALLABLE = {"abs": abs, "len": len, "max": max, "min": min, "sorted": sorted, "sum": sum}
METHODS = ("upper", "lower")
PLAIN_NODES = (
    ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.Name, ast.Load,
    ast.Store, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Mod, ast.UnaryOp, ast.USub, ast.Compare,
    ast.Eq, ast.NotEq, ast.Gt, ast.GtE, ast.Lt, ast.LtE, ast.Call, ast.Subscript, ast.Slice,
    ast.ListComp, ast.comprehension, ast.Attribute, ast.Constant, ast.List,
)  # fmt: skip


def runs_as_asked(code: str, cases: tuple[Case, ...]) -> bool:
    """Whether a written function answers every case; code outside the small language fails."""
    try:
        return all(call_function(code, case.arguments) == case.expected for case in cases)
    except (
        ArithmeticError, AttributeError, LookupError, NameError, RecursionError, SyntaxError,
        TypeError, ValueError,
    ):  # fmt: skip
        return False


def call_function(code: str, arguments: tuple[Value, ...]) -> Value:
    """Call the one function that `code` defines, once every node of it is known to be harmless."""
    tree = ast.parse(code)
    nodes = list(ast.walk(tree))
    if len(nodes) > 60 or len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef):
        raise SyntaxError("want one short function")
    if sum(isinstance(node, ast.Mult) for node in nodes) > 1:
        raise SyntaxError("want one product at most: a repeated text grows with every one")
    for node in nodes:
        assert_harmless(node)
    scope: dict[str, object] = {"__builtins__": dict(CALLABLE)}
    exec(compile(tree, "<answer>", "exec"), scope)  # noqa: S102 - only whitelisted nodes
    function = scope[tree.body[0].name]
    copies = [list(value) if isinstance(value, list) else value for value in arguments]
    result: Value = function(*copies)  # type: ignore[operator]
    return result


def assert_harmless(node: ast.AST) -> None:
    """Raise SyntaxError unless the node belongs to the small language of the corpus."""
    small = not isinstance(node, ast.Constant) or (
        isinstance(node.value, int) and abs(node.value) < 1000
    )
    method = not isinstance(node, ast.Attribute) or node.attr in METHODS
    named = not isinstance(node, ast.Name) or not node.id.startswith("_")
    bare = not isinstance(node, ast.FunctionDef) or not node.decorator_list
    if not (isinstance(node, PLAIN_NODES) and small and method and named and bare):
        raise SyntaxError(f"{type(node).__name__} is outside the small language")


# ----------------------------------------------------------------------------------- prompts


def held_out_problems(count: int, *, seed: int) -> Iterator[Problem]:
    """The questions that figures are measured on."""
    return problems(count, seed=seed, split="held-out")


def problems(count: int, *, seed: int, split: Split, hard_share: float = 0.4) -> Iterator[Problem]:
    """The first `count` distinct questions of a split, a fixed share of them hard."""
    seen: set[str] = set()
    index = 0
    while len(seen) < count:
        level: Level = "hard" if (index * hard_share) % 1.0 < hard_share else "easy"
        problem = problem_at(index, split=split, seed=seed, level=level)
        index += 1
        if problem.question not in seen:
            seen.add(problem.question)
            yield problem


def write_prompts(
    path: Path,
    *,
    count: int = 240,
    seed: int = 0,
    split: Split = "held-out",
    temperatures: Sequence[float] = (),
) -> None:
    """Write prompts as JSON lines (id, question, kind, answer), `temperatures` in turn if any."""
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as lines:
        for index, problem in enumerate(problems(count, seed=seed, split=split)):
            row: dict[str, str | float] = {
                "id": problem.id,
                "question": problem.question,
                "kind": problem.kind,
                "answer": problem.answer,
            }
            if temperatures:
                row["temperature"] = temperatures[index % len(temperatures)]
            lines.write(json.dumps(row) + "\n")
    partial.replace(path)
