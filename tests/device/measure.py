"""What NormGrad costs on the device that NORMGRAD_TEST_DEVICE names, as one table to paste into a bug report.

`pytest -m gpu` runs it; by hand: `NORMGRAD_TEST_DEVICE=cuda PYTHONPATH=tests python tests/device/measure.py`.
"""

import argparse
import platform
import statistics
import tempfile
import warnings

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from device import chosen
from networks import ResNet
from pytorch_lightning.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader

from normgrad_lightning import NormGrad, NormGradCallback

ROWS = {}


def row(function):
    """A row of the table; its name is the function's first line."""
    ROWS[function.__doc__.strip().rstrip(".")] = function
    return function


class Classifier(pl.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


class Timer(pl.Callback):
    """Milliseconds of each step on the device, by its own events."""

    def __init__(self):
        self.events = []

    def on_train_batch_start(self, *_):
        self.events.append(chosen.module().Event(enable_timing=True))
        self.events[-1].record()

    def of_steps(self):
        chosen.module().synchronize()
        return [a.elapsed_time(b) for a, b in zip(self.events, self.events[1:], strict=False)]


def network(size):
    if size.small:
        return ResNet(dropout=0.1)
    from torchvision.models import resnet50

    return resnet50(num_classes=5)


def fit(size, *callbacks, steps=None, net=None, **options):
    """Train for a few steps; return the Timer."""
    steps, timer = steps or size.steps, Timer()
    pl.seed_everything(0, verbose=False)
    images, labels = torch.randn(size.batch, 3, size.side, size.side), torch.randint(5, (size.batch,))
    data = DataLoader([(images, labels)] * steps, batch_size=None)
    quiet = dict.fromkeys(["enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    trainer = pl.Trainer(
        max_steps=steps,
        default_root_dir=tempfile.mkdtemp(),
        callbacks=[timer, *callbacks],
        **{**quiet, **chosen.trainer_options(), **options},
    )
    trainer.fit(Classifier(net or network(size)), data)
    return timer


def median(times):
    return statistics.median(times[len(times) // 2 :])


@row
def time_of_a_step(size):
    """Milliseconds of a step: off, defaults, every step."""
    off = median(fit(size).of_steps())
    defaults = statistics.mean(fit(size, NormGradCallback()).of_steps()[5:])
    always = median(fit(size, NormGradCallback(every_n_steps=1)).of_steps())
    return f"{off:.2f}, {defaults:.2f}, {always:.2f}"


@row
def waits_of_a_step(size):
    """Waits for the device: plain step, reading, event."""
    if not chosen.counts_waits():
        return "not counted on this device"
    found = []
    for flags in ({"every_n_steps": 1000, "read_every_n_steps": 1000}, {"read_every_n_steps": 1}, {"every_n_steps": 1}):
        totals = []
        for steps in (3, 5):
            with chosen.waits() as waits:
                fit(size, NormGradCallback(**{"every_n_steps": 1000, **flags}), steps=steps)
            totals.append(waits.total())
        found.append((totals[1] - totals[0]) / 2)
    return ", ".join(f"{number:.1f}" for number in found)


@row
def launches_of_a_step(size):
    """Launches of a step: off, and with maps read at four layers."""
    found = []
    for layers in ([], ["layer1", "layer2", "layer3", "layer4"]):
        layers = [name.replace("layer", "stage") for name in layers[:3]] if size.small else layers
        net, images = network(size).to(chosen.NAME), torch.randn(size.batch, 3, size.side, size.side).to(chosen.NAME)
        recorder = NormGrad(net, layers or "auto", 64)

        def step(net=net, images=images):
            net(images).sum().backward()

        step()
        if layers:
            recorder.attach()
        found.append(launches(step))
        recorder.detach()
    return ", ".join(map(str, found)) if any(found) else "not counted on this device"


def launches(step):
    """How many kernels a step launches, by the profiler; on the stand-in, as it counts."""
    if not chosen.IS_REAL:
        before = chosen.stand_in.DEVICE.clock
        step()
        return chosen.stand_in.DEVICE.clock - before
    with torch.profiler.profile() as profile:
        step()
        chosen.module().synchronize()
    return sum(event.count for event in profile.key_averages() if "launch" in event.key.lower())


class PeakMemory(pl.Callback):
    """The most memory that each step takes, in MB."""

    def __init__(self):
        self.of_steps = []

    def on_train_batch_start(self, *_):
        chosen.module().reset_peak_memory_stats()

    def on_train_batch_end(self, *_):
        self.of_steps.append(chosen.module().max_memory_allocated() / 2**20)


@row
def peak_memory(size):
    """Peak memory in MB, first and later step: off, every step an event, with order 1, with Grad-CAM."""
    if not hasattr(chosen.module(), "max_memory_allocated"):
        return "not counted on this device"
    found = []
    for flags in (None, {}, {"order1_every_n_steps": 1}, {"grad_cam": True}):
        callbacks, peaks = [] if flags is None else [NormGradCallback(every_n_steps=1, **flags)], PeakMemory()
        fit(size, *callbacks, peaks, steps=4)
        found.append(f"{peaks.of_steps[0]:.0f} and {peaks.of_steps[2]:.0f}")
    return ", ".join(found)


@row
def half_precision(size):
    """Events with order-1 maps under 16-mixed with a grown loss scale."""
    if chosen.NAME == "mps":
        return "not on this device"
    callback, seen = NormGradCallback(every_n_steps=1, order1_every_n_steps=1), []
    scaler = torch.amp.GradScaler(chosen.NAME, init_scale=2.0**20)
    plugin = MixedPrecision("16-mixed", chosen.NAME, scaler)
    note = pl.callbacks.LambdaCallback(on_train_batch_end=lambda *_: seen.append(bool(callback.order1)))
    fit(size, callback, note, steps=4, plugins=[plugin])
    return f"{sum(seen)} of {len(seen)}"


@row
def compiled(size):
    """Maps of a network compiled with CUDA graphs."""
    if chosen.NAME != "cuda":
        return "not on this device"
    callback = NormGradCallback(every_n_steps=2)
    fit(size, callback, steps=4, net=torch.compile(network(size), mode="reduce-overhead"))
    return f"{len(callback.maps)} layers"


@row
def two_devices(size):
    """Maps of a network split over two devices, and of nn.DataParallel."""
    if chosen.module().device_count() < 2:
        return "one device"
    first, second = f"{chosen.NAME}:0", f"{chosen.NAME}:1"

    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3).to(first), nn.Conv2d(8, 8, 3, 2).to(second)

        def forward(self, x):
            return self.b(self.a(x).relu().to(second)).relu()

    replicas = nn.DataParallel(ResNet().to(first), [0, 1])
    found = []
    for net in (Split(), replicas):
        with NormGrad(net) as recorder:
            net(torch.randn(8, 3, 32, 32, device=first)).sum().backward()
        found.append(len(recorder.maps))
    return ", ".join(map(str, found))


def table(size):
    """Every row; what fails says why."""
    name = getattr(chosen.module(), "get_device_name", lambda: chosen.NAME)()
    yield f"| {name} | torch {torch.__version__}, Lightning {pl.__version__}, Python {platform.python_version()} |"
    yield "|---|---|"
    for title, measure in ROWS.items():
        try:
            yield f"| {title} | {measure(size)} |"
        except Exception as error:
            yield f"| {title} | FAILED: {type(error).__name__}: {str(error).splitlines()[0]} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a small network, few steps")
    size = parser.parse_args()
    size.batch, size.side, size.steps = (4, 32, 8) if size.small else (64, 224, 60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for line in table(size):
            print(line, flush=True)


if __name__ == "__main__":
    main()
