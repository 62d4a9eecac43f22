"""What runs by default leaves networks alone that it could change: nobody has asked for these passes."""

import ctypes
import enum
import itertools
import logging
import weakref
from collections.abc import Mapping
from functools import lru_cache, partial
from types import SimpleNamespace

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
import torchmetrics
import torchvision
from networks import ResNet, batch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate
from twice import Lit, assert_same, loader, same, train

from normgrad_lightning import NormGradCallback, order0_maps, select_layers
from normgrad_lightning.check.network import _leaves_no_trace
from normgrad_lightning.isolated.python_state import PythonState
from normgrad_lightning.page import Page
from normgrad_lightning.step.messages import Messenger


def by_default(**flags):
    return NormGradCallback(every_n_steps=1, read_every_n_steps=1, on_error="raise", **flags)


class Around(nn.Module):
    """A network that does something with its images first."""

    def __init__(self, change):
        super().__init__()
        self.net, self.change = ResNet(), change

    def forward(self, images, *more):
        return self.net(self.change(images, *more))


class Given(Lit):
    """Gives its network more than images.

    Args:
        change: what the network does with both.
        what: makes what it gets.
    """

    def __init__(self, change, what):
        super().__init__(lambda: Around(change))
        self.what = what()

    def loss(self, batch):
        return F.cross_entropy(self.net(batch[0], self.what), batch[1])


class Counts:
    def __init__(self):
        self.calls = 0

    def __call__(self, images):
        self.calls += 1
        return images / self.calls


def noisy(images, generator):
    return images + torch.randn(images.shape, generator=generator)


def with_memory(images, memory):
    memory.add_(images.mean())
    return images + memory


def with_object(images, counts):
    return counts(images)


class WithIterator(Lit):
    def __init__(self):
        super().__init__(lambda: Around(self.scaled))
        self.net.scales = itertools.cycle([1.0, 2.0, 3.0])

    def scaled(self, images):
        return images * next(self.net.scales)


class Ramp(pl.Callback):
    """Has a hook on the network that does another thing at each call."""

    def on_fit_start(self, trainer, module):
        self.counts = Counts()
        module.net.stage2.register_forward_hook(self.hook)

    def hook(self, layer, args, output):
        return self.counts(output)


MODULES = {
    "a generator": lambda: Given(noisy, torch.Generator),
    "a memory that it writes to": lambda: Given(with_memory, lambda: torch.zeros(())),
    "an object that counts": lambda: Given(with_object, Counts),
    "an iterator": WithIterator,
}


@pytest.mark.parametrize("what", MODULES)
def test_a_network_that_is_given_or_holds_something_that_changes(what, tmp_path):
    plain = train(MODULES[what], tmp_path / "plain")
    run = train(MODULES[what], tmp_path, by_default())
    assert_same(plain, run)
    assert not run.warned
    assert run.callback.maps


def test_a_network_with_hooks_of_a_callback(tmp_path):
    plain = train(Lit, tmp_path / "plain", callbacks=lambda: [Ramp()])
    run = train(Lit, tmp_path, by_default(), callbacks=lambda: [Ramp()])
    assert_same(plain, run)
    assert "probe_order0" not in run.callback.latest


@pytest.mark.parametrize("where", ["the network", "the module"])
def test_very_much_state(where, tmp_path):
    def make():
        module = Lit()
        holder = module.net if where == "the network" else module
        holder.seen = [{"step": number} for number in range(20_001)]
        return module

    run = train(make, tmp_path, by_default())
    assert run.callback.maps
    assert "probe_order0" not in run.callback.latest


class InPlace(nn.Module):
    """Normalises the images of the batch where they are; its BatchNorm has hardly any statistics yet."""

    def __init__(self):
        super().__init__()
        self.norm, self.net = nn.BatchNorm2d(3, momentum=0.01), ResNet()

    def forward(self, images):
        return self.net(self.norm(images.sub_(0.1).div_(1.1)))


def test_the_images_of_the_batch_are_not_written_to(tmp_path):
    batches = {}

    def same_tensors(folder):
        torch.manual_seed(3)
        batches[folder] = [(torch.rand(8, 3, 16, 24), torch.arange(8) % 2)] * 12
        return DataLoader(batches[folder], batch_size=None)

    plain = train(lambda: Lit(InPlace), tmp_path / "plain", data=lambda: same_tensors("plain"))
    run = train(lambda: Lit(InPlace), tmp_path, by_default(), data=lambda: same_tensors("watched"))
    assert_same(plain, run)
    assert torch.equal(batches["plain"][0][0], batches["watched"][0][0])
    assert "probe_order0" in run.callback.latest
    assert run.callback._state.check._now


class Casts(nn.Module):
    """Computes in bfloat16, whatever it is given."""

    def __init__(self):
        super().__init__()
        self.net = ResNet().bfloat16()

    def forward(self, images):
        return self.net(images.bfloat16()).float()


@pytest.mark.parametrize("asked", [False, True])
def test_a_network_that_casts_by_itself(asked, tmp_path):
    """Passes are in float32: it cannot run in them. That is told only where somebody has asked for the check."""
    flags = {"check": True, "on_error": "warn"} if asked else {"on_error": "raise"}
    callback = NormGradCallback(every_n_steps=1, read_every_n_steps=1, **flags)
    plain = train(lambda: Lit(Casts), tmp_path / "plain")
    run = train(lambda: Lit(Casts), tmp_path, callback)
    assert_same(plain, run)
    told = ["NormGrad cannot do the check: the network casts to half precision by itself."]
    assert run.warned == (told if asked else [])
    assert run.callback.maps
    assert "probe_order0" not in run.callback.latest


def drawing(map_sets, style):
    return Page(map_sets[0].step, scalars={"normgrad/drawn": float(torch.rand(()))})


class Drawing:
    def add(self, batch, style, signal):
        torch.rand(1)

    def page(self, map_sets, style, shown):
        return drawing(map_sets, style) if map_sets else None


@pytest.mark.parametrize("view", [drawing, Drawing])
def test_views_that_draw_random_numbers(view, tmp_path):
    plain = train(Lit, tmp_path / "plain")
    run = train(Lit, tmp_path, by_default(views=[view]))
    assert_same(plain, run)


def spoiling(map_sets, style):
    """Writes into all that it is given, and shows it."""
    for one in map_sets:
        for t in (one.images, *one.maps.values()):
            t.fill_(7.0)
    return drawing(map_sets, style)


class Spoiling(Drawing):
    def add(self, batch, style, signal):
        batch.images.fill_(7.0)
        for maps in (*batch.layers.values(), *batch.focus.values()):
            maps[...] = 7.0

    def page(self, map_sets, style, shown):
        return spoiling(map_sets, style) if map_sets else None


@pytest.mark.parametrize("view", [spoiling, Spoiling])
def test_views_that_write_into_what_they_get(view, tmp_path):
    kept = train(Lit, tmp_path / "kept", by_default(views=["atlas"])).callback
    spoilt = train(Lit, tmp_path, by_default(views=[view, "atlas"])).callback
    assert kept.maps.keys() == spoilt.maps.keys()
    assert all(torch.equal(m, spoilt.maps[layer]) for layer, m in kept.maps.items())
    assert torch.equal(kept.inputs, spoilt.inputs)
    totals = [callback._state.views["atlas"].state_dict() for callback in (kept, spoilt)]
    assert str(totals[0]) == str(totals[1])


@pytest.mark.parametrize("view", [int, lambda map_sets: None, nn.Module, type("Page", (), {"page": None})])
def test_what_cannot_be_a_view_is_told_before_the_first_batch(view):
    with pytest.raises(ValueError, match=r"^`views`: expected names, functions of `\(map_sets, style\)`, objects that"):
        NormGradCallback(views=["atlas", view])


@pytest.mark.parametrize(
    ("place", "doing"),
    [
        ("step.network.NetworkWatch.attach", "beginning the probe"),
        ("step.network.Comparison", "looking for the network"),
        ("step.network.Comparison.result", "running the network on the probe"),
        ("step.default_probe.run_passes", "running the network on the probe"),
        ("step.check.network_pool", "doing the check"),
    ],
)
def test_a_failure_with_the_network_is_one_warning(place, doing, tmp_path, monkeypatch):
    def broken(*_args, **_options):
        raise LookupError("not there")

    plain = train(Lit, tmp_path / "plain")
    monkeypatch.setattr(f"normgrad_lightning.{place}", broken)
    run = train(Lit, tmp_path, NormGradCallback(every_n_steps=1, read_every_n_steps=1))
    assert_same(plain, run)
    assert run.warned == [f"NormGrad failed while {doing}; training continues. LookupError: not there"]
    assert run.callback.maps


class Logs(Lit):
    """Its network is its own forward, which logs."""

    def forward(self, images):
        scores = self.net(images)
        self.log("mean_score", scores.mean(), on_step=False, on_epoch=True)
        return scores

    def loss(self, batch):
        return F.cross_entropy(self(batch[0]), batch[1])


def test_what_the_network_logs_is_not_logged_again(tmp_path):
    """Not by any pass: those that collect the statistics of BatchNorm are passes, too."""
    plain = train(Logs, tmp_path / "plain", max_epochs=2)
    run = train(Logs, tmp_path, by_default(), max_epochs=2)
    assert_same(plain, run)
    assert "probe_order0" in run.callback.latest
    assert run.callback._state.check._now


class Augmented(Mapping):
    """A batch that makes its images when they are read."""

    def __init__(self, samples):
        images, labels = zip(*samples, strict=True)
        self.data = {"images": torch.stack(images), "labels": torch.stack(labels)}

    def __getitem__(self, key):
        value = self.data[key]
        return value + torch.randn_like(value) if key == "images" else value

    def __iter__(self):
        return iter(self.data)

    def __len__(self):
        return len(self.data)


class ReadOnce(Augmented):
    def __getitem__(self, key):
        return self.data.pop(key)


class Drawn(list):
    """Draws a number whenever it is read as a whole."""

    def __iter__(self):
        torch.rand(())
        return super().__iter__()


class OfMappings(Lit):
    def loss(self, batch):
        return super().loss((batch["images"], batch["labels"]))

    def transfer_batch_to_device(self, batch, *_):
        return batch


class OfList(OfMappings):
    def loss(self, batch):
        return Lit.loss(self, (batch[0], batch[1]))


@pytest.mark.parametrize(
    ("module", "collate"),
    [(OfMappings, Augmented), (OfMappings, ReadOnce), (OfList, lambda samples: Drawn(default_collate(samples)))],
)
def test_a_batch_that_changes_when_it_is_read(module, collate, tmp_path):
    off = NormGradCallback(enabled=False)  # without any, the batches would be copied, and so read
    plain = train(module, tmp_path / "plain", off, data=lambda: loader(collate_fn=collate))
    run = train(module, tmp_path, by_default(), data=lambda: loader(collate_fn=collate))
    assert_same(plain, run)
    assert not run.warned
    assert run.callback.maps


class Raises(TensorDataset):
    @property
    def classes(self):
        raise ValueError("not downloaded yet")


class Draws(TensorDataset):
    @property
    def classes(self):
        return ["a", "b", str(torch.rand(()))]

    @property
    def transform(self):
        return torch.rand(())


class NoNumber(Lit):
    @property
    def num_classes(self):
        raise ValueError("call `setup` first")

    def __getattr__(self, name):
        if name.startswith("normgrad"):
            torch.rand(())
        return super().__getattr__(name)


@pytest.mark.parametrize("kind", [Raises, Draws])
@pytest.mark.parametrize("flags", [{}, {"classes": [*"abcde"]}])
def test_attributes_that_raise_or_draw(kind, flags, tmp_path):
    def data():
        return DataLoader(kind(*batch(24)), 4, shuffle=True)

    plain = train(NoNumber, tmp_path / "plain", data=data)
    run = train(NoNumber, tmp_path, NormGradCallback(every_n_steps=1, **flags), data=data)
    assert_same(plain, run)
    assert len(run.warned) == (kind is Raises or bool(flags))
    assert run.callback.maps


def test_an_error_of_the_users_is_not_taken_for_one_of_ours():
    messenger = Messenger("warn")
    with pytest.warns(UserWarning, match="ValueError"), messenger.guard("looking", reraise=(ValueError,)):
        int("user's")  # as code of theirs would
    with pytest.raises(ValueError, match="matches none"), messenger.guard("looking", reraise=(ValueError,)):
        select_layers(nn.Sequential(), "a")


class TrainsOnly(ResNet):
    def forward(self, images):
        if not self.training:
            raise RuntimeError("this network is for training")
        return super().forward(images)


class AsksForGradients(ResNet):
    def forward(self, images):
        images = images.detach().requires_grad_()
        (slope,) = torch.autograd.grad(super().forward(images).square().sum(), images, create_graph=True)
        return super().forward(images + 0.1 * slope)


class HasTensorHook(ResNet):
    def forward(self, images):
        scores = super().forward(images)
        scores.register_hook(lambda gradient: gradient * 2)
        return scores


class WritesBackward(ResNet):
    """Autograd finds out only on its way back."""

    def forward(self, images):
        scores = super().forward(images)
        if not self.training:
            squares = scores.exp()
            scores, _ = squares.log(), squares.zero_()
        return scores


@pytest.mark.parametrize("network", [TrainsOnly, AsksForGradients, HasTensorHook, WritesBackward])
def test_a_network_that_cannot_run_alone_is_no_reason_for_a_warning(network, tmp_path):
    plain = train(lambda: Lit(network), tmp_path / "plain")
    run = train(lambda: Lit(network), tmp_path, NormGradCallback(every_n_steps=1, read_every_n_steps=1))
    assert_same(plain, run)
    assert not run.warned
    assert run.callback.maps


def test_why_a_check_that_was_asked_for_cannot_be(tmp_path):
    flags = {"every_n_steps": 1, "read_every_n_steps": 1, "check": True}
    run = train(lambda: Lit(TrainsOnly), tmp_path, NormGradCallback(**flags))
    why = "the network does not run alone in eval mode: RuntimeError (this network is for training)."
    assert run.warned == [f"NormGrad cannot do the check: {why}"]


class Keeps(ResNet):
    """Has something that each call changes, and that no pass could put back.

    Args:
        what: is kept.
        call: changes it.
    """

    def __init__(self, what, call):
        super().__init__()
        self.what, self.call = what, call

    def forward(self, images):
        self.call(self.what)
        return super().forward(images)


class Bank(Dataset):
    def __init__(self):
        self.items = []


class Counter:
    calls = 0


def one_more(counter):
    counter.calls += 1


def one_more_behind(reference):
    one_more(reference())


def one_more_number(number):
    number.value += 1


def doubled(t):
    with torch.inference_mode():
        t.mul_(2)


def cached(_):
    @lru_cache
    def drawn(size):
        return torch.rand(size)

    return drawn


COUNTER = Counter()


def ones_without_graph():
    with torch.inference_mode():
        return torch.ones(1)


KEPT = {
    "a data set": (Bank, lambda bank: bank.items.append(1), lambda bank: len(bank.items)),
    "a weak reference": (lambda: weakref.ref(COUNTER), one_more_behind, lambda reference: reference().calls),
    "memory of C": (lambda: ctypes.c_long(0), one_more_number, lambda number: number.value),
    "a sparse tensor": (lambda: torch.eye(2).to_sparse(), lambda t: t.mul_(2), lambda t: t.to_dense()),
    "a tensor of inference mode": (ones_without_graph, doubled, lambda t: t.clone()),
    "a cache": (lambda: cached(None), lambda cache: cache(2), lambda cache: cache(2)),
}


@pytest.mark.parametrize("what", KEPT)
def test_a_network_that_holds_what_cannot_be_put_back(what, tmp_path):
    make, call, read = KEPT[what]
    left = []
    for name, callback in (("plain", None), ("watched", by_default())):
        COUNTER.calls = 0
        run = train(lambda: Lit(lambda: Keeps(make(), call)), tmp_path / name, callback)
        left.append((run, read(run.module.net.what)))
    (plain, without), (run, watched) = left
    assert_same(plain, run)
    assert same(without, watched)
    assert "probe_order0" not in run.callback.latest
    assert not run.warned


class OnAllModules(pl.Callback):
    def on_fit_start(self, trainer, module):
        self.counts = Counts()
        self.handle = nn.modules.module.register_module_forward_hook(self.hook)

    def on_fit_end(self, trainer, module):
        self.handle.remove()

    def hook(self, layer, args, output):
        return self.counts(output) if isinstance(layer, nn.Conv2d) else None


def test_a_hook_on_all_modules(tmp_path):
    plain = train(Lit, tmp_path / "plain", callbacks=lambda: [OnAllModules()])
    run = train(Lit, tmp_path, by_default(), callbacks=lambda: [OnAllModules()])
    assert_same(plain, run)
    assert "probe_order0" not in run.callback.latest


class CopiedByNobody(np.ndarray):
    def copy(self, *_):
        raise AssertionError("the array was copied")


def test_a_large_array_is_not_copied(tmp_path):
    def make():
        module = Lit()
        module.net.table = np.zeros(2**27, np.uint8).view(CopiedByNobody)
        return module

    run = train(make, tmp_path, by_default())
    assert run.callback.maps
    assert "probe_order0" not in run.callback.latest


def test_ordinary_modules_are_not_left_alone():
    class Ordinary(Lit):
        def __init__(self):
            super().__init__(lambda: torchvision.models.VisionTransformer(16, 8, 1, 2, 8, 8))
            self.metrics = torchmetrics.MetricCollection({"f": torchmetrics.F1Score("multiclass", num_classes=3)})
            self.config = SimpleNamespace(act=partial(F.gelu, approximate="tanh"), mode=Color.RED, rate=np.float32(0.1))
            self.told = logging.getLogger("mine")
            self.save_hyperparameters({"lr": 0.1})

    assert _leaves_no_trace(torchvision.models.resnet18())
    assert _leaves_no_trace(Ordinary())


class Color(enum.Enum):
    RED = 1


class Equal(nn.Conv2d):
    """A layer that is equal to any other."""

    def __eq__(self, other):
        return isinstance(other, nn.Conv2d)

    def __hash__(self):
        return 7


def test_layers_that_are_equal_are_several():
    model = nn.Sequential(Equal(3, 3, 1), nn.ReLU(), Equal(3, 3, 1))
    assert select_layers(model, ["0", "2"]) == ["0", "2"]
    assert list(order0_maps(model, lambda net, images: net(images).sum(), torch.rand(2, 3, 4, 4), ["0", "2"])) == [
        "0",
        "2",
    ]
    assert len(PythonState(model).parameters) == 4


class GivesProbabilities(ResNet):
    def forward(self, images):
        scores = super().forward(images)
        return scores if self.training else scores.softmax(1)


def test_a_network_that_gives_probabilities_in_eval_mode(tmp_path):
    """The check runs it in eval mode. The probe leaves a module's own mode alone if it has children."""
    run = train(lambda: Lit(GivesProbabilities), tmp_path, by_default())
    assert run.callback.maps
    measured = run.callback._state.check._now.values()
    assert not any(tally.n for one in measured for tally in one.tallies.values())


class DrawsInFunctions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        torch.randint(9, ())
        return function(*args, **(kwargs or {}))


class DrawsInKernels(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        torch.randint(9, ())
        return function(*args, **(kwargs or {}))


class UnderModes(Lit):
    """Its own modes draw a number for each operation, on the way forward and back."""

    def __init__(self, mode):
        super().__init__()
        self.mode, self.automatic_optimization = mode, False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        with self.mode():
            loss = self.loss(batch)
            self.manual_backward(loss)
        optimizer.step()
        self.keep(loss)


@pytest.mark.parametrize("mode", [DrawsInFunctions, DrawsInKernels])
def test_modes_see_no_operations_of_hooks(mode, tmp_path):
    plain = train(lambda: UnderModes(mode), tmp_path / "plain", NormGradCallback(enabled=False))
    run = train(lambda: UnderModes(mode), tmp_path, by_default())
    assert_same(plain, run)
    assert run.callback.maps


class EmptyAtTimes(Lit):
    def loss(self, batch):
        count = len(batch[0]) * (len(self.losses) % 2)
        return self.net(batch[0][:count]).square().sum()


def test_an_empty_batch_is_called_so(tmp_path):
    def make():
        return EmptyAtTimes(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten()))

    plain = train(make, tmp_path / "plain")
    run = train(make, tmp_path, NormGradCallback(every_n_steps=1, views=["curves"]))
    assert_same(plain, run)
    assert run.warned == ["NormGrad has no maps of a step whose batch is empty."]
