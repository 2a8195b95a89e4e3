"""Progress of a long task on standard error."""

import io
import sys

from ladder_residual.common import progress as module
from ladder_residual.common.progress import progress


def test_lines_without_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0.0)
    with progress("completions", 5, done=2) as step:
        step("7 tokens/s")
        step("")
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("completions 3/5, 7 tokens/s, about ")
    assert first.endswith(" left")
    assert second.startswith("completions 4/5, about ")


def test_the_time_left_is_that_of_whole_batches(monkeypatch, capsys):
    """Eight steps at once after ten seconds are eight of ten seconds, not eight of none."""
    clock = iter([0.0, 0.0, *[10.0] * 40])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0.0)
    with progress("completions", 80) as step:
        for _ in range(8):
            step("")
    assert capsys.readouterr().err.splitlines()[-1] == "completions 8/80, about 0:01:30 left"


def test_a_bar_in_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with progress("completions", 2) as step:
        step("7 tokens/s")
    assert "1/2" in sys.stderr.getvalue()
    assert "7 tokens/s" in sys.stderr.getvalue()
