"""``ladder bench hosts``: several hosts on one machine, a slow link between them, every wiring in one run."""
