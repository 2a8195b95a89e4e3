"""Start this command again as several ranks on this host, through torch's elastic launcher.

``ladder generate --tp 2`` calls this once in the parent; the workers see torchrun's environment and go straight to work. If a
rank dies the launcher stops the others, and the parent says which one it was.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

USER_ERROR = 2  # exit code of a rank that has told the user already
LOST_PEER = 3  # exit code of a rank that failed because another one did
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
        Path(folder, rank).write_text(json.dumps([code, message]), encoding="utf-8")
    else:
        print(f"error: {message}" if rank == "0" else f"error: rank {rank}: {message}", file=sys.stderr)


def follow_launcher() -> None:
    """A rank that ``launch`` started ends with it, however that ended."""
    if _MESSAGES in os.environ and sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def launch(arguments: Sequence[str], ranks: int) -> int:
    """Run ``python -m ladder_residual ARGUMENTS`` on ``ranks`` processes; the exit code for the shell."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The ranks share this host's cores; without a limit each would start a thread per core and they would fight.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: nothing leaves it
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what it says of a failure we say better
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",  # a free port, on this host only
        max_restarts=0,
        monitor_interval=0.1,
    )
    with tempfile.TemporaryDirectory(prefix="ladder-") as messages:
        os.environ[_MESSAGES] = messages
        try:
            elastic_launch(config, sys.executable)("-m", "ladder_residual", *arguments)
        except ChildFailedError as error:
            return _explain(error.failures, Path(messages), ranks)
        except SignalException as stopped:
            return 128 + int(stopped.sigval)
        finally:
            del os.environ[_MESSAGES]
    return 0


def _explain(failures: Any, messages: Path, ranks: int) -> int:
    """Print what the ranks left, each message once, and which rank was the cause; the exit code."""
    left = {int(path.name): json.loads(path.read_text(encoding="utf-8")) for path in messages.iterdir()}
    mistakes = {rank: text for rank, (code, text) in sorted(left.items()) if code == USER_ERROR}
    said: set[str] = set()
    for rank, text in (mistakes or {rank: text for rank, (_, text) in sorted(left.items())}).items():
        if text not in said:
            print(f"error: {text}" if rank == 0 else f"error: rank {rank}: {text}", file=sys.stderr)
        said.add(text)
    if mistakes:
        return USER_ERROR
    # Ranks that lost a peer are consequences; the one they lost is the cause, even if it was noticed later.
    rank, failure = min(failures.items(), key=lambda item: (item[0] in left, item[1].timestamp))
    if rank not in left:
        code = failure.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
        print(f"error: rank {rank} of {ranks} (pid {failure.pid}) {how}; the other ranks were stopped", file=sys.stderr)
    return 1
