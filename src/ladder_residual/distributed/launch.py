"""Start this command again as several ranks on this host, through torch's elastic launcher.

``ladder generate --tp 2`` calls this once in the parent; the workers see torchrun's environment and go straight to work. If a
rank dies the launcher stops the others, and the parent says which one it was.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

USER_ERROR = 2  # exit code of a rank that has told the user already
LOST_PEER = 3  # exit code of a rank that failed because another one did
OUT_OF_MEMORY = 4  # exit code of a rank that could not get the memory it needs
_NO_MEMORY = re.compile(r"can't allocate memory|Cannot allocate memory|out of memory", re.IGNORECASE)
_SILENT = re.compile(r"waited [0-9]+ s for|[Tt]imed out|timeout caused")
_MESSAGES = "LADDER_MESSAGES"  # environment variable: the directory in which ranks leave their last words


def on_ranks(tp: int | None) -> None:
    """Go on in this process if it is one of ``tp`` ranks; otherwise start them with this command line and exit with their code."""
    from .parallel import launched

    size = launched()
    if size > 1:
        if tp is not None and tp != size:
            raise ValueError(f"--tp {tp} was given, but the launcher started {size} ranks; drop --tp or make them equal")
        return
    if tp is not None and tp < 1:
        raise ValueError(f"--tp must be at least 1, got {tp}")
    if tp is not None and tp > 1:
        raise SystemExit(launch(sys.argv[1:], tp))


def report_error(message: str, code: int) -> None:
    """Tell the user. A rank that ``launch`` started leaves its message for it, so that what all ranks say is said once, and what
    one of them did wrong is not lost among the others that lost it."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    rank = os.environ.get("RANK", "0") if ranks not in ("", "1") else "0"
    if folder := os.environ.get(_MESSAGES):
        draft = Path(
            folder, f"{rank}.draft"
        )  # the launcher may end this rank at any moment: a message is there whole or not at all
        draft.write_text(json.dumps([code, message]), encoding="utf-8")
        draft.rename(Path(folder, rank))
    else:
        print(f"error: {message}" if rank == "0" else f"error: rank {rank}: {message}", file=sys.stderr)


def is_out_of_memory(error: BaseException) -> bool:
    """The host's fault, whatever was being done: nobody may take it for a fault of the input."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError | OSError) and bool(_NO_MEMORY.search(str(error))))


def told(error: Exception) -> tuple[str, int] | None:
    """What the user is told of ``error``, and the exit code; None if nobody foresaw it, so that its traceback is shown."""
    text = str(error)
    if is_out_of_memory(error):
        who = f"rank {os.environ['RANK']} on " if os.environ.get("WORLD_SIZE", "1") not in ("", "1") else ""
        detail = f" ({text.splitlines()[0][:200]})" if text else ""
        fix = "use more ranks, a smaller batch or fewer tokens"
        return f"{who}{socket.gethostname()} ran out of memory{detail}: {fix}", OUT_OF_MEMORY
    if isinstance(error, ValueError | OSError):
        return text, USER_ERROR
    from .sockets import PeerLost

    return (text, LOST_PEER) if isinstance(error, PeerLost) else None


def follow_launcher() -> None:
    """A rank that ``launch`` started ends with it, however that ended."""
    if _MESSAGES in os.environ and sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def launch(arguments: Sequence[str], ranks: int) -> int:
    """Run ``python -m ladder_residual ARGUMENTS`` on ``ranks`` processes; the exit code for the shell."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from .rendezvous import register

    # The ranks share this host's cores; without a limit each would start a thread per core and they would fight.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: nothing leaves it
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    logging.disable(logging.ERROR)  # what the launcher says of a failure we say better
    with tempfile.TemporaryDirectory(prefix="ladder-") as scratch:
        messages = os.path.join(scratch, "messages")
        os.mkdir(messages)
        os.environ[_MESSAGES] = messages
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend=register(),
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(os.path.join(scratch, "logs")),  # torch would leave a directory behind
        )
        try:
            elastic_launch(config, sys.executable)("-m", "ladder_residual", *arguments)
        except ChildFailedError as error:
            return _explain(error.failures, Path(messages), ranks)
        except SignalException as stopped:
            return 128 + int(stopped.sigval)
        finally:
            logging.disable(logging.NOTSET)
            del os.environ[_MESSAGES]
    return 0


def _explain(failures: Any, messages: Path, ranks: int) -> int:
    """Print what the ranks left, each message once, and which rank was the cause; the exit code."""
    whole = [path for path in messages.iterdir() if path.suffix != ".draft"]
    left = {int(path.name): json.loads(path.read_text(encoding="utf-8")) for path in whole}
    causes = {rank: text for rank, (code, text) in sorted(left.items()) if code != LOST_PEER}
    said: set[str] = set()
    for rank, text in (causes or {rank: text for rank, (_, text) in sorted(left.items())}).items():
        if text not in said:
            print(f"error: {text}" if rank == 0 else f"error: rank {rank}: {text}", file=sys.stderr)
        said.add(text)
    if any(left[rank][0] == USER_ERROR for rank in causes):
        return USER_ERROR
    if causes or any(_SILENT.search(text) for _, text in left.values()):
        return 1  # a rank that was silent died of the launcher afterwards: that is no news
    # Ranks that lost a peer are consequences; the one they lost is the cause, even if it was noticed later.
    rank, failure = min(failures.items(), key=lambda item: (item[0] in left, item[1].timestamp))
    if rank not in left:
        code = failure.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
        hint = " (if nobody did that, the host ran out of memory: see its kernel log)" if code == -signal.SIGKILL else ""
        who = f"rank {rank} of {ranks} (pid {failure.pid}) on {socket.gethostname()}"
        print(f"error: {who} {how}{hint}; the other ranks were stopped", file=sys.stderr)
    return 1
