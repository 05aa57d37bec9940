"""For all tests."""

from __future__ import annotations

import torch

# Two cores are shared by tests, actors and helpers; and canonical numerics want few threads.
torch.set_num_threads(1)
