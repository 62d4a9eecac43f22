"""What order-1 maps cost, in plain forward-backward passes of the same images, and in copies of the parameters.

    python tests/benchmarks/order1.py

Per batch, the unit is one forward-backward of the whole batch; per image, as many forward-backwards of one image each.
The unit is what training does, in train mode; with `--eval`, the same in eval mode, as the passes run: it is cheaper.

"Naive" is the paper's recipe as one would write it down: four full forward-backward passes on the model itself, whose
weights are changed in place and loaded back at the end. It gives the same maps.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
from harness import Figures, judged, parser, peak_bytes, ratio, run, spread, table, take_turns
from torch import Tensor, nn
from training import FIVE_LAYERS, NETWORKS, batch_of, loss_fn

from normgrad_lightning.isolated.batches import single_images
from normgrad_lightning.isolated.inner_step import DIFFERENCE, InnerStep
from normgrad_lightning.isolated.order1 import run_passes
from normgrad_lightning.layers.options import ReadOptions
from normgrad_lightning.maps import EPSILON

Batch = tuple[Tensor, Tensor]
MODELS = ("ResNet-18", "MobileNet-V3")
LIMITS = {"batch, 4 passes": 3.5, "batch, 2 passes": 2.2, "image, 4 passes": 4.2, "image, 2 passes": 2.2}
NAMES = {
    "batch, 4 passes": "`per_image=False`",
    "batch, 2 passes": "`per_image=False, second_order=False`",
    "batch, 7 passes": "`per_image=False`, order 1 and adversarial",
    "batch, naive": "the batch, naive",
    "image, 4 passes": "`per_image=True`",
    "image, 2 passes": "`per_image=True, second_order=False`",
    "image, 7 passes": "`per_image=True`, order 1 and adversarial, or contrast, which needs both",
    "image, naive": "image by image, naive",
}


def forward_backward(model: nn.Module, batches: list[Batch]) -> None:
    """What training does with the batches, but for the update."""
    for batch in batches:
        model.zero_grad()
        loss_fn(model, batch).backward()


def passes(model: nn.Module, batches: list[Batch], layers: list[str], **options: bool) -> dict[str, Tensor]:
    """Order-1 maps of the batches; with `both`, adversarial ones, too."""
    kinds = ["order1", "adversarial"] if options.pop("both", False) else ["order1"]
    return run_passes(model, loss_fn, batches, layers, kinds, InnerStep(**options), ReadOptions()).maps["order1"]


def naive(model: nn.Module, batches: list[Batch], layers: list[str]) -> dict[str, Tensor]:
    """The same maps, in the plain way."""
    was_training = model.training
    model.eval()
    maps = [naive_maps(model, batch, layers) for batch in batches]
    model.train(was_training)
    return {name: torch.cat([of[name] for of in maps]) for name in layers}


def naive_maps(model: nn.Module, batch: Batch, layers: list[str]) -> dict[str, Tensor]:
    """Of one batch: four full passes, and the weights moved in between."""
    before = copy.deepcopy(model.state_dict())
    _, gradient = full_pass(model, batch, layers)
    move(model, gradient, -EPSILON)
    seen, v = full_pass(model, batch, layers)
    h = DIFFERENCE / float(torch.cat([g.flatten() for g in v]).norm())
    model.load_state_dict(before)
    move(model, v, h)
    plus, _ = full_pass(model, batch, layers)
    model.load_state_dict(before)
    move(model, v, -h)
    minus, _ = full_pass(model, batch, layers)
    model.load_state_dict(before)
    maps = {}
    for name, (x, g) in seen.items():
        corrected = g - EPSILON / (2 * h) * (plus[name][1] - minus[name][1])
        maps[name] = x.norm(dim=1) * corrected.norm(dim=1)
    return maps


def full_pass(model: nn.Module, batch: Batch, layers: list[str]) -> tuple[dict[str, Any], list[Tensor]]:
    """What the layers saw in a forward-backward, and the gradient of all weights."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            outputs[name] = output.clone()  # the next layer may work in place
            outputs[name].retain_grad()
            return outputs[name].clone()

        return hook

    handles = [model.get_submodule(name).register_forward_hook(keep(name)) for name in layers]
    forward_backward(model, [batch])
    for handle in handles:
        handle.remove()
    seen = {name: (output.detach(), output.grad) for name, output in outputs.items()}
    return seen, [p.grad.clone() for p in model.parameters()]


def move(model: nn.Module, direction: list[Tensor], length: float) -> None:
    """Move all weights along a direction."""
    with torch.no_grad():
        for parameter, step in zip(model.parameters(), direction, strict=True):
            parameter += length * step


def measure(args: argparse.Namespace) -> Figures:
    """The figures of each network."""
    return {"networks": {name: measure_network(name, args) for name in MODELS}}


def measure_network(name: str, args: argparse.Namespace) -> Figures:
    """Ratios and memory for one network."""
    model = NETWORKS[name](args.pixels).train(not args.eval)
    batch, layers = batch_of(args.batch_size, args.pixels), FIVE_LAYERS[name]
    images = single_images(batch)
    variants = {
        "batch, plain": lambda: forward_backward(model, [batch]),
        "batch, 4 passes": lambda: passes(model, [batch], layers),
        "batch, 2 passes": lambda: passes(model, [batch], layers, second_order=False),
        "batch, 7 passes": lambda: passes(model, [batch], layers, both=True),
        "batch, naive": lambda: naive(model, [batch], layers),
        "image, plain": lambda: forward_backward(model, images),
        "image, 4 passes": lambda: passes(model, images, layers),
        "image, 2 passes": lambda: passes(model, images, layers, second_order=False),
        "image, 7 passes": lambda: passes(model, images, layers, both=True),
        "image, naive": lambda: naive(model, images, layers),
    }
    wanted = [variant for variant in NAMES if args.maps in variant]
    units = {variant.split(",")[0] + ", plain" for variant in wanted}
    times = take_turns({v: do for v, do in variants.items() if v in units or v in wanted}, args.rounds)
    figures: Figures = {v: ratio(times, v, v.split(",")[0] + ", plain") for v in wanted}
    small = batch[0][:1, :, :64, :64], batch[1][:1]
    for variant, figure in figures.items():
        figure["copies"] = copies_of_the_weights(model, small, layers, variant)
    figures["difference"] = difference(model, images, layers)
    return figures


def difference(model: nn.Module, images: list[Batch], layers: list[str]) -> float:
    """How far our maps are from the naive ones, at most, as a share of a map's norm."""
    ours, theirs = passes(model, images, layers), naive(model, images, layers)
    return max(float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in layers)


def copies_of_the_weights(model: nn.Module, batch: Batch, layers: list[str], variant: str) -> float:
    """How much more memory the passes take than the activations of one, in copies of the parameters.

    Measured on one small image, where the weights are what matters.
    """

    def without_weights() -> None:
        images = batch[0].detach().requires_grad_()
        torch.autograd.grad(loss_fn(model, (images, batch[1])), images)

    def wanted() -> None:
        if "naive" in variant:
            naive(model, [batch], layers)
        else:
            passes(model, [batch], layers, second_order="2" not in variant, both="7" in variant)

    model.zero_grad()
    peak = peak_bytes(wanted)
    model.zero_grad()
    model.requires_grad_(False)
    activations = peak_bytes(without_weights)
    model.requires_grad_(True)
    return (peak - activations) / sum(p.numel() * p.element_size() for p in model.parameters())


def show(figures: Figures) -> str:
    """A row for each way of getting the maps."""
    networks = figures["networks"]
    some = next(iter(networks.values()))
    rows = [
        [
            NAMES[variant],
            "4, full" if "naive" in variant else variant.split()[1],
            *(judged(spread(of[variant]), of[variant]["median"], LIMITS.get(variant)) for of in networks.values()),
            f"{LIMITS[variant]}" if variant in LIMITS else "–",
            " / ".join(f"{of[variant]['copies']:.1f}" for of in networks.values()),
        ]
        for variant in NAMES
        if variant in some
    ]
    settings = figures["settings"]
    far = max(of["difference"] for of in networks.values())
    unit = "eval" if settings["eval"] else "train"
    note = (
        f"In forward-backwards of the same images in {unit} mode: {settings['batch_size']} images of "
        f"{settings['pixels']} px, five layers, {settings['rounds']} rounds. Our maps and the naive ones differ by "
        f"{far:.0e} of a map's norm at most."
    )
    return f"{table(['', 'passes', *networks, 'at most', 'copies of the weights'], rows)}\n\n{note}"


def main() -> None:
    """Measure, and print the table."""
    options = parser(__doc__ or "", rounds=7, pixels=224, batch_size=8)
    options.add_argument("--eval", action="store_true", help="measure in units of a pass in eval mode")
    options.add_argument("--maps", default="", help="only those whose name contains this, as in 'batch, 4 passes'")
    run(__file__, options, measure, show, pixels=64, batch_size=2)


if __name__ == "__main__":
    main()
