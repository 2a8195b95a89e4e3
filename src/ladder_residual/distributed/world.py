"""Processes and their groups. Only this file and ``launch.py`` read the launcher's environment (RANK, WORLD_SIZE, LOCAL_RANK).

    with distributed() as world:
        model = load_model("checkpoint", world)

One process needs no launcher: without the environment of torchrun the world is a single rank and nothing is initialised.
"""

from __future__ import annotations

import atexit
import itertools
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.metadata import version
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..core.reduce import GroupReducer, Reducer
from . import shared_gpu
from .launch import LOST_PEER, STORE, launched, report_error
from .liveness import ALL_ANSWER, LivenessCheck
from .reducers import AsyncReducer
from .sockets import PeerLost, PeerSockets, reachable_address

DEFAULT_TIMEOUT_SECONDS = 120.0
T = TypeVar("T")
_LOST = "lost its peers"  # how a rank says that it lost some other without knowing which


@dataclass(frozen=True)
class EmulatedRank:
    """One rank of ``size`` whose peers do not exist. It holds its own shards and has nothing to communicate with: no group, no
    store, no collectives."""

    size: int
    rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def reducer(self) -> Reducer:
        return Reducer()


@dataclass(frozen=True)
class World:
    """The ranks of a run and this process's place among them. Travels as an argument, never as a global."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    group: dist.ProcessGroup | None = None
    second: dist.ProcessGroup | None = None  # GPUs: the same ranks again, so that two all-reduces run at a time
    sockets: PeerSockets | None = None  # CPU hosts: for small messages
    store: Any = None  # of this use of the group: nothing of an earlier one is in it
    ranks_per_gpu: int = 1  # above 1 they share it

    def __post_init__(self) -> None:
        if self.size > 1 and self.group is None:
            raise ValueError(
                f"a World of {self.size} ranks needs their process group; EmulatedRank is one rank without its peers"
            )

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def where(self) -> str:
        """The ranks and what they compute on, for people."""
        ranks = "1 process" if self.size == 1 else f"{self.size} ranks"
        shared = f", {self.ranks_per_gpu} ranks share one GPU" if self.ranks_per_gpu > 1 else ""
        return f"{ranks}, {self.device.type}{shared}"

    def reducer(
        self, kind: str = "async", *, latency: float = 0.0, small_allreduce_bytes: int | None = None, comm_dtype: str = "same"
    ) -> Reducer:
        """``async`` (overlapped), ``blocking`` (its slow twin) or ``none``; ``latency`` emulates a slower link, in seconds;
        ``comm_dtype`` is ``same`` or ``bf16`` (``reducers.COMM_DTYPES`` states the error)."""
        if kind not in ("async", "blocking", "none"):
            raise ValueError(f"unknown reducer {kind!r}; choose async, blocking or none")
        if self.size == 1 or kind == "none":
            return Reducer()
        if kind == "blocking":
            if latency or comm_dtype != "same":
                raise ValueError("an emulated latency and another comm_dtype need the async reducer")
            return GroupReducer(self.group)
        return AsyncReducer(self.group, self.sockets, small_allreduce_bytes, comm_dtype, self.second, latency)

    def drain(self) -> None:
        """Before this rank waits for the group itself: its small messages come first, or a peer might wait for them forever."""
        if self.sockets is not None:
            self.sockets.drain()

    def barrier(self) -> None:
        if self.size > 1:
            self.drain()
            dist.barrier(self.group)

    def broadcast(self, value: Any) -> Any:
        """Rank 0's ``value`` on every rank."""
        if self.size == 1:
            return value
        self.drain()
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, in the order of the ranks, on every rank."""
        if self.size == 1:
            return [value]
        self.drain()
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def slowest(self, seconds: list[float]) -> list[float]:
        """The largest of each time over all ranks: a step is over when the slowest rank is done."""
        if self.size == 1:
            return seconds
        times = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        self.drain()
        dist.all_reduce(times, op=dist.ReduceOp.MAX, group=self.group)
        return times.tolist()

    def check_same(self, what: str, value: str, *, show: bool = False) -> None:
        """ValueError on every rank, naming those that differ, unless all ranks hold the same ``value``; ``show`` it if it may be
        seen by whoever reads the log."""
        values = self.gather((socket.gethostname(), value))
        first = values[0][1]
        different = [
            f"rank {rank} on {host}" + (f" ({theirs})" if show else "")
            for rank, (host, theirs) in enumerate(values)
            if theirs != first
        ]
        if different:
            shown = f" ({first})" if show else ""
            raise ValueError(f"{what} of {', '.join(different)} differs from rank 0's{shown}: all ranks must run the same")

    def check_software(self) -> None:
        """Ranks with unlike versions may compute unlike things, and fail or err in ways nobody can explain."""
        from ..common.version import __version__

        versions = f"torch {torch.__version__}, transformers {version('transformers')}"
        self.check_same("the software", f"ladder-residual {__version__}, {versions}", show=True)

    def main_first(self, work: Callable[[], T]) -> T:
        """``work`` on rank 0, however long it takes, then on the others, who find what it left."""
        key = f"main first/{next(_firsts)}"
        if self.size == 1:
            return work()
        if self.is_main:
            try:
                made = work()
            except BaseException:
                self.store.set(key, "failed")
                raise
            self.store.set(key, "done")
            return made
        try:
            done = self._from_main(key) == b"done"
        except dist.DistError:  # rank 0 may host the store, and take it along as it ends
            done = False
        if not done:
            raise ValueError("rank 0 failed before the others could begin; it says why")
        return work()

    def first_problem(self, own: str | None) -> str | None:
        """What stops any of the ranks, alike on all of them: the first that has something says it."""
        if self.size == 1:
            return own
        return next((f"rank {rank}: {text}" for rank, text in enumerate(self.gather(own)) if text), None)

    def ask(self, question: Callable[[], str]) -> str:
        """Rank 0's answer to ``question`` on every rank, however long a person takes."""
        if self.size == 1:
            return question()
        key = f"ask/{next(_questions)}"
        if self.is_main:
            answer = question()
            self.store.set(key, answer)
            return answer
        return self._from_main(key).decode()

    def _from_main(self, key: str) -> bytes:
        """What rank 0 puts into the store, whenever that is: a collective would time out."""
        while not self.store.check([key]):
            time.sleep(0.02)
        return self.store.get(key)


Rank = World | EmulatedRank  # one of ``size`` tensor-parallel ranks, for functions that need its shards and not its peers
_firsts, _questions = itertools.count(), itertools.count()  # every rank comes by the same calls in the same order


def local_device(kind: str) -> torch.device:
    """Of this rank; ``kind``: auto, cpu or cuda."""
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    if kind != "cuda":
        raise ValueError(f"unknown device {kind!r}; choose auto, cpu or cuda")
    if not torch.cuda.is_available():
        raise ValueError("device cuda was asked for, but torch sees no CUDA device; use --device cpu")
    local_rank, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= gpus and not shared_gpu.is_shared():
        raise ValueError(
            f"local rank {local_rank} has no GPU: this host has {gpus}; start fewer ranks, or let them share it (--share-gpu)"
        )
    return torch.device("cuda", shared_gpu.gpu_of(local_rank, gpus))


def _share_gpus(device: str) -> int:
    """How many ranks a GPU of this host holds; called before CUDA starts in this process."""
    if device == "cpu" or not shared_gpu.is_shared():
        return 1
    gpus = torch.cuda.device_count()
    if not gpus:
        raise ValueError(shared_gpu.NO_GPU)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", str(launched())))
    shared_gpu.prepare(local_rank, local_ranks, gpus, one_host=local_ranks == launched())
    return shared_gpu.ranks_per_gpu(local_ranks, gpus)


@contextmanager
def distributed(device: str = "auto", timeout: float = DEFAULT_TIMEOUT_SECONDS) -> Iterator[World]:
    """Join the process group the launcher describes, for the duration of the block. A block within it has the same ranks."""
    if timeout <= 0:
        raise ValueError(f"the time-out must be positive, got {timeout} seconds")
    sharing = _share_gpus(device)
    where = local_device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
        if sharing > 1:  # a rank that takes more than its part is the one that fails; some is for the ranks' contexts
            torch.cuda.set_per_process_memory_fraction(0.96 / sharing, where)
    if launched() == 1:
        yield World(device=where)
        return
    if _joined:
        if where.type != _joined[0].device.type:
            raise ValueError(f"device {where.type} was asked for, but these ranks met with device {_joined[0].device.type}")
        yield _joined[0]
        return
    sockets: PeerSockets | None = None
    liveness: LivenessCheck | None = None
    failure: str | None = None
    try:
        store, rank, size = _meet(timeout)
        names = dist.PrefixStore("liveness", store)
        on_silence = _give_up if where.type == "cuda" else None  # nobody else notices a kernel that waits for a lost peer
        liveness = LivenessCheck(names, rank, size, _master(), on_silence=on_silence, timeout=timeout)
        form_group(store, rank, size, where, timeout)
        names = dist.PrefixStore("ranks", store)
        if where.type == "cpu":
            sockets = _connect(names, timeout)
        second = dist.new_group(timeout=timedelta(seconds=timeout)) if where.type == "cuda" else None
        world = World(rank, size, where, dist.group.WORLD, second, sockets, names, sharing)
        _joined.append(world)
        if sharing > 1 and world.is_main:
            print(shared_gpu.describe(sharing), file=sys.stderr, flush=True)
        yield world
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        liveness.part()
        _leave_together(world, timeout)
    except PeerLost as error:
        failure = ""
        if liveness is not None and _LOST in str(error):  # said by a thread of this rank that could not find out more
            raise PeerLost(f"{error}; {liveness.missing()}") from error
        raise
    except RuntimeError as error:
        if sharing > 1 and "Duplicate GPU" in str(error):
            raise ValueError(shared_gpu.NCCL_REFUSES) from error
        broken = sharing > 1 and shared_gpu.is_cuda_error(str(error))
        if broken and liveness is not None and not (who := liveness.missing()).startswith(ALL_ANSWER):
            _give_up(f"{who}: MPS failed the ranks that share its GPU")
        if broken or not tells_of_lost_peer(str(error)):
            failure = _in_short(error)
            raise
        # What gloo and NCCL say of a vanished peer names sockets; say which of our ranks noticed, where, and who is missing.
        failure = ""
        who = liveness.missing() if liveness is not None else f"not all met at the run's store, {_master()}"
        noticed = f"rank {os.environ.get('RANK')} of {launched()} on {socket.gethostname()}"
        raise PeerLost(f"{noticed} {_LOST}: {who}: {str(error).splitlines()[0][:200]}") from error
    except BaseException as error:
        failure = _in_short(error)
        raise
    finally:
        _joined.clear()
        if liveness is not None:
            liveness.leave(failure)
        if sockets is not None:
            sockets.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _give_up(why: str) -> None:
    """End this process from a thread, whatever its GPU waits for."""
    noticed = f"rank {os.environ.get('RANK')} of {launched()} on {socket.gethostname()}"
    report_error(f"{noticed} {_LOST}: {why}", LOST_PEER)
    os._exit(LOST_PEER)


def join(device: str = "auto") -> World:
    """The ranks of ``distributed``, for the rest of the process: it leaves them as it ends. For scripts without a block."""
    block = distributed(device)
    world = block.__enter__()
    if world.size > 1:
        atexit.register(_leave, block)
    return world


def _leave(block: AbstractContextManager[World]) -> None:
    error: BaseException | None = getattr(sys, "last_value", None)  # what ended the script; the other ranks learn it
    with suppress(BaseException):  # it was shown already
        block.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)


def tells_of_lost_peer(message: str) -> bool:
    """Whether a library's error message means that another rank is gone, silent or out of reach."""
    signs = ("Connection closed by peer", "Connection reset", "Connection refused", "Broken pipe", "imed out", "imeout after")
    store = ("imeout waiting for key", "Wait timeout")  # of a store in a file
    return any(sign in message for sign in (*signs, *store, "Connect timeout", "timeout caused", "failed to connect"))


_joined: list[World] = []  # the block this process is in, if any
_uses = itertools.count()  # every rank enters its blocks in the same order


def _meet(timeout: float) -> tuple[dist.Store, int, int]:
    """The store in which the ranks find each other, this rank and the number of all.

    The launcher's store outlives this block, and a restarted attempt of an elastic launcher finds it as the last one left it: the
    addresses in it lead to processes that are dead. So every attempt and every block has names of its own.
    """
    patience = timedelta(seconds=timeout)
    store: dist.Store
    if path := os.environ.get(STORE):  # a file of this user, where a port would be open to every user of the host
        store, rank, size = dist.FileStore(path), int(os.environ["RANK"]), launched()
    else:
        store, rank, size = next(dist.rendezvous("env://", timeout=patience))
    store.set_timeout(patience)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"ladder_residual/{attempt}/{next(_uses)}", store), rank, size


def form_group(store: dist.Store, rank: int, size: int, where: torch.device, timeout: float) -> None:
    """The process group of all ranks: NCCL on GPUs, gloo on CPUs."""
    backend, device = ("nccl", where) if where.type == "cuda" else ("gloo", None)
    patience = timedelta(seconds=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience, device_id=device)


def _master() -> str:
    return os.environ.get(STORE) or f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def _in_short(error: BaseException) -> str:
    """For the other ranks, which learn nothing else of it."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _connect(store: dist.Store, timeout: float) -> PeerSockets:
    """Gloo's own interface choice holds here too: GLOO_SOCKET_IFNAME=lo keeps everything on this host."""
    master, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "1"))
    host = "127.0.0.1" if os.environ.get("GLOO_SOCKET_IFNAME") == "lo" else reachable_address(master, port)
    return PeerSockets(store, dist.get_rank(), dist.get_world_size(), host, timeout)


def _leave_together(world: World, timeout: float) -> None:
    """A rank that closes its sockets while another still reads makes that one fail: part only when all are done."""
    world.drain()
    store = world.store
    store.add("left", 1)
    deadline = time.monotonic() + timeout
    try:
        while int(store.get("left")) < world.size and time.monotonic() < deadline:
            time.sleep(0.005)
    except dist.DistError:  # whoever hosts the store saw the last of us arrive and has left
        pass
