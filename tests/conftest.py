"""For all tests."""

from __future__ import annotations

import sys

import torch

from spot_batch import noise

# Two cores are shared by tests, actors and helpers; and canonical numerics want few threads.
torch.set_num_threads(1)

# Nor is there time to compile in the middle of a test; those of the kernel do it where they say so.
noise.rounds = noise.Rounds(worth_compiling=sys.maxsize)
