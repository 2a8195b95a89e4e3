"""Predict before buying: cost model, event simulator, validation, pictures. Nothing in this package imports torch."""

from .planner import PlanRow, hybrid_curve, plan

__all__ = ["PlanRow", "hybrid_curve", "plan"]
