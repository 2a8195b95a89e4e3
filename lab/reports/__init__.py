"""Builders of the generated pages in docs/results: ``python -m lab.reports`` writes all of them from the JSON in results/."""
