"""For all tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any
from urllib.request import Request, urlopen

import boto3
import pytest
import torch
from moto.server import ThreadedMotoServer

from spot_batch import noise

# Two cores are shared by tests, actors and helpers; and canonical numerics want few threads.
torch.set_num_threads(1)

# Nor is there time to compile in the middle of a test; those of the kernel do it where they say so.
noise.philox = noise.Philox(worth_compiling=sys.maxsize)


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
