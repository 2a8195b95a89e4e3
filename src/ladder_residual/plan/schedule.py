"""Event simulator: the schedule of each wiring on streams, with the start and end of every task.

A task belongs to one stream and starts when the tasks it depends on are done and its stream is free (streams run in order, like
CUDA streams). Tasks slow each other down while they run together: compute beside an all-reduce loses the link's contention, two
compute streams share the memory bandwidth. ``build`` turns a wiring into tasks and who waits for whom.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..core.config import Wiring
from ..core.dependencies import AllReduce, dependencies
from ..links.link import Link
from .cost import Work

NOTHING = Work()
COMPUTE, COMM = "compute", "communication"
COMPUTE_2 = f"{COMPUTE} 2"  # the MLPs of a two-stream schedule
COMM_2 = f"{COMM} 2"  # the all-reduces of the MLPs, of engines that have a communicator for each kind of module


def is_communication(stream: str) -> bool:
    return stream.startswith(COMM)


@dataclass
class Task:
    """``needs`` are positions of earlier tasks in the list; start and end are filled by ``simulate``."""

    name: str
    layer: int
    stream: str
    us: float
    needs: tuple[int, ...] = ()
    memory_share: float = 0.0  # of its time alone in which it keeps the memory busy; an all-reduce: the wire
    slowdown: float = 0.0  # share of its progress lost while an all-reduce runs beside it
    start: float = math.nan
    end: float = math.nan


@dataclass(frozen=True)
class Timeline:
    tasks: list[Task] = field(repr=False)
    us: float

    @property
    def communication_us(self) -> float:
        return sum(task.us for task in self.tasks if is_communication(task.stream))

    def exposed_us(self) -> float:
        """Time in which only communication runs: no compute stream is busy."""
        return self.us - _covered([(t.start, t.end) for t in self.tasks if not is_communication(t.stream)])

    def breakdown_us(self) -> dict[str, float]:
        """The pass by what runs in it: compute alone, compute with an all-reduce hidden behind it, an all-reduce nothing hides."""
        exposed = self.exposed_us()
        hidden = _covered([(t.start, t.end) for t in self.tasks if is_communication(t.stream)]) - exposed
        return {"compute": self.us - hidden - exposed, "hidden": hidden, "exposed": exposed}

    def hidden_share(self) -> float:
        """Of the communication time, the share during which compute runs as well; 1.0 where there is none."""
        total = self.communication_us
        return 1.0 if total == 0 else max(0.0, 1.0 - self.exposed_us() / total)


def simulate(tasks: Sequence[Task], stream_overlap: float = 1.0) -> Timeline:
    """Run the tasks; ``stream_overlap`` says how well two compute streams fill each other's gaps (0: they take turns, 1: fully)."""
    queues: dict[str, list[int]] = {}
    for index, task in enumerate(tasks):
        queues.setdefault(task.stream, []).append(index)
    heads = dict.fromkeys(queues, 0)
    left = [task.us for task in tasks]
    done = [False] * len(tasks)
    running: set[int] = set()
    now = 0.0
    remaining = len(tasks)
    while remaining:
        for stream, queue in queues.items():
            position = heads[stream]
            if position < len(queue) and queue[position] not in running:
                index = queue[position]
                if all(done[need] for need in tasks[index].needs):
                    tasks[index].start = now
                    running.add(index)
        assert running, "a task waits for one that its own stream has not reached"
        rates = _rates(tasks, running, stream_overlap)
        step = min(left[index] / rates[index] for index in running)
        now += step
        for index in list(running):
            left[index] -= step * rates[index]
            # What is left after rounding must not become a step of its own.
            if left[index] <= 1e-9 * max(1.0, tasks[index].us):
                tasks[index].end = now
                done[index] = True
                running.discard(index)
                heads[tasks[index].stream] += 1
                remaining -= 1
    return Timeline(list(tasks), now)


def _rates(tasks: Sequence[Task], running: set[int], stream_overlap: float) -> dict[int, float]:
    communicating = any(is_communication(tasks[index].stream) for index in running)
    compute = [index for index in running if not is_communication(tasks[index].stream)]
    demand = sum(tasks[index].memory_share for index in compute)
    crowding = 1.0
    if len(compute) > 1:
        # At best two streams fill each other's gaps until their common demand exceeds the memory; at worst they take turns.
        best, turns = min(1.0, 1.0 / demand) if demand > 0 else 1.0, 0.5
        crowding = turns + stream_overlap * (best - turns)
    # Two all-reduces at once pass each other's latency, not each other's bytes.
    wire = sum(tasks[index].memory_share for index in running if is_communication(tasks[index].stream))
    rates = dict.fromkeys(running, min(1.0, 1.0 / wire) if wire > 0 else 1.0)
    for index in compute:
        rates[index] = crowding * (1.0 - (tasks[index].slowdown if communicating else 0.0))
    return rates


@dataclass(frozen=True)
class LayerCost:
    """What the schedule needs to know of one layer: its two modules, the all-reduce of one module's output, and the link."""

    attention: Work
    mlp: Work
    allreduce_us: float
    link: Link
    # One norm and one launch fewer when attention and MLP share their input (parallel wiring).
    fused_saving_us: float = 0.0
    # 1: all all-reduces of a rank run in order. 2: those of attention and those of the MLPs do, beside each other.
    communicators: int = 1
    wire_share: float = 0.0  # of the all-reduce's time that goes with its size


def build(
    wiring: Wiring, cost: LayerCost, *, head: Work = NOTHING, two_stream: bool = False, edge_us: float = 0.0
) -> list[Task]:
    """Tasks of one forward pass; ``core.dependencies`` says which all-reduces a module waits for. ``two_stream`` computes the MLPs of a
    ladder on a second stream. ``edge_us``: the blocking collectives of a sharded vocabulary (embedding, logits)."""
    tasks = _Tasks(cost)
    two_stream = two_stream and wiring.kind == "ladder" and len(wiring.layers) == wiring.num_layers
    ready: dict[str, int] = {}  # kind of module -> the task that makes the last output of that kind readable
    later: dict[int, list[tuple[str, int]]] = defaultdict(list)  # the same, by the output that reads it first
    starts: dict[int, list[AllReduce]] = defaultdict(list)
    for all_reduce in dependencies(wiring).all_reduces:
        starts[all_reduce.started_after].append(all_reduce)
    if edge_us:
        ready["embedding"] = tasks.add("all-reduce of the embedding", 0, COMM, edge_us / 2)
    for output in range(1, 2 * wiring.num_layers + 1):
        ready.update(later[output])
        layer, kind = (output - 1) // 2, "attention" if output % 2 else "MLP"
        work = cost.attention if output % 2 else cost.mlp
        if wiring.kind_of(layer) == "parallel":
            if kind == "attention":
                continue  # computed with the MLP, from the same input
            kind, work = "attention + MLP", cost.attention.plus(cost.mlp)
            work = work._replace(overhead_us=max(0.0, work.overhead_us - cost.fused_saving_us))
        stream = COMPUTE_2 if two_stream and kind == "MLP" else COMPUTE
        done = tasks.compute(kind, layer, stream, work, ready)
        for all_reduce in starts[output]:
            name, stream = f"all-reduce of {kind}", COMM_2 if kind == "MLP" and cost.communicators > 1 else COMM
            if not all_reduce.has_output:  # ranks whose streams differ are averaged before anything else reads them
                name, stream = "average of streams", COMM
            readable = tasks.add(name, layer, stream, cost.allreduce_us, (done,)) if cost.allreduce_us > 0 else done
            later[all_reduce.waited_before].append((kind, readable))
    ready.update(later[2 * wiring.num_layers + 1])
    last = tasks.compute("head", wiring.num_layers - 1, COMPUTE, head, ready)
    if edge_us:
        tasks.add("logits", wiring.num_layers - 1, COMM, edge_us / 2, (last,))
    return tasks.tasks


class _Tasks:
    def __init__(self, cost: LayerCost) -> None:
        self.cost = cost
        self.tasks: list[Task] = []

    def compute(self, name: str, layer: int, stream: str, work: Work, ready: Mapping[str, int]) -> int:
        total = work.us
        slowdown = 0.0
        if total > 0:
            bound_by_memory = work.memory_us + work.overhead_us  # small kernels and gaps slow down like memory-bound ones
            lost = bound_by_memory * self.cost.link.memory_contention + work.flop_us * self.cost.link.flop_contention
            slowdown = lost / total
        index = self.add(name, layer, stream, total, tuple(ready.values()))
        self.tasks[index].slowdown = slowdown
        self.tasks[index].memory_share = work.memory_us / total if total > 0 else 0.0
        return index

    def add(self, name: str, layer: int, stream: str, us: float, needs: tuple[int, ...] = ()) -> int:
        self.tasks.append(Task(name, layer, stream, us, needs, self.cost.wire_share if is_communication(stream) else 0.0))
        return len(self.tasks) - 1


def _covered(spans: list[tuple[float, float]]) -> float:
    total, reach = 0.0, 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total
