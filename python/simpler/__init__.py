"""One parent process, one persistent process per accelerator, an exact control plane between them."""

from simpler.access import TransferAccess
from simpler.buffers import Buffer, HostBuffer, Pin
from simpler.callables import CallableHandle
from simpler.capture import CapturedGraph
from simpler.chips.backend import ChipBackend, ChipConfig
from simpler.config import RunConfig
from simpler.control.chip_view import BufferView, ChipView
from simpler.control.registry import (
    register_chip_control_extension,
    unregister_chip_control_extension,
)
from simpler.control.transfers import (
    CancelToken,
    TransferBuffer,
    TransferRequest,
    TransferResult,
    register_transfer_provider,
    unregister_transfer_provider,
)
from simpler.domain import Domain
from simpler.errors import (
    BackPressureError,
    ChipControlError,
    ClosedError,
    ConfigError,
    MemoryRangeError,
    RemoteError,
    RunCancelledError,
    SimplerError,
    StartupError,
    TaskError,
    TransferError,
    TransferUnconfirmedError,
    UnknownExtensionError,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
)
from simpler.ids import ControlOp
from simpler.kernels import NativeKernel, compile_kernel, get_include
from simpler.lifecycle import WorkerState
from simpler.orchestrator import Orchestrator
from simpler.run import RunHandle, TaskHandle
from simpler.status import ChildStats, ChildStatus, Running
from simpler.task_args import IN, INOUT, NO_DEP, OUT, Tag, TaskArgs
from simpler.tensor import Tensor
from simpler.transfer_handle import TransferHandle, TransferState
from simpler.transfer_ranges import TransferRange
from simpler.worker import Worker

__version__ = "0.1.0"

__all__ = [
    "IN",
    "INOUT",
    "NO_DEP",
    "OUT",
    "BackPressureError",
    "Buffer",
    "BufferView",
    "CallableHandle",
    "CancelToken",
    "CapturedGraph",
    "ChildStats",
    "ChildStatus",
    "ChipBackend",
    "ChipConfig",
    "ChipControlError",
    "ChipView",
    "ClosedError",
    "ConfigError",
    "ControlOp",
    "Domain",
    "HostBuffer",
    "MemoryRangeError",
    "NativeKernel",
    "Orchestrator",
    "Pin",
    "RemoteError",
    "RunCancelledError",
    "RunConfig",
    "RunHandle",
    "Running",
    "SimplerError",
    "StartupError",
    "Tag",
    "TaskArgs",
    "TaskError",
    "TaskHandle",
    "Tensor",
    "TransferAccess",
    "TransferBuffer",
    "TransferError",
    "TransferHandle",
    "TransferRange",
    "TransferRequest",
    "TransferResult",
    "TransferState",
    "TransferUnconfirmedError",
    "UnknownExtensionError",
    "Worker",
    "WorkerDiedError",
    "WorkerError",
    "WorkerState",
    "WorkerTimeoutError",
    "compile_kernel",
    "get_include",
    "register_chip_control_extension",
    "register_transfer_provider",
    "unregister_chip_control_extension",
    "unregister_transfer_provider",
]
