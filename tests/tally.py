"""What the exactness tests have compared, for one line at the end of a session."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """Sequences compared in a session of tests, those that differed, and what else to say."""

    num_compared: int = 0
    differing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, *, same: bool, what: object) -> None:
        """Count one comparison."""
        self.num_compared += 1
        if not same:
            self.differing.append(str(what))

    def note(self, line: str) -> None:
        """Keep a line for the end of the session."""
        if line not in self.notes:
            self.notes.append(line)

    def merge(self, other: Tally) -> None:
        """Add what another process of the session has compared."""
        self.num_compared += other.num_compared
        self.differing += other.differing
        for line in other.notes:
            self.note(line)
