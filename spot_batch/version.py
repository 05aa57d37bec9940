"""The version of spot-batch, for whatever is written down."""

__version__ = "0.1.0"
