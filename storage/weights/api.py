"""The API of weight channels: publish, subscribe. Every rank of a job calls these alike."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..operations.loading.differences import Strict
from ..operations.location import UriLike
from ..operations.options import BUDGET_NBYTES, DEADLINE_S, Lazy
from ..ranks.process_group import Group
from .memory import Serving
from .publisher import Publisher, PublishOptions
from .subscriber import SubscribeOptions, Subscriber


def publish(
    uri: UriLike,
    *,
    keep: int = 8,
    anchor: int = 16,
    dtype: str | torch.dtype | None = None,
    lazy: Lazy = True,
    budget_nbytes: int | None = None,
    deadline_s: float = DEADLINE_S,
    storage_options: Mapping[str, object] | None = None,
    process_group: Group = None,
    serving: Serving | None = None,
) -> Publisher:
    """Return a publisher of versions of a model's weights to the channel ``uri``, a folder.

    Every rank of the trainer calls this, with the same arguments. ``keep``: number of newest
    versions that subscribers can start from; older ones are deleted once nobody reads them.
    ``anchor``: every ``anchor``-th version is stored whole, as a checkpoint of safetensors files;
    the others hold the changes. ``dtype``: converts floating-point weights, for example
    ``"bf16"``; None publishes each tensor as it is. ``lazy`` and ``budget_nbytes`` as in
    :func:`holdfast.async_save`. Each rank keeps a copy of the part that it publishes, in host
    memory.

    ``peer://ADDRESS:PORT/NAME`` serves the channel from the memory of rank 0's host, at an address
    or interface of it, as long as this publisher is open; ``serving`` has its options. The token in
    the environment variable HOLDFAST_PEER_TOKEN, the same for all, admits subscribers. A new
    publisher begins such a channel anew, so its versions must continue above the earlier ones.

    Raises UsageError, UriError, StorageError, and DamagedError if the newest version of the channel
    cannot be read.
    """
    options = PublishOptions(
        keep=keep,
        anchor=anchor,
        dtype=dtype,
        lazy=lazy,
        budget_nbytes=budget_nbytes,
        deadline_s=deadline_s,
        storage_options=storage_options,
        process_group=process_group,
        serving=serving or Serving(),
    )
    return Publisher(uri, options)


def subscribe(
    uri: UriLike,
    into: object = None,
    *,
    strict: Strict = True,
    cast: bool = False,
    in_place: bool = False,
    budget_nbytes: int = BUDGET_NBYTES,
    deadline_s: float = DEADLINE_S,
    storage_options: Mapping[str, object] | None = None,
    process_group: Group = None,
    once_per_host: bool | None = None,
) -> Subscriber:
    """Return a subscriber that updates the weights in ``into`` from the channel ``uri``.

    ``into`` is a nested dict of modules and tensors, in any layout, with the names that were
    published: ``{"model": engine_model}``. Every rank of the engine calls this. None: each update
    builds the weights as whole tensors on the CPU; see :meth:`Subscriber.weights`. Nothing is read
    before the first update. ``strict`` and ``cast`` as in :func:`holdfast.load`.

    An update is prepared in a second set of tensors. Parameters of modules in host memory then
    exchange their memory with it, so references to their old memory become stale; with
    ``in_place`` they keep it, and the pause is as long as it takes to copy them. All other tensors
    are always filled in place. In addition, a copy of the published bytes that this rank needs
    stays in host memory. ``budget_nbytes`` bounds memory beyond both.

    ``once_per_host``: subscribers on one host share what they read in files in memory, so that each
    file leaves the storage once. None: only for ``peer://``.
    """
    options = SubscribeOptions(
        strict=strict,
        cast=cast,
        in_place=in_place,
        budget_nbytes=budget_nbytes,
        deadline_s=deadline_s,
        storage_options=storage_options,
        process_group=process_group,
        once_per_host=once_per_host,
    )
    return Subscriber(uri, into, options)
