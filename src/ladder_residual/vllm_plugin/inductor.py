"""A correction of torch's compiler for CPUs, without which a compiled ladder answers nonsense on one rank.

To fuse a kernel with its neighbour, Inductor's C++ backend may compute the kernel's loop anew, and with it what the kernel reads. Up
to torch 2.13 it then forgets that a buffer it reads is filled by another op (vLLM's CPU projections write into a buffer they are
given), so the fused kernel may run before that op and read whatever the memory held. In a standard model everything follows on
everything and the order holds by itself. In a ladder, attention and MLP do not wait for each other: there it breaks, without an error.
Corrected in torch after that (pytorch/pytorch pull request 185873); here the same way.
"""

from __future__ import annotations

import functools
from typing import Any


def keep_order_of_writes() -> None:
    """Idempotent; harmless where torch has the correction already."""
    from torch._inductor.scheduler import SchedulerNode

    recompute = SchedulerNode.recompute_size_and_body
    if getattr(recompute, "keeps_order_of_writes", False):
        return

    @functools.wraps(recompute)
    def recompute_and_keep(self: Any, *args: Any, **kwargs: Any) -> None:
        recompute(self, *args, **kwargs)
        self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    recompute_and_keep.keeps_order_of_writes = True  # type: ignore[attr-defined]
    SchedulerNode.recompute_size_and_body = recompute_and_keep  # type: ignore[method-assign]
