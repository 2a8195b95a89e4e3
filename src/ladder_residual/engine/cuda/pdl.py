"""Programmatic dependent launch (PDL): when a kernel waits for the previous one on its stream, and when it lets the next one start.

*Wait* is ``griddepcontrol.wait``: it returns when the previous kernel is complete. *Trigger* is ``griddepcontrol.launch_dependents``:
the next kernel may start once every program has triggered or ended.

Behind a kernel of ``WAIT_THEN_TRIGGER`` or a later mode, the kernel before *that* one is complete: it was waited for before the trigger.
So the last two modes may read what was written two kernels ago before they wait. PTX promises visibility only to a kernel that waits;
that complete writes are in L2 by then is an assumption, so those reads bypass L1 (``.cg``).
"""

from __future__ import annotations

from enum import IntEnum


class PdlMode(IntEnum):
    OFF = 0  # ordinary launches
    TRIGGER_THEN_WAIT = 1  # the next kernel may start at once, and load its weights while this one runs
    WAIT_THEN_TRIGGER = 2  # the next kernel may start once the inputs of this one are complete
    WAIT_AFTER_COMPUTE = 3  # reads all inputs and computes, then waits and triggers
    WAIT_BEFORE_NEWEST = 4  # reads all inputs but the newest output, waits, and reads that


ENGINE_MODES = (PdlMode.OFF, PdlMode.TRIGGER_THEN_WAIT, PdlMode.WAIT_THEN_TRIGGER)  # the ones any kernel can run in
