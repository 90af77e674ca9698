"""Layers: drivers that wrap a driver. Each changes one aspect of every operation, and none depends
on another.

From the caller to the storage, with the reasons for this order::

    hedge       above retry: a read that is stuck in retries and pauses is hedged like any other slow read
    retry       above throttle and limit: each attempt queues and counts again, and no slot is held during a pause
    throttle    above limit: an operation waiting for bandwidth holds no slot, so small operations can pass
    limit       next to the storage: it counts the operations that the storage handles concurrently
    metrics     below all of these: it sees every request, even retried ones, but not the time spent queuing
    faults      lowest: all other layers see injected faults as if they came from the storage
    driver

:mod:`.host_cache` goes above all of these, and is not an option: only a caller knows which objects
never change.

The retry layer enforces the deadline of an operation. The deadline is paused while throttle or
limit make the operation wait (:func:`.layer.waiting_for_a_turn`), because that is not the storage's
fault.

:func:`.stack.stacked` builds this stack and omits layers that would do nothing: ``file://`` without
options is the bare driver. All layers use the event loop's clock, so tests can run them on virtual
time.
"""
