"""For all tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any
from urllib.request import Request, urlopen

import boto3
import pytest
import torch
from moto.server import ThreadedMotoServer

from spot_batch import noise
from tests.tally import Tally

# Two cores are shared by tests, actors and helpers; and canonical numerics want few threads.
torch.set_num_threads(1)

# Nor is there time to compile in the middle of a test; those of the kernel do it where they say so.
noise.philox = noise.Philox(worth_compiling=sys.maxsize)

_TALLY = pytest.StashKey[Tally]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where processes share the tests (`-n 2 --dist loadgroup`), who gets what, and in which order.

    All tests that start a Ray go to one process, one after another, and first, since they take
    longest. The other tests of a file stay together: they share what they are run on.
    """
    items.sort(key=lambda item: item.get_closest_marker("ray") is None)
    for item in items:
        alone = item.get_closest_marker("ray") is not None
        item.add_marker(pytest.mark.xdist_group("ray" if alone else item.nodeid.partition("::")[0]))


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_TALLY] = Tally()


@pytest.fixture(scope="session")
def tally(pytestconfig: pytest.Config) -> Tally:
    """Where every comparison of whole sequences is counted."""
    return pytestconfig.stash[_TALLY]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """One of several processes hands its tally to the one that speaks."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["tally"] = asdict(session.config.stash[_TALLY])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    told = getattr(node, "workeroutput", {}).get("tally")
    if told is not None:
        node.config.stash[_TALLY].merge(Tally(**told))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """One line at the end: how many sequences were compared, and how many differ."""
    tally = config.stash[_TALLY]
    if not tally.num_compared and not tally.notes:
        return
    terminalreporter.section("exactness")
    for note in tally.notes:
        terminalreporter.write_line(note)
    terminalreporter.write_line(
        f"{tally.num_compared} sequences compared, {len(tally.differing)} differ"
    )


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of a real S3 server with a bucket `rows`; the environment points at it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in (
        ("AWS_ENDPOINT_URL", f"http://{host}:{port}"),
        ("AWS_ACCESS_KEY_ID", "testing"),
        ("AWS_SECRET_ACCESS_KEY", "testing"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="rows")
    yield client
    # What it holds belongs to the process, not to the server.
    urlopen(Request(f"http://{host}:{port}/moto-api/reset", method="POST")).close()
    server.stop()
