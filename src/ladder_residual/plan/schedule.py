"""Event simulator: the schedule of each wiring on streams, with the time every piece starts and ends.

A task belongs to one stream and starts when the tasks it depends on are done and its stream is free (streams run in order, like
CUDA streams). Tasks slow each other down while they run together: compute beside an all-reduce loses the link's contention, two
compute lanes share the memory bandwidth. ``build`` turns a wiring into tasks and who waits for whom.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..config import Wiring
from .cost import Work
from .hardware import Link

NOTHING = Work()
COMPUTE, LANE, COMM = "compute", "compute lane 2", "communication"
COMM_2 = f"{COMM} 2"  # the MLPs' sums, of engines that have a communicator for each kind of module


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

    def hidden_share(self) -> float:
        """Of the communication time, the share during which compute runs as well; 1.0 where there is none."""
        total = self.communication_us
        return 1.0 if total == 0 else max(0.0, 1.0 - self.exposed_us() / total)


def simulate(tasks: Sequence[Task], lane_overlap: float = 1.0) -> Timeline:
    """Run the tasks; ``lane_overlap`` says how well two compute lanes fill each other's gaps (0: they take turns, 1: fully)."""
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
        rates = _rates(tasks, running, lane_overlap)
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


def _rates(tasks: Sequence[Task], running: set[int], lane_overlap: float) -> dict[int, float]:
    communicating = any(is_communication(tasks[index].stream) for index in running)
    compute = [index for index in running if not is_communication(tasks[index].stream)]
    demand = sum(tasks[index].memory_share for index in compute)
    crowding = 1.0
    if len(compute) > 1:
        # At best two lanes fill each other's gaps until their common demand exceeds the memory; at worst they take turns.
        best, turns = min(1.0, 1.0 / demand) if demand > 0 else 1.0, 0.5
        crowding = turns + lane_overlap * (best - turns)
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
    # 1: all sums of a rank run in order. 2: those of attention and those of the MLPs do, beside each other.
    communicators: int = 1
    wire_share: float = 0.0  # of the all-reduce's time that goes with its size


def build(
    wiring: Wiring, cost: LayerCost, *, head: Work = NOTHING, two_lanes: bool = False, edge_us: float = 0.0
) -> list[Task]:
    """Tasks of one forward pass. ``edge_us``: the blocking collectives of a sharded vocabulary (embedding sum, logits)."""
    builder = _Builder(cost, two_lanes and wiring.kind == "ladder" and len(wiring.layers) == wiring.num_layers)
    if edge_us:
        builder.add("embedding sum", 0, COMM, edge_us / 2)
        builder.last_reduces[COMM] = 0
        builder.reduces_through[0] = (0,)
    for layer in range(wiring.num_layers):
        builder.layer(layer, wiring)
    builder.agree(wiring.num_layers - 1)
    flush = builder.waits_for(builder.modules)
    last = builder.compute("head", wiring.num_layers - 1, COMPUTE, head, flush)
    if edge_us:
        builder.add("logits", wiring.num_layers - 1, COMM, edge_us / 2, (last,))
    return builder.tasks


class _Builder:
    """Adds modules one by one; remembers up to which module the stream has been reduced by which all-reduce."""

    def __init__(self, cost: LayerCost, two_lanes: bool) -> None:
        self.cost, self.two_lanes = cost, two_lanes
        self.tasks: list[Task] = []
        self.modules = 0  # modules built so far
        self.last_reduces: dict[str, int] = {}  # communication stream -> its last all-reduce
        self.reduces_through: dict[int, tuple[int, ...]] = {}  # modules built so far -> the all-reduces that cover all of them
        self.diverged = False  # the ranks' streams differ
        self.delayed_from: int | None = None  # modules built before the present run of delayed layers

    def layer(self, layer: int, wiring: Wiring) -> None:
        kind = wiring.kind_of(layer)
        if kind == "parallel":
            work = self.cost.attention.plus(self.cost.mlp)
            work = work._replace(overhead_us=max(0.0, work.overhead_us - self.cost.fused_saving_us))
            self.agree(layer)
            self._module("attention + MLP", layer, work, visible=self.modules, reduce=True)
            return
        if kind != "delayed":
            self.delayed_from = None
        elif self.delayed_from is None:
            self.delayed_from = self.modules  # sums of the layers below cannot stay behind: nothing of them was added yet
        for name, work in (("attention", self.cost.attention), ("MLP", self.cost.mlp)):
            visible, reduce = self.modules, True
            if kind == "ladder":
                visible = self.modules - 1  # h_i reads x_{i-2}: the output before it may still be on the way
            elif kind == "delayed":
                visible = max(self.modules - wiring.step, self.delayed_from or 0)
            elif kind == "desync":
                index = 2 * layer + (1 if name == "attention" else 2)
                reduce = index % wiring.step == 0
            elif kind == "no-comm":
                reduce = False
            if kind != "desync":
                self.agree(layer)
            self._module(name, layer, work, visible, reduce)
            self.diverged = kind == "desync" and not reduce

    def agree(self, layer: int) -> None:
        """Ranks whose streams differ (desync between two sums) are averaged before anything else reads them."""
        if self.diverged and self.cost.allreduce_us > 0:
            self.last_reduces[COMM] = self.add("agreement", layer, COMM, self.cost.allreduce_us, (len(self.tasks) - 1,))
            self.reduces_through[self.modules] = tuple(self.last_reduces.values())
        self.diverged = False

    def _module(self, name: str, layer: int, work: Work, visible: int, reduce: bool) -> None:
        if self.two_lanes:
            self._lane_module(name, layer, work)
            return
        done = self.compute(name, layer, COMPUTE, work, self.waits_for(visible))
        self.modules += 1
        if reduce and self.cost.allreduce_us > 0:
            stream = self.stream_of(name)
            self.last_reduces[stream] = self.add(f"all-reduce of {name}", layer, stream, self.cost.allreduce_us, (done,))
        if self.last_reduces:
            self.reduces_through[self.modules] = tuple(self.last_reduces.values())

    def stream_of(self, name: str) -> str:
        return COMM_2 if name == "MLP" and self.cost.communicators > 1 else COMM

    def _lane_module(self, name: str, layer: int, work: Work) -> None:
        """Two lanes: attention of layer l needs attention up to l-1 and MLP up to l-2, the MLP of l needs both up to l-1."""
        attention = name == "attention"
        per_layer = 4 if self.cost.allreduce_us > 0 else 2  # tasks of a layer: attention, MLP, and their all-reduces
        offset = len(self.tasks) - (0 if attention else per_layer // 2)
        first = offset - per_layer  # of the layer before
        needs: list[int] = [] if layer else list(self.waits_for(0))
        if layer >= 1:
            needs.append(first + per_layer // 2 - 1)
            if not attention:
                needs.append(first + per_layer - 1)
        if layer >= 2 and attention:
            needs.append(first - 1)
        done = self.compute(name, layer, COMPUTE if attention else LANE, work, tuple(needs))
        self.modules += 1
        if self.cost.allreduce_us > 0:
            done = self.add(f"all-reduce of {name}", layer, self.stream_of(name), self.cost.allreduce_us, (done,))

    def waits_for(self, visible: int) -> tuple[int, ...]:
        """The all-reduces that make the first ``visible`` modules readable (each communication stream runs in order)."""
        if self.two_lanes and visible == self.modules:
            return tuple(range(max(0, len(self.tasks) - 4), len(self.tasks)))
        return self.reduces_through.get(max(0, visible), ())

    def compute(self, name: str, layer: int, stream: str, work: Work, needs: tuple[int, ...]) -> int:
        total = work.us
        slowdown = 0.0
        if total > 0:
            bound_by_memory = work.memory_us + work.overhead_us  # small kernels and gaps slow down like memory-bound ones
            lost = bound_by_memory * self.cost.link.memory_contention + work.flop_us * self.cost.link.flop_contention
            slowdown = lost / total
        index = self.add(name, layer, stream, total, needs)
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
