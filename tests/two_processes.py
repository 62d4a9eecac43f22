"""Trains in two processes, once for each set-up that is named, with the callback and without.

A script, for Lightning starts the second process by running the first one's command again. To start processes takes
longer than to train in them, so many set-ups share a pair. What each process saw of each run is left in a file:
`<folder>/<set-up>.<plain or watched>.rank<0 or 1>.pt`; what went wrong, in `<folder>/<set-up>.rank<0 or 1>.error`.

    python two_processes.py FOLDER SETUP...
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from networks import ResNet
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.nn.functional import all_reduce
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from twice import History, Lit, Moments, Told, loader, traces, train, watching

from normgrad_lightning import NormGradCallback

PATIENCE = 180
"""Seconds until a run that hangs is ended, and tells where it hung."""
KILLED_AFTER = 3  # the step has order-1 panels, too: more than a logger has time for


class UsesSomeOnSomeSteps(Lit):
    """One layer is never used, and one only with batches whose labels add up to an odd number."""

    def __init__(self):
        super().__init__()
        self.never = nn.Linear(5, 5)
        self.sometimes = nn.Linear(5, 5)

    def loss(self, batch):
        images, labels = batch
        scores = self.net(images)
        if int(labels.sum()) % 2:
            scores = scores + self.sometimes(scores)
        return F.cross_entropy(scores, labels)


class WithoutDropout(Lit):
    """The images of both processes can be put in one batch, as no random number falls on them."""

    def __init__(self):
        super().__init__(partial(ResNet, smooth=True))


class LossOfBoth(WithoutDropout):
    """The sum of what two processes minimise, if their batches are put in one."""

    def loss(self, batch):
        return 2 * super().loss(batch)


class Compiled(Lit):
    def __init__(self):
        super().__init__()
        self.net = torch.compile(self.net, backend="aot_eager")


class SumsInBackward(torch.autograd.Function):
    """The identity, as the entrance of a tensor-parallel layer has it: only its gradient comes from all processes."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class TalksInBackward(WithoutDropout):
    def loss(self, batch):
        return F.cross_entropy(SumsInBackward.apply(self.net(batch[0])), batch[1])


class TalksInForward(WithoutDropout):
    def loss(self, batch):
        loss = super().loss(batch)
        dist.all_reduce(loss.detach().clone())
        return loss


class Talking(ResNet):
    """Asks the other process while it runs; it has BatchNorm, whose statistics a pass of its own may collect."""

    def forward(self, images):
        scores = super().forward(images)
        dist.all_reduce(scores.detach().clone())
        return scores


class TalksInNetwork(WithoutDropout):
    def __init__(self):
        super().__init__()
        self.net = Talking(smooth=True)


class IsKilled(Lit):
    """The first process dies as soon as an event is over, as if the machine had run out of memory."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.is_global_zero and batch_idx == KILLED_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)


class Wrapped(Lit):
    """Sharded by FSDP1, which takes the CPU if it is named."""

    def configure_model(self):
        on_cpu = {"device_id": torch.device("cpu"), "use_orig_params": True}
        for name in ("stage1", "stage2", "stage3"):
            setattr(self.net, name, FullyShardedDataParallel(getattr(self.net, name), **on_cpu))
        self.net = FullyShardedDataParallel(self.net, **on_cpu)


class Sharded(Lit):
    """Sharded by FSDP2."""

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for part in (self.net.stage1, self.net.stage2, self.net.stage3, self.net):
            fully_shard(part, mesh=mesh)


class Spawned(Lit):
    """Leaves what it saw from inside of the process that trains, as nothing of it comes back."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path

    def on_fit_start(self):
        self.mean.reset()  # Lightning lets spawned processes share the states of metrics, and one spoils the other's

    def teardown(self, stage):
        self.trainer.logger.experiment.flush()
        keep(self.path, self.trainer, traces(self.trainer, self, the(Told, self.trainer)))


class CompressesGradients(DDPStrategy):
    """Lightning registers communication hooks on GPUs only."""

    def _register_ddp_hooks(self):
        self.model.register_comm_hook(None, fp16_compress_hook)


class FSDPOnCPU(FSDPStrategy):
    """Lightning refuses the CPU to `FSDPStrategy` itself."""


def joint_batch_norm(self: nn.SyncBatchNorm, x: Tensor) -> Tensor:
    """What SyncBatchNorm does on GPUs, which torch has no code for on the CPU."""
    if not self.training:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
    count = x.numel() // x.shape[1] * dist.get_world_size()
    mean = all_reduce(x.sum((0, 2, 3))) / count
    centred = x - mean[:, None, None]
    variance = all_reduce(centred.square().sum((0, 2, 3))) / count
    with torch.no_grad():
        self.num_batches_tracked += 1
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance * count / (count - 1), self.momentum)
    scale = self.weight * (variance + self.eps).rsqrt()
    return centred * scale[:, None, None] + self.bias[:, None, None]


@contextmanager
def sync_batch_norm_on_cpu() -> Iterator[None]:
    """Torch refuses it twice: in DDP, and in the layer."""
    check = "_passing_sync_batchnorm_handle"
    with (
        mock.patch.object(nn.parallel.DistributedDataParallel, check),
        mock.patch.object(nn.SyncBatchNorm, "forward", joint_batch_norm),
    ):
        yield


class Collectives(TorchDispatchMode):
    """Writes down what is said to other processes, in whatever group."""

    said: ClassVar[list[str]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d" in func.namespace:
            self.said.append(str(func))
        return func(*args, **(kwargs or {}))


@dataclass
class Setup:
    """What a user sets up.

    Attributes:
        options: makes the options of the Trainer.
        make: makes the module.
        around: is around the training.
        sharded: whether each process has only a part of the weights.
        flags: more of the callback.
    """

    options: Callable[[], dict[str, Any]]
    make: Callable[[], Any] = Lit
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    sharded: bool = False
    flags: dict[str, Any] = field(default_factory=dict)

    def train(self, folder: Path, callback: NormGradCallback | None, make: Callable[[], Any] | None = None) -> Any:
        logger = TensorBoardLogger(folder, name=None, version="")  # one folder, whichever process asks first
        fixed = {"data": partial(loader, 48), "devices": 2, "logger": logger}
        with self.around():
            return train(make or self.make, folder, callback, **{**fixed, **self.options()})


def ddp(kind: type[DDPStrategy] = DDPStrategy, **options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"strategy": kind(**options)}


SETUPS = {
    "ddp": Setup(lambda: {"strategy": "ddp"}),
    "ddp_spawn": Setup(lambda: {"strategy": "ddp_spawn"}),
    "find_unused_parameters": Setup(lambda: {"strategy": "ddp_find_unused_parameters_true"}, UsesSomeOnSomeSteps),
    "sync_batchnorm": Setup(
        lambda: {"strategy": "ddp", "sync_batchnorm": True}, WithoutDropout, sync_batch_norm_on_cpu
    ),
    "gradient_as_bucket_view": Setup(ddp(gradient_as_bucket_view=True)),
    "static_graph": Setup(ddp(static_graph=True)),
    "comm_hook": Setup(ddp(CompressesGradients)),
    "counted": Setup(ddp(), around=Collectives),
    "compiled": Setup(ddp(), Compiled),
    "probe": Setup(ddp(), flags={"probe": "train"}),
    "checked": Setup(lambda: {"strategy": "ddp", "data": partial(loader, 768, 64)}, WithoutDropout),
    "talks_in_forward": Setup(ddp(), TalksInForward, flags={"probe": "train", "on_error": "warn"}),
    "talks_in_backward": Setup(ddp(), TalksInBackward, flags={"probe": "train", "on_error": "warn"}),
    "talks_in_network": Setup(ddp(), TalksInNetwork, flags={"order1_every_n_steps": None, "read_every_n_steps": 1}),
    "fsdp1": Setup(lambda: {"strategy": FSDPOnCPU()}, Wrapped, sharded=True),
    "fsdp2": Setup(lambda: {"strategy": ModelParallelStrategy(2, 1)}, Sharded, sharded=True),
    "killed": Setup(lambda: {"strategy": "ddp", "log_every_n_steps": 99}, IsKilled),  # to log would flush the file
}


def the(kind: type, trainer: Any) -> Any:
    """The callback of this kind, if there is one."""
    return next((callback for callback in trainer.callbacks if isinstance(callback, kind)), None)


def keep(path: Path, trainer: Any, seen: dict[str, Any], **more: Any) -> None:
    """Leave what this process saw of a run in a file."""
    moments, history = the(Moments, trainer), the(History, trainer)
    if trainer.global_rank:
        seen = {**seen, "logged": {}}  # read from files that the first process may still be writing
    kept = {
        "traces": unsharded(seen, of_this_process),
        "moments": {} if moments is None else unsharded_moments(moments),
        "maps": {} if history is None else history.maps,
        "order1": {} if history is None else history.order1,
        "shown": [] if history is None else [history.callback.maps, history.callback.order1, history.callback.inputs],
        "probe": [] if history is None else probe_of(history.callback),
        "check": {} if history is None else {name: one.n for name, one in history.callback.check.items()},
        "process": os.getpid(),
        "log_dir": trainer.logger.log_dir,
        **more,
    }
    torch.save(kept, f"{path}.rank{trainer.global_rank}.pt")


def probe_of(callback: NormGradCallback) -> list[Any]:
    """The step, images, labels and maps of the probe."""
    latest = callback.latest.get("probe_order0")
    return [] if latest is None else [latest.step, latest.images, latest.labels, latest.maps]


def of_this_process(t: DTensor) -> Tensor:
    return t.to_local()


def unsharded(value: Any, whole: Callable[[DTensor], Tensor]) -> Any:
    """The same with plain tensors, wherever they are."""
    if isinstance(value, DTensor):
        return whole(value).clone()
    if isinstance(value, dict):
        return {key: unsharded(part, whole) for key, part in value.items()}
    return [unsharded(part, whole) for part in value] if isinstance(value, list) else value


def unsharded_moments(moments: Moments) -> dict[int, Any]:
    for moment in moments.of_step.values():
        moment.weights = unsharded(moment.weights, DTensor.full_tensor)
    return moments.of_step


def run(folder: Path, name: str) -> None:
    """Train with this set-up, without and with the callback."""
    setup = SETUPS[name]
    for which, callback in callbacks_of(setup).items():
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        path, logs = folder / f"{name}.{which}", folder / name / which
        if name == "ddp_spawn":
            setup.train(logs, callback, partial(Spawned, path))
        elif which == "refused":
            keep_refusal(path, setup, logs, callback)
        else:
            run_here(path, setup, logs, callback)


def callbacks_of(setup: Setup) -> dict[str, NormGradCallback | None]:
    """What each run is watched with; None also keeps the weights of each step, for the reference."""
    if setup.make is IsKilled:
        return {"watched": watching()}
    if not setup.sharded:
        return {"plain": None, "watched": watching(**setup.flags)}
    off = NormGradCallback(enabled=False)  # its collectives can be counted: to keep sharded weights takes some more
    return {"refused": watching(), "off": off, "plain": None, "watched": watching(order1_every_n_steps=None)}


def keep_refusal(path: Path, setup: Setup, logs: Path, callback: NormGradCallback) -> None:
    """Leave what the user is told, and how many batches it took."""
    made: list[Lit] = []
    try:
        setup.train(logs, callback, lambda: made.append(setup.make()) or made[0])
        told = "nothing"
    except ValueError as error:
        told = str(error)
    torch.save({"told": told, "batches": len(made[0].losses)}, f"{path}.rank{dist.get_rank()}.pt")


def run_here(path: Path, setup: Setup, logs: Path, callback: NormGradCallback | None) -> None:
    Collectives.said.clear()
    before = collectives()
    made = setup.train(logs, callback)
    count = collectives() - before
    keep(path, made.trainer, made.traces, warned=made.warned, collectives=count, said=list(Collectives.said))


def collectives() -> int:
    """How many collectives this process has taken part in, of those of all processes."""
    return dist.group.WORLD._get_sequence_number_for_group() if dist.is_initialized() else 0


def main(folder: Path, names: list[str]) -> None:
    for name in names:
        try:
            run(folder, name)
        except BaseException:
            rank = os.environ.get("LOCAL_RANK", "0")
            (folder / f"{name}.rank{rank}.error").write_text(traceback.format_exc())
            os._exit(1)  # the other process waits for this one, and ends with it


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
