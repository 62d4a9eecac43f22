"""What order-1 maps cost, in plain forward-backward passes of the same images, and in copies of the parameters.

    python tests/benchmarks/order1.py

Per batch, the unit is one forward-backward of the whole batch; per image, as many forward-backwards of one image each.
The unit is what training does, in train mode; with `--eval`, the same in eval mode, as the passes run: it is cheaper.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import torchvision
from harness import parser, peak_bytes, ratio, report, table, take_turns
from torch import Tensor, nn

from normgrad_lightning import select_layers
from normgrad_lightning.batches import single_images
from normgrad_lightning.order1 import Settings, run_passes

MODELS = {"ResNet-18": torchvision.models.resnet18, "MobileNet-V3": torchvision.models.mobilenet_v3_large}
LIMITS = {"batch, 4 passes": 3.5, "batch, 2 passes": 2.2, "image, 4 passes": 4.2, "image, 2 passes": 2.2}


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The cross-entropy of a batch."""
    return F.cross_entropy(model(batch[0]), batch[1])


def forward_backward(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    """What training does with the batches, but for the update."""
    for batch in batches:
        model.zero_grad()
        loss_fn(model, batch).backward()


def passes(model: nn.Module, batches: list[tuple[Tensor, Tensor]], layers: list[str], **options: bool) -> None:
    """Order-1 maps of the batches; with `both`, adversarial ones, too."""
    kinds = ["order1", "adversarial"] if options.pop("both", False) else ["order1"]
    run_passes(model, loss_fn, batches, layers, kinds, Settings(**options))


def measure(
    name: str, size: int, batch_size: int, rounds: int, training: bool, maps: str
) -> dict[str, dict[str, float]]:
    """Ratios and memory for one network."""
    torch.manual_seed(0)
    model = MODELS[name]().train(training)
    batch = torch.randn(batch_size, 3, size, size), torch.randint(1000, (batch_size,))
    layers = select_layers(model, "auto", batch[0][:1])
    images = single_images(batch)
    variants = {
        "batch, plain": lambda: forward_backward(model, [batch]),
        "batch, 4 passes": lambda: passes(model, [batch], layers),
        "batch, 2 passes": lambda: passes(model, [batch], layers, second_order=False),
        "image, plain": lambda: forward_backward(model, images),
        "image, 4 passes": lambda: passes(model, images, layers),
        "image, 2 passes": lambda: passes(model, images, layers, second_order=False),
        "batch, 7 passes": lambda: passes(model, [batch], layers, both=True),
        "image, 7 passes": lambda: passes(model, images, layers, both=True),
    }
    wanted = [variant for variant in variants if "passes" in variant and maps in variant]
    units = {variant.split(",")[0] + ", plain" for variant in wanted}
    times = take_turns({v: run for v, run in variants.items() if v in units or v in wanted}, rounds)
    figures = {v: ratio(times, v, v.split(",")[0] + ", plain") for v in wanted}
    small = batch[0][:1, :, :64, :64], batch[1][:1]
    for variant, figure in figures.items():
        options = {"second_order": "2" not in variant, "both": "7" in variant}
        figure["copies"] = copies_of_the_weights(model, small, layers, options)
    return {**figures, "layers": {"count": len(layers)}}


def copies_of_the_weights(
    model: nn.Module, batch: tuple[Tensor, Tensor], layers: list[str], options: dict[str, bool]
) -> float:
    """How much more memory the passes take than the activations of one, in copies of the parameters.

    Measured on one small image, where the weights are what matters.
    """

    def without_weights() -> None:
        images = batch[0].detach().requires_grad_()
        torch.autograd.grad(loss_fn(model, (images, batch[1])), images)

    peak = peak_bytes(lambda: passes(model, [batch], layers, **options))
    model.requires_grad_(False)
    activations = peak_bytes(without_weights)
    model.requires_grad_(True)
    return (peak - activations) / sum(p.numel() * p.element_size() for p in model.parameters())


def main() -> None:
    """Measure, and print the table."""
    options = parser(__doc__ or "", rounds=9)
    options.add_argument("--size", type=int, default=224, help="pixels of an image's side")
    options.add_argument("--batch-size", type=int, default=8, help="images")
    options.add_argument("--eval", action="store_true", help="measure in units of a pass in eval mode")
    options.add_argument("--maps", default="", help="only those whose name contains this, as in 'batch, 4 passes'")
    args = options.parse_args()
    if args.quick:
        args.rounds, args.size, args.batch_size = 2, 64, 2
    torch.set_num_threads(args.threads)
    figures = {
        name: measure(name, args.size, args.batch_size, args.rounds, not args.eval, args.maps) for name in MODELS
    }
    rows = []
    for name, of_network in figures.items():
        count = of_network.pop("layers")["count"]
        for variant, f in of_network.items():
            limit = f"{LIMITS[variant]:.1f}" if variant in LIMITS else "–"
            spread = f"{f['low']:.2f} – {f['high']:.2f}"
            rows.append(
                [f"{name}, {count:.0f} layers", variant, f"{f['median']:.2f}", spread, limit, f"{f['copies']:.1f}"]
            )
    header = ["network", "maps", "plain passes", "quartiles", "at most", "copies of the weights"]
    unit = "eval" if args.eval else "train"
    note = f"{args.batch_size} images of {args.size} px, {args.rounds} rounds, unit: forward-backward in {unit} mode"
    report(figures, f"{table(header, rows)}\n\n{note}", args.json)


if __name__ == "__main__":
    main()
