"""Staging of KV between device memory and host memory that the messenger reads and writes.

Independent of any engine: `MirrorStaging` copies byte ranges between a device and a registered mirror, over streams and
events of a `DeviceRuntime` (`cuda.CudaRuntime`); `DirectStaging` is for device memory that adapters access themselves,
`HostStaging` for engines that compute in the registered memory. Imports torch only in `cuda`.
"""

from messenger.staging.copies import Ranges, StridedCopy, merged
from messenger.staging.mirror import PinnedMirror
from messenger.staging.runtime import DeviceEvent, DeviceRuntime, DeviceStream
from messenger.staging.staging import DeviceStaging, DirectStaging, HostStaging, MirrorStaging
from messenger.staging.ticket import READY, EventTicket, FailedTicket, StagingError, Ticket, TicketsOfAll

__all__ = [
    "READY",
    "DeviceEvent",
    "DeviceRuntime",
    "DeviceStaging",
    "DeviceStream",
    "DirectStaging",
    "EventTicket",
    "FailedTicket",
    "HostStaging",
    "MirrorStaging",
    "PinnedMirror",
    "Ranges",
    "StagingError",
    "StridedCopy",
    "Ticket",
    "TicketsOfAll",
    "merged",
]
