"""The CUDA driver, thinly: checked calls, modules, memory, launches and graphs of one device."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from kt.spaces.errors import TargetError, ToolchainError
from kt.spaces.kernel import MAP_SWIZZLES, MAP_TYPES, Launch, TensorMap

OUT_OF_MEMORY = 2
REFUSED = frozenset({1, 8, 9, 98, 200, 209, 218, 300, 500, 701, 720, 801, 912})
"""Codes of a module or launch that the driver refused; the context lives on."""
LOST = frozenset({46, 100, 101, 214, 220, 226, 802})
"""Codes that are the device's fault, not the kernel's, or that say that it is gone."""


def sticky(code: int) -> bool:
    """Whether an error takes the context with it, so that the process must be replaced."""
    return code not in REFUSED and code != OUT_OF_MEMORY


class CudaError(TargetError):
    """A driver call failed. `code` is the CUresult.

    Where no candidate is to blame this ends a command with its one line.
    """

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call} failed: {name}")
        self.call, self.code, self.name = call, code, name

    def __reduce__(self) -> tuple[type[CudaError], tuple[str, int, str]]:
        return CudaError, (self.call, self.code, self.name)  # through the pipe of a worker


def driver() -> Any:
    """cuda-bindings' driver module; raises ToolchainError with the install command."""
    try:
        from cuda.bindings import driver as bindings
    except ImportError:
        raise ToolchainError(
            "running on CUDA needs the driver's bindings: pip install -e '.[cuda]' where kt is"
        ) from None
    return bindings


def call(name: str, *args: object) -> Any:
    """Calls a driver function and returns its result (None, one value, or a tuple)."""
    code, *values = getattr(driver(), name)(*args)
    if int(code) != 0:
        _, text = driver().cuGetErrorName(code)
        raise CudaError(name, int(code), (text or b"unknown").decode())
    return values[0] if len(values) == 1 else tuple(values) if values else None


class Memory:
    """A device allocation, freed with its object."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.address = int(call("cuMemAlloc", max(size, 1)))

    def fill(self, byte: int, offset: int = 0, size: int | None = None) -> None:
        """Sets bytes, in stream order."""
        count = self.size - offset if size is None else size
        if count > 0:
            call("cuMemsetD8Async", self.address + offset, byte, count, 0)

    def read(self, size: int, offset: int = 0) -> bytes:
        """Copies to the host; waits."""
        host = ctypes.create_string_buffer(size)
        call("cuMemcpyDtoH", ctypes.addressof(host), self.address + offset, size)
        return host.raw

    def free(self) -> None:
        if self.address:
            address, self.address = self.address, 0
            driver().cuMemFree(address)

    def __del__(self) -> None:
        self.free()


class Device:
    """The primary context of one GPU, current in this process."""

    def __init__(self, index: int) -> None:
        call("cuInit", 0)
        self.handle = call("cuDeviceGet", index)
        self.context = call("cuDevicePrimaryCtxRetain", self.handle)
        call("cuCtxSetCurrent", self.context)
        self.stream = call("cuStreamCreate", 0)  # ordered with the null stream
        self.name = bytes(call("cuDeviceGetName", 96, self.handle)).split(b"\0")[0].decode()
        self.uuid = bytes(call("cuDeviceGetUuid", self.handle).bytes).hex()

    def attribute(self, name: str) -> int:
        """A device attribute by its name without the CU_DEVICE_ATTRIBUTE_ prefix."""
        key = getattr(driver().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(call("cuDeviceGetAttribute", key, self.handle))

    def free_bytes(self) -> int:
        return int(call("cuMemGetInfo")[0])

    def synchronize(self) -> None:
        """Waits for the device; raises what went wrong on it."""
        call("cuCtxSynchronize")


class Module:
    """A loaded cubin."""

    def __init__(self, path: Path) -> None:
        image = path.read_bytes()
        self._image = image  # the driver may read it lazily
        self.handle = call("cuModuleLoadData", image)
        self._functions: dict[str, Any] = {}

    def function(self, entry: str, shared_bytes: int = 0) -> Any:
        """A kernel by name, allowed to use `shared_bytes` of dynamic shared memory."""
        if entry not in self._functions:
            found = call("cuModuleGetFunction", self.handle, entry.encode())
            if shared_bytes > 48 * 1024:
                key = driver().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                call("cuFuncSetAttribute", found, key, shared_bytes)
            self._functions[entry] = found
        return self._functions[entry]

    def unload(self) -> None:
        if self.handle is not None:
            handle, self.handle = self.handle, None
            driver().cuModuleUnload(handle)


_TYPES: dict[str, Any] = {
    "P": ctypes.c_void_p, "i": ctypes.c_int, "l": ctypes.c_long, "L": ctypes.c_ulong,
    "d": ctypes.c_double, "B": ctypes.c_ubyte,
}  # fmt: skip


def launch(
    module: Module, step: Launch, arguments: Sequence[object], stream: Any, types: str = ""
) -> None:
    """Starts one kernel. Parameters are pointers unless `types` has a letter for each.

    The last argument is the workspace where the kernel takes tensor maps.
    """
    function = module.function(step.entry, step.shared_bytes)
    config = _configured(step, stream)
    if step.resident:
        config.gridDimX = min(step.grid[0], _resident(module, step, function, config))
    maps = [_encoded(m, int(arguments[m.argument]) + m.offset) for m in step.maps]  # type: ignore[call-overload]
    parameters = [_TYPES[letter] for letter in types or "P" * len(arguments)]
    values = ((*arguments, *maps), (*parameters, *[None] * len(maps)))  # a map goes by value
    call("cuLaunchKernelEx", config, function, values, 0)


def _configured(step: Launch, stream: Any) -> Any:
    """The CUlaunchConfig of a launch."""
    bindings = driver()
    config = bindings.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = step.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = step.block
    config.sharedMemBytes, config.hStream = step.shared_bytes, stream
    attributes = []
    if step.cluster != (1, 1, 1):
        attribute = bindings.CUlaunchAttribute()
        attribute.id = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        cluster = attribute.value.clusterDim
        cluster.x, cluster.y, cluster.z = step.cluster
        attributes.append(attribute)
    if step.early:
        attribute = bindings.CUlaunchAttribute()
        kinds = bindings.CUlaunchAttributeID
        attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


_held_at_once: WeakKeyDictionary[Module, dict[str, int]] = WeakKeyDictionary()


def _resident(module: Module, step: Launch, function: Any, config: Any) -> int:
    """CTAs, in whole clusters, that the device holds at once; asked once for each kernel."""
    known = _held_at_once.setdefault(module, {})
    if step.entry not in known:
        x, y, z = step.cluster
        clusters = int(call("cuOccupancyMaxActiveClusters", function, config))
        known[step.entry] = max(clusters, 1) * x * y * z
    return known[step.entry]


@functools.lru_cache(maxsize=4096)
def _encoded(tensor: TensorMap, address: int) -> Any:
    """The CUtensorMap of a tensor at `address`; a graph launches the same ones again and again."""
    b, rank = driver(), len(tensor.extents)
    long, word = b.cuuint64_t, b.cuuint32_t
    return call(
        "cuTensorMapEncodeTiled", b.CUtensorMapDataType(MAP_TYPES[tensor.dtype]), rank, address,
        [long(x) for x in tensor.extents], [long(x) for x in tensor.strides],
        [word(x) for x in tensor.box], [word(x) for x in tensor.all_steps],
        b.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        b.CUtensorMapSwizzle(MAP_SWIZZLES[tensor.swizzle]),
        b.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        b.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )  # fmt: skip


class Replayable(Protocol):
    """A sequence of launches that can be started as a whole."""

    def replay(self, stream: Any) -> None: ...
    def destroy(self) -> None: ...


@dataclass
class Graph:
    """A captured and instantiated sequence of launches."""

    executable: Any
    graph: Any

    def replay(self, stream: Any) -> None:
        call("cuGraphLaunch", self.executable, stream)

    def destroy(self) -> None:
        driver().cuGraphExecDestroy(self.executable)
        driver().cuGraphDestroy(self.graph)


def capture(stream: Any, record: Callable[[], None]) -> Graph:
    """The graph of what `record` launches on `stream`."""
    mode = driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    call("cuStreamBeginCapture", stream, mode)
    try:
        record()
    finally:
        graph = call("cuStreamEndCapture", stream)
    return Graph(call("cuGraphInstantiate", graph, 0), graph)


class Events:
    """`count` + 1 events: the times between neighbours, microseconds."""

    def __init__(self, count: int) -> None:
        self._events = [call("cuEventCreate", 0) for _ in range(count + 1)]

    def record(self, index: int, stream: Any) -> None:
        call("cuEventRecord", self._events[index], stream)

    def elapsed_us(self, index: int) -> float:
        """Between event `index` and the next; waits for that."""
        call("cuEventSynchronize", self._events[index + 1])
        ms = call("cuEventElapsedTime", self._events[index], self._events[index + 1])
        return float(ms) * 1e3

    def destroy(self) -> None:
        for event in self._events:
            driver().cuEventDestroy(event)
