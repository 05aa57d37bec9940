"""spot-batch: exact batch inference for block-diffusion language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spot_batch.store.load import load

__all__ = ["__version__", "load"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "load":  # pyarrow and datasets are read when somebody loads
        from spot_batch.store.load import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
