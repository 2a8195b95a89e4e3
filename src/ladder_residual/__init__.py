"""Ladder Residual: transformers whose tensor-parallel communication hides behind compute."""

__version__ = "0.1.0"
