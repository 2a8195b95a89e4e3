import errno
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from ladder_residual.common.locks import Lock

HOLD = """
import pathlib, sys
from ladder_residual.common.locks import Lock
Lock(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["directory", "file", "new file"])
def test_a_second_writer_hears_who_holds_the_place(tmp_path, kind):
    path = tmp_path / "place"
    if kind == "directory":
        path.mkdir()
    elif kind == "file":
        path.touch()
    with Lock(path), pytest.raises(ValueError, match=f"{re.escape(str(path))} is in use by process {os.getpid()} on "):
        Lock(path)
    with Lock(path):  # free again
        pass
    assert sorted(str(left.relative_to(tmp_path)) for left in tmp_path.rglob("*")) == (["place"] if path.exists() else [])


def test_a_link_is_the_file_it_leads_to(tmp_path):
    (tmp_path / "link").symlink_to("place")
    with Lock(tmp_path / "place"), pytest.raises(ValueError, match="link is in use by process"):
        Lock(tmp_path / "link")


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(ValueError, match=f"process {holder.pid} on {socket.gethostname()}"):
        Lock(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert (tmp_path / ".lock").exists()
    with Lock(tmp_path):
        assert f"process {os.getpid()} on" in (tmp_path / ".lock").read_text()


def test_a_lock_file_removed_by_its_holder_is_not_taken_for_the_lock(tmp_path, monkeypatch):
    """Whoever opened it just before must not hold a file that has no name, beside someone who holds the next one."""
    first, flock = Lock(tmp_path), fcntl.flock

    def released_before(descriptor, how):
        monkeypatch.setattr(fcntl, "flock", flock)
        first.release()
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", released_before)
    with Lock(tmp_path), pytest.raises(ValueError, match="in use"):
        Lock(tmp_path)


def test_what_the_file_system_refuses_is_said(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".lock").symlink_to(victim)
    with pytest.raises(ValueError, match=f"cannot lock {tmp_path}"):
        Lock(tmp_path)
    assert victim.read_text() == "precious"
    with pytest.raises(ValueError, match="cannot lock .*: No such file"):
        Lock(tmp_path / "missing" / "file")

    def without_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without_locks)
    with pytest.warns(UserWarning, match="has no locks"):
        Lock(tmp_path / "file").release()


def test_escape_sequences_of_a_lock_file_stay_in_it(tmp_path):
    with Lock(tmp_path):
        (tmp_path / ".lock").write_text("\x1b[2J")
        with pytest.raises(ValueError, match="in use by another process"):
            Lock(tmp_path)
