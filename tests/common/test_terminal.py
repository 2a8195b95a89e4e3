"""What others wrote does not steer the terminal."""

import io
import logging
import subprocess
import sys
import unicodedata
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ladder_residual.common.line_writer import LineWriter
from ladder_residual.common.terminal import make_messages_printable, one_line, printable, show

ESCAPES = "\x1b]52;c;aGk=\x07 \x9b2J \x08\x7f \u202e \r over"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@given(st.text())
def test_no_control_character_is_left_but_tabs_and_line_ends(text):
    left = printable(text).replace("\r\n", "\n").replace("\n", "").replace("\t", "")
    assert not any(unicodedata.category(character) in ("Cc", "Cs") for character in left)
    assert printable(printable(text)) == printable(text)
    assert len(one_line(text).splitlines()) <= 1


@pytest.mark.parametrize("text", ["two\nlines\tand a tab\r\n", "žluťoučký 漢字 🙂", "a \\x1b written out"])
def test_ordinary_text_stays(text):
    assert printable(text) == text


def test_control_characters_are_written_out():
    assert printable("\x1b[31mred\x9b \u202e\udc80") == r"\x1b[31mred\x9b \u202e\udc80"


@pytest.mark.parametrize("write", [show, lambda text: LineWriter(None).write(text)], ids=["show", "LineWriter"])
def test_a_terminal_gets_printable_text_and_a_pipe_every_character(monkeypatch, write):
    for stream, expected in ((Terminal(), printable(ESCAPES)), (io.StringIO(), ESCAPES)):
        monkeypatch.setattr(sys, "stdout", stream)
        write(ESCAPES)
        assert stream.getvalue() == expected + "\n"


def test_what_is_logged_or_warned_of_is_printable(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    factory = logging.getLogRecordFactory()
    try:
        make_messages_printable()
        assert logging.makeLogRecord({}).getMessage() == ""
        record = logging.getLogger("x").makeRecord("x", 30, "f", 1, "a %s", (ESCAPES,), None)
        assert record.getMessage() == f"a {printable(ESCAPES)}"
        assert "\x1b" not in warnings.formatwarning(ESCAPES, UserWarning, "f", 1)
        sys.excepthook(KeyError, KeyError("x"), None)
        sys.excepthook(RuntimeError, RuntimeError(ESCAPES), None)
        assert "\x1b" not in sys.stderr.getvalue()
        assert "RuntimeError" in sys.stderr.getvalue()
    finally:
        logging.setLogRecordFactory(factory)


def test_an_error_is_one_printable_line():
    done = subprocess.run(
        [sys.executable, "-m", "ladder_residual", "plan", "--model", "\x1b[31m\nevil/\x9b.json"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert "\x1b" not in done.stderr
    assert "\x9b" not in done.stderr
