"""What a person sees: plain text, whatever the model or the prompt tries to do to the terminal."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from spot_batch.job.secrets import redacted

_KEPT_CONTROLS = "\n\t"
# Marks that reorder what stands around them: a text could pass for another.
_REORDERING = frozenset(map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F)))


def printable(text: str) -> str:
    """The text with control and reordering characters spelled out, so that it stays text."""
    return "".join(
        char
        if char in _KEPT_CONTROLS
        or (unicodedata.category(char) not in ("Cc", "Cs") and char not in _REORDERING)
        else char.encode("unicode_escape").decode()
        for char in text
    )


def shortened(text: str, *, num_lines: int, num_chars: int) -> str:
    """The beginning of a text, with a note of what was left out."""
    kept = "\n".join(text[:num_chars].split("\n")[:num_lines])
    left = len(text) - len(kept)
    return kept if left <= 0 else f"{kept} … ({left:,} more characters)"


class Screen:
    """Writes to one console; nothing that it is given can carry markup or escapes."""

    def __init__(self, *, to_stderr: bool = False) -> None:
        self.console = Console(stderr=to_stderr, highlight=False, markup=False, soft_wrap=True)

    def line(self, text: str = "", style: str = "") -> None:
        self.console.print(Text(printable(redacted(text)), style=style))

    def facts(self, facts: Sequence[tuple[str, str]]) -> None:
        """Names and values in two columns."""
        width = max(len(name) for name, _ in facts)
        for name, value in facts:
            first, *rest = printable(redacted(value)).split("\n")
            self.console.print(Text.assemble((f"{name:<{width}}  ", "bold"), first))
            for each in rest:
                self.console.print(Text(f"{'':<{width}}  {each}"))

    def quoted(self, text: str, *, num_lines: int = 12, num_chars: int = 1_000) -> None:
        """Somebody else's text, set off from ours."""
        for each in printable(shortened(text, num_lines=num_lines, num_chars=num_chars)).split(
            "\n"
        ):
            self.console.print(Text("  | " + each, style="dim"))

    def pair(self, prompt: str, answer: str) -> None:
        self.console.print()
        for label, text in (("prompt", prompt), ("answer", answer)):
            shown = printable(shortened(text, num_lines=8, num_chars=600))
            self.console.print(
                Text.assemble((f"  {label}  ", "bold"), shown.replace("\n", "\n" + " " * 10))
            )
