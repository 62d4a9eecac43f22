"""Maps per second at five layers and at one: ours, and the Grad-CAM of other tools, for the same images and labels.

    pip install grad-cam captum torchcam
    python tests/benchmarks/peers.py

Each tool is used as its documentation says, with all images in one batch: pytorch-grad-cam averages the layers of one
call, so it is called for each of them (and, in a row of its own, once for their average); Captum takes one layer at a
time; torchcam takes them all at once. What they make for a call (hooks, objects) takes them less than a millisecond,
and counts for all. The network is in eval mode, and its weights ask for gradients, as after training.

In training, only what the callback adds to a step counts: the gradients are there anyway. It reads the same number of
images there (`images="first"`, without patches, atlas and curves). Tools that are not installed are left out.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from importlib import import_module, metadata
from typing import Any, NamedTuple

import torch
from harness import Figures, judged, parser, quartiles, ratio, run, spread, table, take_turns
from torch import Tensor, nn
from training import FIVE_LAYERS, NETWORKS, Lit, Turns, batch_of, loss_fn, train, watching

from normgrad_lightning import NormGrad, order0_maps

Batch = tuple[Tensor, Tensor]
Maps = list[Any]
"""The maps of all images, layer by layer."""

NETWORK = "ResNet-18"
LAYERS = {"five": FIVE_LAYERS[NETWORK], "one": FIVE_LAYERS[NETWORK][-1:]}
BASE = "`order0_maps`"
FASTER_THAN_PEERS = 1
CHEAPER_IN_TRAINING = 20


def of_order0_maps(net: nn.Module, batch: Batch, layers: list[str]) -> Maps:
    """Ours, in a pass of its own."""
    return list(order0_maps(net, loss_fn, batch, layers).values())


def of_plain_loop(net: nn.Module, batch: Batch, layers: list[str]) -> Maps:
    """Ours, from a forward and backward pass that also computes the gradients of all weights, as training does."""
    with NormGrad(net, layers) as recorder:
        net.zero_grad()
        loss_fn(net, batch).backward()
    return list(recorder.maps.values())


def of_grad_cam(net: nn.Module, batch: Batch, layers: list[str]) -> Maps:
    """Those of pytorch-grad-cam, a call for each layer."""
    return [averaged for layer in layers for averaged in of_grad_cam_averaged(net, batch, [layer])]


def of_grad_cam_averaged(net: nn.Module, batch: Batch, layers: list[str]) -> Maps:
    """One map for each image: what pytorch-grad-cam makes of several layers."""
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    targets = [ClassifierOutputTarget(label) for label in batch[1].tolist()]
    with GradCAM(model=net, target_layers=[net.get_submodule(layer) for layer in layers]) as cam:
        return [torch.from_numpy(cam(input_tensor=batch[0], targets=targets))]


def of_captum(net: nn.Module, batch: Batch, layers: list[str]) -> Maps:
    """Those of Captum, which takes one layer at a time."""
    from captum.attr import LayerGradCam

    attributions = (
        LayerGradCam(net, net.get_submodule(layer)).attribute(batch[0], target=batch[1]) for layer in layers
    )
    return [attribution.detach().squeeze(1) for attribution in attributions]


def of_torchcam(net: nn.Module, batch: Batch, layers: list[str]) -> Maps:
    """Those of torchcam, which takes all layers at once."""
    from torchcam.methods import GradCAM

    with GradCAM(net, target_layer=layers) as extractor:
        return extractor(class_idx=batch[1].tolist(), scores=net(batch[0]))


class Tool(NamedTuple):
    """A way to get maps.

    Attributes:
        package: what is to be installed.
        module: what is to be imported.
        maps: what is measured.
        averages: whether it gives one map for all layers; at one layer there is nothing to average.
    """

    package: str
    module: str
    maps: Callable[[nn.Module, Batch, list[str]], Maps]
    averages: bool = False

    @property
    def is_ours(self) -> bool:
        """Whether it is no peer."""
        return self.package == OURS

    @property
    def counts(self) -> dict[str, int]:
        """At how many layers it is measured, and how many maps it gives there for an image."""
        return {"five": 1} if self.averages else {many: len(layers) for many, layers in LAYERS.items()}

    @property
    def version(self) -> str | None:
        """The version of its package; None if that cannot be imported."""
        try:
            import_module(self.module)
            return metadata.version(self.package)
        except ImportError:
            return None


OURS = "normgrad-lightning"
TOOLS = {
    BASE: Tool(OURS, "normgrad_lightning", of_order0_maps),
    "`NormGrad` in a plain loop, whole passes": Tool(OURS, "normgrad_lightning", of_plain_loop),
    "pytorch-grad-cam, a call for each layer": Tool("grad-cam", "pytorch_grad_cam", of_grad_cam),
    "pytorch-grad-cam, layers averaged": Tool("grad-cam", "pytorch_grad_cam", of_grad_cam_averaged, averages=True),
    "Captum, `LayerGradCam`": Tool("captum", "captum", of_captum),
    "torchcam, `GradCAM`": Tool("torchcam", "torchcam", of_torchcam),
}
IN_TRAINING = "the callback in training, what it adds"


def measure(args: argparse.Namespace) -> Figures:
    """The figures of each tool, in passes of its own and in training."""
    packages = {tool.package: tool.version for tool in TOOLS.values()}
    tools = {name: tool for name, tool in TOOLS.items() if packages[tool.package] is not None}
    alone, training = measure_alone(tools, args), measure_training(args)
    return {"packages": packages, "alone": alone, "training": training, "in_training": compared(alone, training)}


def measure_alone(tools: dict[str, Tool], args: argparse.Namespace) -> Figures:
    """Maps per second of each tool, and its time divided by that of `order0_maps` beside it."""
    net, batch = NETWORKS[NETWORK](args.pixels).eval(), batch_of(args.images, args.pixels)
    variants = {}
    for name, tool in tools.items():
        check(tool, net, batch)
        for many in tool.counts:
            variants[f"{name}, {many}"] = partial(tool.maps, net, batch, LAYERS[many])
    times = take_turns(variants, args.rounds)
    return {
        name: {
            many: with_rate(ratio(times, f"{name}, {many}", f"{BASE}, {many}"), args.images * count)
            for many, count in tool.counts.items()
        }
        for name, tool in tools.items()
    }


def check(tool: Tool, net: nn.Module, batch: Batch) -> None:
    """Assert that there is a map for each image and layer, on the layer's grid or the image's, and no hook is left."""
    five, one = (tool.maps(net, batch, layers) for layers in LAYERS.values())
    grids = [m.shape for m in of_order0_maps(net, batch, LAYERS["five"])]
    whole = torch.Size([len(batch[0]), *batch[0].shape[2:]])
    assert len(five) == tool.counts["five"]
    assert all(m.shape in (grid, whole) for m, grid in zip(five, grids, strict=False))
    assert all(m.isfinite().all() for m in five)
    assert any(m.any() for m in five)
    assert len(one) == 1
    assert tool.averages or torch.allclose(one[0], five[-1], rtol=1e-3, atol=1e-6)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def measure_training(args: argparse.Namespace) -> Figures:
    """Maps per second of the training thread's time that the callback takes, with an event on every step.

    With flags for which it reads as many images as the others get, and nothing else: by default it reads the whole
    batch, and a probe and the check run the network.
    """
    few: dict[str, Any] = {"num_images": args.images, "images": "first", "views": ["overview", "panels"]}
    few |= {"check": False, "probe": False}
    callbacks = {many: watching(layers=[f"net.{layer}" for layer in layers], **few) for many, layers in LAYERS.items()}
    turns = Turns(callbacks, args.rounds)
    train(Lit(NETWORKS[NETWORK](args.pixels)), batch_of(args.batch_size, args.pixels), turns)
    figures = {}
    for many, callback in callbacks.items():
        maps = list(callback.maps.values())
        assert [len(m) for m in maps] == [args.images] * len(LAYERS[many])
        assert all(m.isfinite().all() and m.any() for m in maps)
        seconds = turns.seconds_of_ours[many]
        figure = {"seconds": statistics.median(seconds), "ms": quartiles([1e3 * s for s in seconds])}
        figures[many] = with_rate(figure, args.images * len(maps))
    return figures


def with_rate(figure: Figures, count: int) -> Figures:
    """The figure of a call that gives `count` maps, with what that is per second and per map."""
    seconds = figure["seconds"]
    return {**figure, "maps": count, "maps_per_second": count / seconds, "ms_per_map": 1e3 * seconds / count}


def compared(alone: Figures, training: Figures) -> Figures | None:
    """How many times less a map costs in training than with the fastest of the others; None if there are none."""
    costs = {name: of["five"]["ms_per_map"] for name, of in alone.items() if not TOOLS[name].is_ours}
    if not costs:
        return None
    fastest = min(costs, key=lambda name: costs[name])
    return {"fastest": fastest, "factor": costs[fastest] / training["five"]["ms_per_map"]}


def show(figures: Figures) -> str:
    """The table, and a line about training."""
    packages, settings = figures["packages"], figures["settings"]
    rows = [[f"{IN_TRAINING} ({OURS} {packages[OURS]})", *cells(figures["training"], None)]]
    for name, of in figures["alone"].items():
        tool = TOOLS[name]
        at_least = None if tool.is_ours else FASTER_THAN_PEERS
        rows.append([f"{name} ({tool.package} {packages[tool.package]})", *cells(of, at_least)])
    header = ["", "maps/s at five layers", f"time ÷ {BASE}", "maps/s at one layer", f"time ÷ {BASE}"]
    set_up = (
        f"{NETWORK}, {settings['images']} images of {settings['pixels']} px, {settings['rounds']} rounds; "
        f"in training, of a batch of {settings['batch_size']}"
    )
    missing = [package for package, version in packages.items() if version is None]
    return "\n\n".join(
        [
            f"Maps per second, and the time of all calls ÷ that of {BASE}, medians and quartiles ({set_up}):",
            table(header, rows),
            f"Time of each of the other tools, at least: {FASTER_THAN_PEERS}.",
            about_training(figures),
            *([f"Not installed, so not measured: {', '.join(missing)}."] if missing else []),
        ]
    )


def cells(of: Figures, at_least: float | None) -> list[str]:
    """Rates and ratios of one tool, at five layers and at one."""
    texts = []
    for figure in map(of.get, LAYERS):
        texts.append("–" if figure is None else f"{figure['maps_per_second']:.0f}")
        in_turns = figure is not None and "median" in figure
        texts.append(judged_from(spread(figure), figure["median"], at_least) if in_turns else "–")
    return texts


def judged_from(text: str, value: float, at_least: float | None) -> str:
    """The text; with a mark, if the value is below what it is to be at least."""
    return text if at_least is None else judged(text, -value, -at_least)


def about_training(figures: Figures) -> str:
    """What a map costs in training, and with the fastest of the others."""
    ours, comparison = figures["training"]["five"], figures["in_training"]
    text = f"In training, five layers cost {spread(ours['ms'], 1)} ms an event, {ours['ms_per_map']:.2f} ms a map"
    if comparison is None:
        return f"{text}; there is no other tool to compare with."
    fastest, times = comparison["fastest"], comparison["factor"]
    theirs = f"{figures['alone'][fastest]['five']['ms_per_map']:.2f} ms a map with the fastest other, {fastest}"
    factor = judged_from(f"{times:.1f}", times, CHEAPER_IN_TRAINING)
    return f"{text}; {theirs}. Factor: {factor}, at least {CHEAPER_IN_TRAINING}."


def main() -> None:
    """Measure, and print the table."""
    options = parser(__doc__ or "", rounds=15, pixels=224, images=8, batch_size=32)
    run(__file__, options, measure, show, pixels=64, images=2, batch_size=4)


if __name__ == "__main__":
    main()
