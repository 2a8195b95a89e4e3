"""Start this command again as several ranks on this host, through torch's elastic launcher.

``ladder generate --tp 2`` calls this once in the parent; the workers see torchrun's environment and go straight to work. If a
rank dies the launcher stops the others, and the parent says which one it was.
"""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Sequence

USER_ERROR = 2  # exit code of a rank that has told the user already
LOST_PEER = 3  # exit code of a rank that failed because another one did


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


def launch(arguments: Sequence[str], ranks: int) -> int:
    """Run ``python -m ladder_residual ARGUMENTS`` on ``ranks`` processes; the exit code for the shell."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The ranks share this host's cores; without a limit each would start a thread per core and they would fight.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: nothing leaves it
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
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
    try:
        elastic_launch(config, sys.executable)("-m", "ladder_residual", *arguments)
    except ChildFailedError as error:
        # Ranks that lost a peer are consequences; the one they lost is the cause, even if it was noticed later.
        rank, failure = min(error.failures.items(), key=lambda item: (item[1].exitcode == LOST_PEER, item[1].timestamp))
        if failure.exitcode == USER_ERROR:
            return USER_ERROR
        code = failure.exitcode
        if code == LOST_PEER:
            print(f"error: rank {rank} of {ranks} lost a peer (see above); all ranks were stopped", file=sys.stderr)
            return 1
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
        print(f"error: rank {rank} of {ranks} (pid {failure.pid}) {how}; the other ranks were stopped", file=sys.stderr)
        return 1
    return 0
