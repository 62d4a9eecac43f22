"""Whatever the network is built of: the same bits with the callback and without, and the right maps."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from networks import ResNet, batch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from twice import LAYERS, Lit, row, train, twice, watching


def smooth():
    return ResNet(dropout=0.3, smooth=True)


class WholeCompiled(Lit):
    """What `torch.compile(module)` gives is no LightningModule, so the class compiles what it makes."""

    def __new__(cls):
        return torch.compile(Lit(), backend="aot_eager")


class NetCompiled(Lit):
    backend = "aot_eager"

    def __init__(self):
        super().__init__()
        self.net = torch.compile(self.net, backend=self.backend, fullgraph=True)


class NetByInductor(NetCompiled):
    backend = "inductor"


class CompiledInPlace(Lit):
    def __init__(self):
        super().__init__()
        self.net.compile(backend="aot_eager", fullgraph=True)


class PartCompiled(Lit):
    def __init__(self):
        super().__init__()
        self.net.stage2 = torch.compile(self.net.stage2, backend="aot_eager", fullgraph=True)


class CompiledMethod(Lit):
    @torch.compile(backend="aot_eager")
    def loss(self, batch):
        return super().loss(batch)


@torch.compile(backend="aot_eager", fullgraph=True)
def compiled_loss(net, images, labels):
    return F.cross_entropy(net(images), labels)


class CompiledFunction(Lit):
    def loss(self, batch):
        return compiled_loss(self.net, *batch)


def compiled_twice(folder, make, **options):
    """Train twice, each time with nothing compiled before; no more and no other code is compiled with the callback."""
    after = []

    def fresh():
        torch._dynamo.reset()
        counters.clear()
        return make()

    def run(trainer, module, data):
        trainer.fit(module, data)
        after.append({kind: dict(counters[kind]) for kind in ("stats", "graph_break", "recompile_limit")})

    runs = twice(folder, fresh, eager=Lit, run=run, **options)
    assert after[0]["stats"]["unique_graphs"] >= 1
    return *runs, after


COMPILED = {
    "the whole LightningModule": WholeCompiled,
    "the network": NetCompiled,
    "in place": CompiledInPlace,
    "a part": PartCompiled,
    "a method": CompiledMethod,
}
QUICK = ("the whole LightningModule", "the network", "a part")


@row(
    "Graph",
    "`torch.compile` of the whole LightningModule, of the network (also `fullgraph=True`), in place, of a part, of a "
    "method",
    "read in an eager pass of its own for each event, so nothing more is compiled and no graph breaks; named layers "
    "outside of compiled parts take no pass",
)
@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=() if what in QUICK else pytest.mark.slow) for what in COMPILED]
)
def test_compiled(tmp_path, what):
    *_, (plain, watched) = compiled_twice(tmp_path, COMPILED[what])
    assert plain == watched


@row("Graph", '`torch.compile(backend="inductor")`')
@pytest.mark.slow
def test_compiled_by_inductor(tmp_path):
    *_, (plain, watched) = compiled_twice(tmp_path, NetByInductor)
    assert plain == watched
    assert watched["graph_break"] == {}


@row(
    "Graph",
    "a compiled function that calls the network",
    "maps from the second event on; it is compiled once more, as hooks come and go at the first",
)
def test_a_compiled_function(tmp_path):
    *_, (plain, watched) = compiled_twice(tmp_path, CompiledFunction, steps=[1, 2, 3, 4, 5])
    assert watched["stats"]["unique_graphs"] <= plain["stats"]["unique_graphs"] + 1
    assert watched["graph_break"] == {}


CALLS = []  # where passes put nothing back


@pytest.mark.parametrize(("layers", "passes"), [(LAYERS, 0), ("net.stage*", 0), ("auto", 6), ("net.stage?.conv1", 6)])
def test_a_pass_is_taken_only_for_layers_inside_of_compiled_parts(tmp_path, layers, passes):
    CALLS.clear()

    class Counted(PartCompiled):
        def loss(self, batch):
            CALLS.append(1)
            return super().loss(batch)

    train(Counted, tmp_path, watching(layers=layers, order1_every_n_steps=None))
    tries = 2 if passes else 0  # whether the loss can be computed again
    assert len(CALLS) == 6 + passes + tries


class Checkpointed(ResNet):
    """Computes two of its stages again in the backward pass."""

    def __init__(self, reentrant):
        super().__init__(smooth=True)
        self.reentrant = reentrant

    def forward(self, x):
        x = self.stem(x)
        for stage in (self.stage1, self.stage2):
            x = stage(x) if self.reentrant is None else checkpoint(stage, x, use_reentrant=self.reentrant)
        return self.fc(self.pool(self.stage3(x)).flatten(1))


@row("Graph", "activation checkpointing, reentrant and not")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed(tmp_path, reentrant):
    twice(
        tmp_path,
        lambda: Lit(lambda: Checkpointed(reentrant)),
        eager=lambda: Lit(lambda: Checkpointed(None)),
        layers=LAYERS,
    )


class Shared(nn.Module):
    """One stage, used twice on one grid."""

    def __init__(self):
        super().__init__()
        self.stem, self.again = nn.Conv2d(3, 6, 3, 1, 1), nn.Conv2d(6, 6, 3, 1, 1)
        self.down, self.fc = nn.Conv2d(6, 8, 3, 2, 1), nn.Linear(8, 5)

    def forward(self, x):
        x = F.softplus(self.again(F.softplus(self.again(F.softplus(self.stem(x))))))
        return self.fc(F.softplus(self.down(x)).mean((2, 3)))


@row("Graph", "a module that is used twice", "the sum over its uses")
def test_shared(tmp_path):
    layers = ["net.again", "net.down"]
    twice(tmp_path, lambda: Lit(Shared), flags={"layers": layers}, layers=layers)


@dataclass
class Features:
    name: str
    value: Tensor


WRAPPED = {
    "a tuple": (lambda t: (None, t), lambda o: o[1]),
    "a dict": (lambda t: {"loss": t.new_zeros(()), "out": t}, lambda o: o["out"]),
    "a dataclass": (lambda t: Features("a", t), lambda o: o.value),
}


class Handing(nn.Module):
    """A stage that hands on its features in something."""

    def __init__(self, stage, wrap):
        super().__init__()
        self.stage, self.wrap = stage, wrap

    def forward(self, x):
        return self.wrap(self.stage(x))


class Wrapped(ResNet):
    """A network whose stages hand on their features in tuples, dicts or dataclasses."""

    def __init__(self, wrap, unwrap):
        super().__init__(smooth=True)
        self.unwrap = unwrap
        self.stage1, self.stage2, self.stage3 = (Handing(s, wrap) for s in (self.stage1, self.stage2, self.stage3))

    def forward(self, x):
        x = self.stem(x)
        for stage in (self.stage1, self.stage2, self.stage3):
            x = self.unwrap(stage(x))
        return self.fc(self.pool(x).flatten(1))


@row(
    "Graph",
    "layers that give tuples, dicts or dataclasses",
    "their first tensor on a grid; auto, if it is the only one",
)
@pytest.mark.parametrize("kind", WRAPPED)
@pytest.mark.parametrize("layers", ["auto", "net.stage?"])
def test_wrapped_outputs(tmp_path, kind, layers):
    twice(
        tmp_path,
        lambda: Lit(lambda: Wrapped(*WRAPPED[kind])),
        eager=lambda: Lit(lambda: Wrapped(lambda t: t, lambda t: t)),
        flags={"layers": layers},
    )


class ChannelsLast(Lit):
    def __init__(self):
        super().__init__()
        self.net.to(memory_format=torch.channels_last)

    def loss(self, batch):
        return super().loss((batch[0].to(memory_format=torch.channels_last), batch[1]))


@row("Graph", "`channels_last` memory format")
def test_channels_last(tmp_path):
    twice(tmp_path, ChannelsLast)


class Frozen(Lit):
    def __init__(self):
        super().__init__()
        self.net.stem.requires_grad_(False)
        self.net.stage1.requires_grad_(False)


@row(
    "Graph",
    "a frozen backbone",
    "auto takes the layers above; a frozen layer that you name gets one warning, and has maps of order 1 only",
)
@pytest.mark.parametrize("layers", ["auto", "net.stage*"])
def test_a_frozen_backbone(tmp_path, layers):
    _, watched = twice(
        tmp_path,
        Frozen,
        flags={"layers": layers, "on_error": "warn"},
        layers=LAYERS[1:],
        order1_layers=LAYERS[1:] if layers == "auto" else LAYERS,
    )
    frozen = "NormGrad cannot read the layer 'net.stage1': it gets no gradient: it and all layers before it are frozen"
    assert [told[: len(frozen)] for told in watched.warned] == ([] if layers == "auto" else [frozen])


def normed(kind):
    def make():
        net = smooth()
        for m in list(net.modules()):
            if isinstance(m, nn.Conv2d | nn.Linear):
                kind(m)
        return net

    return make


@row("Graph", "`weight_norm` and `spectral_norm`, the parametrisations")
@pytest.mark.parametrize("kind", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrised_weights(tmp_path, kind):
    twice(tmp_path, lambda: Lit(normed(kind)))


class MadeLate(Lit):
    """Makes its network in `configure_model`, and exchanges a part of it there."""

    def __init__(self):
        super().__init__(lambda: None)

    def configure_model(self):
        if self.net is None:
            torch.manual_seed(0)
            self.net = smooth()
            self.net.stage2 = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.Softplus())


@row("Graph", "modules made or swapped in `configure_model`")
def test_made_in_configure_model(tmp_path):
    twice(tmp_path, MadeLate, layers=["net.stage1", "net.stage2.1", "net.stage3"])


class LoRA(nn.Module):
    """A frozen layer, and a thin path beside it that learns."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Conv2d(base.in_channels, 2, 1, base.stride, bias=False)
        self.up = nn.Conv2d(2, base.out_channels, 1, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapted():
    net = smooth().requires_grad_(False)
    for stage in (net.stage1, net.stage2, net.stage3):
        stage.conv1 = LoRA(stage.conv1)
    net.fc.requires_grad_(True)
    return net


@row("Graph", "LoRA-like wrappers around frozen layers")
def test_lora(tmp_path):
    twice(tmp_path, lambda: Lit(adapted))


class Signal(nn.Module):
    """Convolutions on one axis, two or three."""

    def __init__(self, axes, channels):
        super().__init__()
        conv, norm = getattr(nn, f"Conv{axes}d"), getattr(nn, f"BatchNorm{axes}d")
        self.stem = nn.Sequential(conv(channels, 6, 3, 1, 1), norm(6), nn.Softplus())
        self.down = nn.Sequential(conv(6, 8, 3, 2, 1), norm(8), nn.Softplus())
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        return self.fc(self.down(self.stem(x)).flatten(2).mean(2))


def signals(channels, *size):
    def data():
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(24, channels, *size, generator=generator)
        return DataLoader(TensorDataset(images, batch(24)[1]), batch_size=4, shuffle=True)

    return data


INPUTS = {"audio": (2, 40), "video": (3, 4, 8, 10), "a scan": (1, 6, 8, 10)}


@row(
    "Graph",
    "1-d convolutions (audio) and 3-d ones (video, scans)",
    "maps have the signal's axes; drawn as a strip, and as the central slice",
)
@pytest.mark.parametrize("kind", INPUTS)
def test_other_dimensions(tmp_path, kind):
    channels, *size = INPUTS[kind]
    _, watched = twice(
        tmp_path,
        lambda: Lit(lambda: Signal(len(size), channels)),
        data=signals(channels, *size),
        layers=["net.stem.2", "net.down.2"],
    )
    assert watched.callback.maps["net.stem.2"].shape == (2, *size)


@row("Graph", "greyscale images, and images with 10 channels", "shown in grey: of several channels, their mean")
@pytest.mark.parametrize("channels", [1, 10])
def test_other_channels(tmp_path, channels):
    twice(
        tmp_path,
        lambda: Lit(lambda: ResNet(channels=channels, smooth=True)),
        data=signals(channels, 16, 24),
    )
