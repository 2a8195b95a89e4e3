"""Programs of this package in processes of their own, forked from the server of ``tests/ranks.py``: a start of Python that imports
torch and transformers takes seconds, this one a fraction of one."""

import os
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.ranks import CONTEXT


def _program(module, words, files, folder, environment):
    os.setsid()
    for number, (file, mode) in enumerate(zip(files, "rww", strict=True)):
        stream = open(file, mode, encoding="utf-8")  # noqa: SIM115 (for as long as the process lives)
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", buffering=1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background of a shell
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class Program:
    """``python -m MODULE WORDS``, with what one needs of ``subprocess.Popen``. It leads a session."""

    def __init__(self, *words, module="ladder_residual", cwd="", env=None, input="", stdout=None):
        self._scratch = tempfile.TemporaryDirectory(prefix="forked-")
        self._files = [Path(self._scratch.name, name) for name in ("in", "out", "err")]
        self._files[1] = stdout or self._files[1]
        self._files[0].write_text(input)
        files, words = [str(file) for file in self._files], [str(word) for word in words]
        given = (module, words, files, os.path.abspath(cwd), dict(env or os.environ))
        self._process = CONTEXT.Process(target=_program, args=given)
        self._process.start()
        self.pid = self._process.pid

    def poll(self):
        self._process.join(0)
        return self._process.exitcode

    def wait(self, timeout):
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked program", timeout)
        return self._process.exitcode

    @property
    def stdout(self):
        return self._files[1].read_text()

    @property
    def stderr(self):
        return self._files[2].read_text()

    @property
    def returncode(self):
        return self._process.exitcode

    def kill(self):
        """It and what it started, unless it has ended."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.join()


def run_program(*words, timeout=240, **options):
    """It, when it has ended."""
    program = Program(*words, **options)
    try:
        program.wait(timeout)
    finally:
        program.kill()
    return program


def fork_command(command, **_):
    """In the place of ``subprocess.run``, for ``python -m MODULE WORDS``."""
    _, _, module, *words = command
    program = run_program(*words, module=module)
    return subprocess.CompletedProcess(command, program.returncode, program.stdout + program.stderr)
