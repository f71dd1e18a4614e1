"""The kinds of events, each a pair: what it does on the host and what on the device.

A half is imported when the first sequence comes whose policy has such events.
"""

from __future__ import annotations

from typing import NamedTuple

from kvserve.late import Late
from kvserve.scheduler.triggers.trigger import EventKind


class Kind(NamedTuple):
    """``host``, a ``HostEvenEvents`` or a subclass, does what an event does to lengths and blocks;
    ``device``, a ``DeviceEvents``, what it does to entries."""

    host: Late
    device: Late


_HOST = "scheduler.compression."
_DEVICE = "engine.compression."
KINDS = {
    EventKind.EVEN: Kind(
        Late(_HOST + "handlers:HostEvenEvents"), Late(_DEVICE + "device_events:EvenEvents")
    ),
    EventKind.REST: Kind(
        Late(_HOST + "rest_events:HostRestEvents"), Late(_DEVICE + "rest_events:RestEvents")
    ),
    EventKind.UNEVEN: Kind(
        Late(_HOST + "handlers:HostUnevenEvents"), Late(_DEVICE + "device_events:UnevenEvents")
    ),
    EventKind.BLOCKS: Kind(
        Late(_HOST + "handlers:HostBlockEvents"), Late(_DEVICE + "device_events:UnevenEvents")
    ),
    EventKind.CODED: Kind(
        Late(_HOST + "coded_events:HostCodedEvents"), Late(_DEVICE + "coder:CodedEvents")
    ),
    EventKind.PRUNED: Kind(
        Late(_HOST + "handlers:HostUnevenEvents"), Late(_DEVICE + "pruned_prefill:PrunedEvents")
    ),
}
