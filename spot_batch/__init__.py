"""spot-batch: exact batch inference for block-diffusion language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spot_batch.version import __version__

if TYPE_CHECKING:
    from spot_batch.results.load import load

__all__ = ["__version__", "load"]


def __getattr__(name: str) -> Any:
    if name == "load":  # pyarrow and datasets are read when somebody loads
        from spot_batch.results.load import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
