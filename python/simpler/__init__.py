"""One parent process, one persistent process per accelerator, an exact control plane between them."""

from simpler.buffers import Buffer, HostBuffer, Pin
from simpler.callables import CallableHandle
from simpler.chips.backend import ChipBackend, ChipConfig
from simpler.config import RunConfig
from simpler.control.chip_view import BufferView, ChipView
from simpler.control.registry import (
    register_chip_control_extension,
    unregister_chip_control_extension,
)
from simpler.errors import (
    BackPressureError,
    ChipControlError,
    ClosedError,
    ConfigError,
    MemoryRangeError,
    RemoteError,
    SimplerError,
    StartupError,
    TaskError,
    UnknownExtensionError,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
)
from simpler.ids import ControlOp
from simpler.kernels import NativeKernel, compile_kernel, get_include
from simpler.lifecycle import WorkerState
from simpler.orchestrator import Orchestrator
from simpler.run import TaskHandle
from simpler.status import ChildStats, ChildStatus, Running
from simpler.task_args import Tag, TaskArgs
from simpler.tensor import Tensor
from simpler.worker import Worker

__version__ = "0.1.0"

__all__ = [
    "BackPressureError",
    "Buffer",
    "BufferView",
    "CallableHandle",
    "ChildStats",
    "ChildStatus",
    "ChipBackend",
    "ChipConfig",
    "ChipControlError",
    "ChipView",
    "ClosedError",
    "ConfigError",
    "ControlOp",
    "HostBuffer",
    "MemoryRangeError",
    "NativeKernel",
    "Orchestrator",
    "Pin",
    "RemoteError",
    "RunConfig",
    "Running",
    "SimplerError",
    "StartupError",
    "Tag",
    "TaskArgs",
    "TaskError",
    "TaskHandle",
    "Tensor",
    "UnknownExtensionError",
    "Worker",
    "WorkerDiedError",
    "WorkerError",
    "WorkerState",
    "WorkerTimeoutError",
    "compile_kernel",
    "get_include",
    "register_chip_control_extension",
    "unregister_chip_control_extension",
]
