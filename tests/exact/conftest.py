"""One line at the end of a session: how many sequences were compared, and how many differ."""

from __future__ import annotations

import pytest
import torch

from tests.exact.harness import Tally

_TALLY = pytest.StashKey[Tally]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_TALLY] = Tally()


@pytest.fixture(scope="session")
def tally(pytestconfig: pytest.Config) -> Tally:
    """Where every comparison of whole sequences is counted."""
    return pytestconfig.stash[_TALLY]


@pytest.fixture
def one_thread():
    """Small tensors: a second thread costs more than it does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    tally = config.stash[_TALLY]
    if not tally.num_compared and not tally.notes:
        return
    terminalreporter.section("exactness")
    for note in tally.notes:
        terminalreporter.write_line(note)
    terminalreporter.write_line(
        f"{tally.num_compared} sequences compared, {len(tally.differing)} differ"
    )
