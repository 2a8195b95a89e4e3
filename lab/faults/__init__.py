"""Fault injection: ranks killed, stopped, starved and cut off, and what becomes of the run."""
