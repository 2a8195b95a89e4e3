"""The ranks of a training run as a mesh: ``dp`` copies of the model, each sharded over ``tp`` ranks.

Neighbouring ranks (of one host) form a tensor-parallel group. A run without a launcher is a mesh of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..distributed.world import World, distributed, form_group

DP, TP = "dp", "tp"


@dataclass(frozen=True)
class Layout:
    world: World
    mesh: DeviceMesh  # (dp, tp)
    tensor: World  # this rank's tensor-parallel group
    timeout: float  # seconds a rank waits for another

    @property
    def dp(self) -> int:
        return self.mesh[DP].size()

    @property
    def tp(self) -> int:
        return self.mesh[TP].size()

    @property
    def dp_rank(self) -> int:
        return self.mesh[DP].get_local_rank()

    @property
    def device(self) -> torch.device:
        return self.world.device

    def all_reduce(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        if self.world.size > 1:
            self.tensor.drain()
            dist.all_reduce(value)
        return value

    def all_reduce_over_data(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over the copies of the model, in place."""
        if self.dp > 1:
            self.tensor.drain()
            dist.all_reduce(value, group=self.mesh[DP].get_group())
        return value


def degrees(ranks: int, tp: int, dp: int | None) -> tuple[int, int]:
    """(dp, tp) of a run of ``ranks`` processes; ValueError with the numbers if they do not fit."""
    if ranks % tp or (dp is not None and dp * tp != ranks):
        wanted = f"parallel.dp {dp} x parallel.tp {tp}" if dp is not None else f"parallel.tp {tp}"
        raise ValueError(
            f"the run has {ranks} rank(s), which {wanted} does not fit: start {(dp or 1) * tp}, or change the recipe"
        )
    return ranks // tp, tp


def rows_per_rank(rows: int, dp: int, micro_rows: int | None) -> tuple[int, int]:
    """(rows of a rank in a step, rows of one forward)."""
    if rows % dp:
        raise ValueError(f"batch.rows {rows} is not divisible by the {dp} data-parallel ranks; use a multiple of {dp}")
    share = rows // dp
    micro = share if micro_rows is None else micro_rows
    if share % micro:
        raise ValueError(f"batch.micro_rows {micro} does not divide the {share} rows a rank has in a step ({rows} / {dp})")
    return share, micro


@contextmanager
def training_layout(device: str, timeout: float, tp: int, dp: int | None) -> Iterator[Layout]:
    """Join the launcher's ranks (or be the only one) and arrange them."""
    with distributed(device, timeout) as world, arranged(world, timeout, tp, dp) as layout:
        yield layout


@contextmanager
def arranged(world: World, timeout: float, tp: int, dp: int | None) -> Iterator[Layout]:
    dp, tp = degrees(world.size, tp, dp)
    alone = not dist.is_initialized()
    if alone:  # FSDP wants a group, also of one
        form_group(dist.HashStore(), 0, 1, world.device, timeout)
    try:
        mesh = init_device_mesh(world.device.type, (dp, tp), mesh_dim_names=(DP, TP))
        for axis in (DP, TP):  # a new group's own would be half an hour
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout), mesh[axis].get_group())
        # What a rank has half written into its sockets moves only while it waits for sockets. FSDP waits for other groups in
        # between, so with several copies of the model all all-reduces go through the group's own threads.
        tensor = World(
            rank=mesh[TP].get_local_rank(),
            size=tp,
            device=world.device,
            group=mesh[TP].get_group(),
            second=_second_group(mesh, timeout) if world.device.type == "cuda" and tp > 1 else None,
            sockets=world.sockets if dp == 1 else None,
            store=dist.PrefixStore(f"tp{mesh[DP].get_local_rank()}", world.store) if world.store is not None else None,
        )
        yield Layout(replace(world, group=dist.group.WORLD), mesh, tensor, timeout)
    finally:
        if alone:
            dist.destroy_process_group()


def _second_group(mesh: DeviceMesh, timeout: float) -> dist.ProcessGroup | None:
    """Of this rank's tensor-parallel ranks. All ranks make all such groups, in the same order."""
    made = [dist.new_group(ranks, timeout=timedelta(seconds=timeout)) for ranks in mesh.mesh.tolist()]
    return made[mesh[DP].get_local_rank()]
