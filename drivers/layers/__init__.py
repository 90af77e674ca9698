"""Layers: drivers around drivers. Each does one thing to every operation on its way to storage, and
knows no other.

From the caller to the storage, and why in this order::

    hedge       above retry: a read that is stuck in pauses and further tries is overtaken like any other slow one
    retry       above throttle and limit: each try waits for its turn anew, its bytes count, and no slot is held in a pause
    throttle    above limit: what waits for bytes holds no slot, so small operations pass by
    limit       next to the storage: what it counts is what the storage has to do at a time
    metrics     below all of these: every request is seen, also what a retry hides; waiting for a turn is not
    faults      lowest: all others meet them as they would meet those of the storage
    driver

The deadline of an operation is the retry layer's. Its clock stands still while throttle and limit
let the operation wait (:func:`.turn.waiting_for_a_turn`): that is not the storage's doing.

:func:`.stack.stacked` builds this, and leaves out every layer that would do nothing: a ``file://``
without options is the bare driver. The time of all layers is that of the event loop, so tests run
them in a loop whose time is virtual.
"""
