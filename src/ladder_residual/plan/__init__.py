"""Predict before buying: cost model, event simulator, validation, pictures. Nothing in this package imports torch."""

from .api import plan
from .planner import PlanRow, hybrid_curve

__all__ = ["PlanRow", "hybrid_curve", "plan"]
