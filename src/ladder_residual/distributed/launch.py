"""Start this command again as several ranks on this host, through torch's elastic launcher.

``ladder generate --tp 2`` calls this once in the parent; the workers see torchrun's environment and go straight to work. If a
rank dies the launcher stops the others, and the parent says which one it was.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..common.terminal import make_messages_printable, one_line

USER_ERROR = 2  # exit code of a rank that has printed its error already
LOST_PEER = 3  # exit code of a rank that failed because another one did
OUT_OF_MEMORY = 4  # exit code of a rank that could not get the memory it needs
STOPPED = 128 + signal.SIGTERM  # exit code of a run that saved a checkpoint because of SIGTERM, as schedulers expect
# The last is what CPython 3.11 says of a frame that it has no memory for.
_NO_MEMORY = re.compile(
    "can't allocate memory|Cannot allocate memory|out of memory|error return without exception set", re.IGNORECASE
)
_FRAME_WORDS = 1 << 16  # see _with_room_for_frames
_SILENT = re.compile(r"waited [0-9]+ s for|[Tt]imed out|timeout caused|[Tt]imeout waiting|Wait timeout")
_HANDLERS = {signal.SIGINT: signal.default_int_handler} | dict.fromkeys(
    (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT), signal.SIG_DFL
)
STORE = "LADDER_STORE"  # environment variable: the file in which the ranks of ``launch`` find each other
_MESSAGES = "LADDER_MESSAGES"  # environment variable: the directory in which ranks leave their error messages
_CAUSE_SECONDS = 5.0  # how long a rank that lost another leaves it to the launcher to find out what became of that one


def launched() -> int:
    """How many processes the launcher (torchrun) started this one among; 1 without a launcher."""
    value = os.environ.get("WORLD_SIZE", "1")
    if not value.isascii() or not value.isdigit() or int(value) < 1:
        raise ValueError(f"the environment variable WORLD_SIZE is {value!r:.40}, expected a number of processes")
    return int(value)


def speaks_first() -> bool:
    """Whether this process checks and says what concerns the whole run before its ranks have met: the one that starts them, rank 0
    of torchrun's, or the only one."""
    return _MESSAGES not in os.environ and os.environ.get("RANK", "0") == "0"


def missing_ranks(tp: int | None) -> bool:
    """Whether ``tp`` ranks must be started first: not for one, and not where a launcher has started them."""
    size = launched()
    if tp is not None and tp < 1:
        raise ValueError(f"tp must be at least 1, got {tp}")
    if size > 1 and tp is not None and tp != size:
        raise ValueError(f"tp {tp} was asked for, but the launcher started {size} ranks; leave tp out or make them equal")
    return size == 1 and tp is not None and tp > 1


def on_ranks(tp: int | None, module: str = "ladder_residual", preload: str = "torch") -> None:
    """Go on in this process if it is one of ``tp`` ranks; otherwise start them with this command line and exit with their code.
    ``preload`` names the module that takes long to import and that every rank needs."""
    if missing_ranks(tp):
        assert tp is not None
        raise SystemExit(launch(sys.argv[1:], tp, module, preload))


def report_error(message: str, code: int) -> None:
    """Print the error in one line. A rank that ``launch`` started leaves it to the launcher, which prints what all ranks say once,
    and the cause before its consequences."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    rank = os.environ.get("RANK", "0") if ranks not in ("", "1") else "0"
    message = one_line(message)
    if folder := os.environ.get(_MESSAGES):
        # The launcher may end this rank at any moment: a message is there whole or not at all.
        draft = Path(folder, f"{rank}.draft")
        draft.write_text(json.dumps([code, message]), encoding="utf-8")
        draft.rename(Path(folder, rank))
        if code == LOST_PEER and not _SILENT.search(message):
            # The launcher ends all ranks when it sees the first that has failed, and knows of no other: that must be the cause.
            time.sleep(_CAUSE_SECONDS)
    else:
        print(f"error: {message}" if rank == "0" else f"error: rank {rank}: {message}", file=sys.stderr)


def is_out_of_memory(error: BaseException) -> bool:
    """The host's fault, whatever was being done: nobody may take it for a fault of the input."""
    kinds = RuntimeError | OSError | SystemError
    return isinstance(error, MemoryError) or (isinstance(error, kinds) and bool(_NO_MEMORY.search(str(error))))


def user_message(error: Exception) -> tuple[str, int] | None:
    """The message for the user and the exit code of ``error``; None if it is unexpected, so that its traceback is shown."""
    text = str(error)
    if is_out_of_memory(error):
        rank = os.environ["RANK"] if os.environ.get("WORLD_SIZE", "1") not in ("", "1") else None
        detail = f" ({text.splitlines()[0][:200]})" if text else ""
        return _out_of_memory(rank, detail, sure=not isinstance(error, SystemError)), OUT_OF_MEMORY
    if isinstance(error, ValueError | OSError):
        return text, USER_ERROR
    from .sockets import PeerLost

    return (text, LOST_PEER) if isinstance(error, PeerLost) else None


def _out_of_memory(rank: object, detail: str = "", sure: bool = True) -> str:
    who = "" if rank is None else f"rank {rank} on "
    ended = "ran" if sure else "probably ran"
    return f"{who}{socket.gethostname()} {ended} out of memory{detail}: use more ranks, a smaller batch or fewer tokens"


def follow_launcher() -> None:
    """A rank that ``launch`` started ends with it, however that ended."""
    if _MESSAGES in os.environ and sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def run_command(command: Callable[[], object]) -> None:
    """Run the main function of a program: what the user did wrong is one line and an exit code, not a traceback."""
    follow_launcher()
    make_messages_printable()
    try:
        _with_room_for_frames(command)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if is_out_of_memory(error):
            _end_without_memory(error)
        known = user_message(error)
        if known is None:
            raise
        report_error(*known)
        sys.exit(known[1])


def _with_room_for_frames(command: Callable[[], object]) -> None:
    """Python asks for memory as calls nest; where it gets none, CPython 3.11 ends in SystemError or SIGSEGV. So this asks for the
    frames of all calls below at once: its own is made large, and CPython takes twice that. What is not used takes address space only."""
    command()


_with_room_for_frames.__code__ = _with_room_for_frames.__code__.replace(co_stacksize=_FRAME_WORDS)


def _end_without_memory(error: Exception) -> NoReturn:
    """With a message if there is memory for one; the launcher writes that of a rank which ends with this code and left none."""
    error.__traceback__ = error.__context__ = error.__cause__ = None  # frees what the calls held
    try:
        if known := user_message(error):
            report_error(*known)
    finally:
        sys.exit(OUT_OF_MEMORY)


def launch(arguments: Sequence[str], ranks: int, module: str = "ladder_residual", preload: str = "torch") -> int:
    """Run ``python -m MODULE ARGUMENTS`` on ``ranks`` processes; the exit code for the shell."""
    # The ranks share this host's cores; without a limit each would start a thread per core and they would fight. OpenMP reads it
    # when torch is imported.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from .rendezvous import register

    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")  # one host: nothing leaves it
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    logging.disable(logging.ERROR)  # what the launcher says of a failure we say better
    with tempfile.TemporaryDirectory(prefix="ladder-") as scratch:  # which only this user can open
        messages = os.path.join(scratch, "messages")
        os.mkdir(messages)
        os.environ[_MESSAGES] = messages
        os.environ[STORE] = os.path.join(scratch, "store")
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend=register(),
            max_restarts=0,
            monitor_interval=0.1,
            start_method="fork",  # of a function; a program is executed anew
            logs_specs=DefaultLogsSpecs(os.path.join(scratch, "logs")),  # torch would leave a directory behind
        )
        try:
            if can_fork():
                importlib.import_module(preload)
                elastic_launch(config, _forked_rank)(module, list(arguments), os.dup(0))
            else:
                elastic_launch(config, sys.executable)("-m", module, *arguments)
        except ChildFailedError as error:
            return _explain(error.failures, Path(messages), ranks)
        except SignalException as stopped:
            return 128 + int(stopped.sigval)
        finally:
            logging.disable(logging.NOTSET)
            del os.environ[_MESSAGES], os.environ[STORE]
    return 0


def can_fork() -> bool:
    """Whether ranks may be forks of this process, so that they need not import again what it has imported (seconds each). Not where
    they may use a GPU: CUDA does not work in a fork."""
    import torch

    return sys.platform == "linux" and not torch.cuda.is_available()


def _forked_rank(module: str, arguments: list[str], stdin: int) -> None:
    """``python -m MODULE ARGUMENTS`` in a fork, with what the launcher and ``multiprocessing`` changed set back."""
    import torch

    for number, handler in _HANDLERS.items():
        signal.signal(number, handler)
    logging.disable(logging.NOTSET)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.stdin = os.fdopen(stdin)
    sys.argv = [module, *arguments]
    warnings.filterwarnings("ignore", "'ladder_residual.* found in sys.modules", RuntimeWarning)  # so it is
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Exception:  # torch would put it into a file that nobody reads
        traceback.print_exc()
        sys.exit(1)


def _explain(failures: Any, messages: Path, ranks: int) -> int:
    """Print what the ranks left, each message once, and which rank was the cause; the exit code."""
    whole = [path for path in messages.iterdir() if path.suffix != ".draft"]
    left = {int(path.name): json.loads(path.read_text(encoding="utf-8")) for path in whole}
    for rank, failure in failures.items():
        if failure.exitcode == OUT_OF_MEMORY:
            left.setdefault(rank, (OUT_OF_MEMORY, _out_of_memory(rank)))
    causes = {rank: text for rank, (code, text) in sorted(left.items()) if code != LOST_PEER}
    if not causes and not any(_SILENT.search(text) for _, text in left.values()):
        # Ranks that lost a peer are consequences; the one they lost is the cause. Not one that the launcher ended after them.
        gave_up = any(failure.exitcode == LOST_PEER for failure in failures.values())
        unsaid = {
            rank: failure
            for rank, failure in failures.items()
            if rank not in left and not (gave_up and failure.exitcode == -signal.SIGTERM)
        }
        if unsaid:
            rank, failure = min(unsaid.items(), key=lambda item: item[1].timestamp)
            if failure.exitcode == STOPPED:
                return STOPPED  # the run itself says what was saved
            # On a line of its own: a rank that was ended may have left a progress bar.
            print(f"\nerror: rank {rank} of {ranks} {_end_of(failure)}; the other ranks were stopped", file=sys.stderr)
    said: set[str] = set()
    for rank, text in (causes or {rank: text for rank, (_, text) in sorted(left.items())}).items():
        if text not in said:
            print(f"error: {text}" if rank == 0 else f"error: rank {rank}: {text}", file=sys.stderr)
        said.add(text)
    # A rank that was silent died of the launcher: that is no news.
    return USER_ERROR if any(left[rank][0] == USER_ERROR for rank in causes) else 1


def _end_of(failure: Any) -> str:
    """How a rank ended that said nothing."""
    code, where = failure.exitcode, f"(pid {failure.pid}) on {socket.gethostname()}"
    if code >= 0:
        return f"{where} failed with exit code {code}"
    hint = " (if nobody did that, the host ran out of memory: see its kernel log)" if code == -signal.SIGKILL else ""
    return f"{where} was killed by {signal.Signals(-code).name}{hint}"
