"""Measurements. Each returns a JSON-able dict; the commands print it as their last line."""
