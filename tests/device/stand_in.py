"""An accelerator in pure Python: another device type, which computes on the CPU and counts waits and launches.

It refuses to mix its tensors with those of the CPU as CUDA does, has its own random numbers, and runs backward in the
thread that autograd has for a device. Copies to the host that are not waited for arrive some launches later, and hold
garbage before. It registers for the whole process: `test_stand_in.py` runs the tests on it in a process apart.
"""

import time
from collections import Counter
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch
from device.counting import is_launch, line_to_blame
from pytorch_lightning import Callback
from pytorch_lightning.accelerators import Accelerator
from pytorch_lightning.strategies import SingleDeviceStrategy
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "standin"
LAUNCHES_UNTIL_ARRIVAL = 50
aten = torch.ops.aten

WAITING = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.repeat_interleave.Tensor,
    aten.is_nonzero.default,
}
"""Operations whose result the host must know before it can go on."""


class Device:
    """What the stand-in has counted, and what it cannot do.

    Attributes:
        waits: how often each line of the package made the host wait.
        launches: how many operations each line of the package has launched.
        lacks: `"float64"`, `"frexp"`: as on MPS.
    """

    def __init__(self):
        self.waits, self.launches, self.lacks = Counter(), Counter(), frozenset()
        self.clock = 0
        self.on_their_way = []

    def launch(self):
        self.clock += 1
        ours = line_to_blame()
        if ours is not None:
            self.launches[ours] += 1
        self._let_arrive(self.clock - LAUNCHES_UNTIL_ARRIVAL)

    def wait(self):
        """The host waits until all that was launched is done."""
        ours = line_to_blame()
        if ours is not None:
            self.waits[ours] += 1
        self._let_arrive(self.clock)

    def send(self, target, values):
        """Copy to the host without waiting: first garbage, the values later."""
        target.view(torch.uint8).fill_(0xFF)
        self.on_their_way.append((self.clock, target, values.clone()))

    def has_arrived(self, moment):
        return all(clock > moment for clock, *_ in self.on_their_way)

    def _let_arrive(self, moment):
        while self.on_their_way and self.on_their_way[0][0] <= moment:
            _, target, values = self.on_their_way.pop(0)
            target.copy_(values)

    def reset(self):
        """Count from zero."""
        self.waits.clear()
        self.launches.clear()

    @contextmanager
    def without(self, *what):
        """Inside, the device cannot do these things."""
        self.lacks = frozenset(what)
        try:
            yield
        finally:
            self.lacks = frozenset()


DEVICE = Device()


class OfStep(NamedTuple):
    """What the package made a step wait for, and launched, by line."""

    waits: Counter
    launches: Counter


class OfSteps(Callback):
    """Counts from the start of each batch to the start of the next; first what was before all batches."""

    def __init__(self):
        self.steps = []
        DEVICE.reset()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.steps.append(OfStep(Counter(DEVICE.waits), Counter(DEVICE.launches)))
        DEVICE.reset()


class OnDevice(torch.Tensor):
    """A tensor of the stand-in, which keeps its values in a tensor of the CPU."""

    @staticmethod
    def __new__(cls, values, requires_grad=False):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            layout=values.layout,
            device=f"{NAME}:0",
            requires_grad=requires_grad,
        )

    def __init__(self, values, requires_grad=False):
        self.values_on_cpu = values

    def __repr__(self):
        return f"OnDevice({self.values_on_cpu})"

    def tolist(self):
        return self.cpu().tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


def run(func, args, kwargs):
    """Run an operation of the stand-in: on the CPU, and count it."""
    flat = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    device = kwargs.get("device")
    to_device = device is not None and torch.device(device).type == NAME
    to_host = device is not None and torch.device(device).type == "cpu"
    if func in (aten._to_copy.default, aten.copy_.default):
        _count_copy(func, args, kwargs, to_host)
    elif is_launch(func):
        _check_mixing(func, flat)
        DEVICE.launch()
        if func in WAITING or (func in (aten.index.Tensor, aten.index_put_.default) and _has_mask(args[1])):
            DEVICE.wait()
    if "frexp" in func._schema.name and "frexp" in DEVICE.lacks:
        raise NotImplementedError(f"The operator '{func}' is not currently implemented for this device.")
    if device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu"), "pin_memory": False}
        if "pin_memory" not in {a.name for a in func._schema.arguments}:
            del kwargs["pin_memory"]
    cpu_args, cpu_kwargs = pytree.tree_map(values_of, (args, kwargs))
    if func is aten.copy_.default and not isinstance(args[0], OnDevice):
        return _copied_to_host(*args, **kwargs)
    with _own_random_numbers(func):
        result = func(*cpu_args, **cpu_kwargs)
    if to_host or func is aten._local_scalar_dense.default:
        return result
    stays = to_device or any(isinstance(t, OnDevice) for t in flat)
    result = pytree.tree_map(on_device, result) if stays else result
    return return_and_correct_aliasing(func, args, kwargs, result)


def on_device(t):
    """A tensor of the CPU as one of the stand-in, in the same memory."""
    if not isinstance(t, torch.Tensor) or isinstance(t, OnDevice):
        return t
    if t.dtype == torch.float64 and "float64" in DEVICE.lacks:
        raise TypeError("Cannot convert a tensor to float64: this device does not support it.")
    return OnDevice(t)


def values_of(t):
    return t.values_on_cpu if isinstance(t, OnDevice) else t


def _copied_to_host(target, source, non_blocking=False):
    if non_blocking:
        DEVICE.send(target, source.values_on_cpu)
        return target
    return target.copy_(source.values_on_cpu)


def _count_copy(func, args, kwargs, to_host):
    """Copies within the device are launches; those from or to the host wait, unless told not to."""
    target, source = (None, args[0]) if func is aten._to_copy.default else args[:2]
    leaves = to_host or (target is not None and not isinstance(target, OnDevice))
    comes = not isinstance(source, OnDevice)
    DEVICE.launch()
    non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
    if (leaves or (comes and source.dim())) and not non_blocking:
        DEVICE.wait()


def _check_mixing(func, tensors):
    devices = {t.device for t in tensors if t.dim()}
    if len(devices) > 1 and func not in (aten.index.Tensor, aten.index_put_.default):
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {devices} in {func}.")


def _has_mask(indices):
    return any(t is not None and (t.dtype in (torch.bool, torch.uint8) or t.device.type == "cpu") for t in indices)


@contextmanager
def _own_random_numbers(func):
    """Inside, the CPU's random numbers are those of the stand-in."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        yield
        return
    kept = torch.get_rng_state()
    torch.set_rng_state(DeviceModule.random_state)
    try:
        yield
    finally:
        DeviceModule.random_state = torch.get_rng_state()
        torch.set_rng_state(kept)


class Event:
    """A moment in what the stand-in does."""

    def __init__(self, enable_timing=False):
        self.moment, self.time = -1, 0.0

    def record(self, stream=None):
        self.moment, self.time = DEVICE.clock, time.perf_counter()

    def elapsed_time(self, other):
        return (other.time - self.time) * 1000

    def query(self):
        return DEVICE.has_arrived(self.moment)

    def synchronize(self):
        DEVICE.wait()

    wait = synchronize


class DeviceModule:
    """What `torch.cuda` is for CUDA, as `torch.standin`."""

    Event = Event
    random_state = torch.get_rng_state()

    @staticmethod
    def is_initialized():
        return True

    is_available = is_initialized

    @staticmethod
    def _is_in_bad_fork():
        return False

    @staticmethod
    def device_count():
        return 1

    @staticmethod
    def current_device():
        return 0

    @staticmethod
    def current_stream(device=None):
        return None

    @staticmethod
    @contextmanager
    def device(index):
        yield

    @staticmethod
    def synchronize(device=None):
        DEVICE.wait()

    @staticmethod
    def reset_peak_memory_stats():
        pass

    @staticmethod
    def max_memory_allocated():
        return 0

    @staticmethod
    def get_amp_supported_dtype():
        return [torch.bfloat16, torch.float16]

    @staticmethod
    def manual_seed_all(seed):
        DeviceModule.random_state = torch.Generator().manual_seed(seed).get_state()

    @staticmethod
    def get_rng_state(device=NAME):
        return DeviceModule.random_state.clone()

    @staticmethod
    def set_rng_state(state, device=NAME):
        DeviceModule.random_state = state.clone()


def _factories():
    """Operations that make a tensor of nothing: these never meet a tensor of the stand-in."""
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::") or ".out" in name or name.endswith("_out"):
            continue
        packet, _, overload = name.removeprefix("aten::").partition(".")
        func = getattr(getattr(aten, packet, None), overload or "default", None)
        if func is None or len(func._schema.returns) != 1 or "Tensor" not in str(func._schema.returns[0].type):
            continue
        arguments = func._schema.arguments
        if any(a.name == "device" for a in arguments) and not any("Tensor" in str(a.type) for a in arguments):
            yield name.removeprefix("aten::"), func


def _made(func):
    return lambda *args, **kwargs: run(func, args, {**kwargs, "device": NAME})


def _copy_from(source, target, non_blocking=False):
    run(aten.copy_.default, (target, source), {"non_blocking": non_blocking})
    return target


_setup_privateuseone_for_python_backend(NAME, backend_module=DeviceModule)
with suppress(ImportError):  # 0.2.0, which `benchmarks/counts.py` compares with, has no such module
    from normgrad_lightning.hooks import to_host

    # Memory is never pinned for a device in Python, so any will do.
    to_host._COPIES_BESIDE += (NAME,)
    to_host._pinned = lambda like: torch.empty(like.shape, dtype=like.dtype)
_library = torch.library.Library("aten", "IMPL")
for _name, _func in _factories():
    _library.impl(_name, _made(_func), "PrivateUse1")
_autocast = torch.library.Library("_", "IMPL")
_autocast.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # autocast changes no type here
_library.impl("_copy_from", _copy_from, "PrivateUse1")


class StandIn(Accelerator):
    """The stand-in, for Lightning."""

    def setup_device(self, device):
        pass

    def teardown(self):
        pass

    def get_device_stats(self, device):
        return {}

    @staticmethod
    def parse_devices(devices):
        return devices

    @staticmethod
    def get_parallel_devices(devices):
        return [torch.device(NAME, 0)]

    @staticmethod
    def auto_device_count():
        return 1

    @staticmethod
    def is_available():
        return True

    @staticmethod
    def name():
        return NAME


def on_stand_in():
    """Arguments of a Trainer that trains on the stand-in."""
    strategy = SingleDeviceStrategy(torch.device(NAME, 0), accelerator=StandIn())
    return {"strategy": strategy, "accelerator": "auto"}
