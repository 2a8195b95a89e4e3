"""Loads this checkpoint through the package `ladder-residual`, which knows its wiring."""

try:
    from ladder_residual import model as _model
except ImportError as error:
    raise ImportError(
        "this checkpoint has a rewired residual stream that only the package ladder-residual computes: pip install ladder-residual"
    ) from error


def __getattr__(name):
    return getattr(_model, name)
