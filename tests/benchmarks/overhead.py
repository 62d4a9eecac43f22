"""What the callback adds to a training step: the step with it ÷ the step without, in one run, side by side.

    python tests/benchmarks/overhead.py

Attached without an event; with an event on every step, maps only; with every step read for patches, atlas and curves;
and with an event on every step, drawn and written to TensorBoard. The default schedule is computed from these: of
its first 500 steps, and of a thousand later ones with one event and 99 readings. The images have ten classes. The check
and the probe are off: they come in few of these steps, as the budget allows. `short_steps.py` measures all together.

A step of a second on a shared machine varies by more than what is to be measured: the first row has plain steps on both
sides. So there is a second table: the time that the training thread spends in code of ours, hooks and all, and which
share of the plain step that is.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness import Figures, judged, quartiles, ratio, run, spread, table
from training import FIVE_LAYERS, NETWORKS, Lit, Turns, batch_of, by_network, network_parser, train, watching

from normgrad_lightning.step.budget import EVENT, READING
from normgrad_lightning.step.schedule import EARLY

EARLY_END = max(EARLY)
MILLISECONDS = 40
"""Of the training thread, for an event with overview and panels."""
CONTROL = "again"
LIMITS = {"attached": 1.005, "maps": 1.01, "reading": 1.05, "panels": 1.10, "everything": 1.20}
LIMITS |= {"first": 1.01, "later": 1.005}
NAMES = {
    CONTROL: "nothing at all: plain steps ÷ other plain steps",
    "attached": "attached, no event",
    "maps": "an event on every step, maps only",
    "reading": "every step read, for patches, atlas and curves",
    "panels": "an event on every step, overview and panels in TensorBoard",
    "everything": "an event on every step, all views in TensorBoard",
    "first": f"the default schedule, steps 0 to {EARLY_END - 1}: {len(EARLY) - 1} events, a reading every {READING}",
    "later": f"the default schedule, later: an event every {EVENT} steps, a reading every {READING}",
}


def measure_network(name: str, args: argparse.Namespace) -> Figures:
    """Both runs: without a logger and with one."""
    module, (images, labels) = Lit(NETWORKS[name](args.pixels)), batch_of(args.batch_size, args.pixels)
    batch = images, labels % 10
    layers = [f"net.{layer}" for layer in FIVE_LAYERS[name]]
    flags: dict[str, Any] = {"layers": layers, "num_images": args.images, "check": False, "probe": False}
    without_events, with_maps = watching(**flags, every_n_steps=10**9), watching(**flags)
    variants = {"plain": None, CONTROL: None, "attached": without_events, "maps": with_maps}
    silent = Turns(variants, args.rounds)
    train(module, batch, silent)
    assert len(with_maps.maps) == 5
    reads = watching(**flags, every_n_steps=10**9, read_every_n_steps=1)
    panels = watching(**flags, views=["overview", "panels"])
    logged = Turns({"plain": None, "reading": reads, "panels": panels, "everything": watching(**flags)}, args.rounds)
    with tempfile.TemporaryDirectory() as folder:
        train(module, batch, logged, Path(folder))
    return {
        CONTROL: figure(silent, CONTROL),
        "attached": figure(silent, "attached"),
        "maps": figure(silent, "maps"),
        "reading": figure(logged, "reading"),
        "panels": figure(logged, "panels"),
        "everything": figure(logged, "everything"),
        "seconds": statistics.median(silent.times["plain"]),
    }


def figure(turns: Turns, name: str) -> Figures:
    """The ratio of paired steps, and the time spent in our code."""
    ours, plain = turns.seconds_of_ours[name], statistics.median(turns.times["plain"])
    milliseconds = quartiles([1e3 * seconds for seconds in ours])
    return {
        "ratio": ratio(turns.times, name, "plain"),
        "ours_ms": milliseconds,
        "share": statistics.median(ours) / plain,
    }


def with_schedules(networks: Figures) -> Figures:
    """Return the figures of each network with those of the default schedule: of its first steps, and of later ones.

    The budget may make readings rarer; that is left out.
    """
    early = [step for step in EARLY if step < EARLY_END]
    first = len(early), EARLY_END // READING - len(early), EARLY_END
    later = 1, EVENT // READING - 1, EVENT
    return {
        name: {**of, "first": of_schedule(of, *first), "later": of_schedule(of, *later)}
        for name, of in networks.items()
    }


def of_schedule(of: Figures, events: int, readings: int, steps: int) -> Figures:
    """Return the figure of so many steps, of which some are events, others are read, and the rest has nothing."""

    def mixed(*path: str) -> float:
        event, reading, nothing = (find(of[what], path) for what in ("everything", "reading", "attached"))
        return (events * event + readings * reading + (steps - events - readings) * nothing) / steps

    spreads = {kind: {key: mixed(kind, key) for key in ("median", "low", "high")} for kind in ("ratio", "ours_ms")}
    return {**spreads, "share": mixed("share")}


def find(figure: Figures, path: Sequence[str]) -> float:
    """Return what is at the end of a path of keys."""
    value: Any = figure
    for key in path:
        value = value[key]
    return float(value)


def show(figures: Figures) -> str:
    """Two tables: ratios of steps, and the time in our code."""
    networks, settings = with_schedules(figures["networks"]), figures["settings"]
    ratios = [
        [name, *(judged_ratio(of[what], LIMITS.get(what)) for of in networks.values()), str(LIMITS.get(what, "–"))]
        for what, name in NAMES.items()
    ]
    shares = [[NAMES[what], *(own_time(what, of[what]) for of in networks.values()), limit_of(what)] for what in LIMITS]
    plain = ["a plain step", *(f"{1e3 * of['seconds']:.0f} ms" for of in networks.values()), "–"]
    set_up = (
        f"{settings['images']} of {settings['batch_size']} images of {settings['pixels']} px, five layers, "
        f"{settings['rounds']} rounds"
    )
    return "\n\n".join(
        [
            f"Steps with the callback ÷ the plain steps beside them, medians and quartiles ({set_up}):",
            table(["", *networks, "at most"], ratios),
            "Time that the training thread spends in our code, per step, and its share of a plain step:",
            table(["", *networks, "at most"], [*shares, plain]),
        ]
    )


def limit_of(what: str) -> str:
    """What our code may take."""
    share = f"{100 * (LIMITS[what] - 1):.1f} %"
    return f"{MILLISECONDS} ms, {share}" if what == "panels" else share


def judged_ratio(figure: Figures, limit: float | None) -> str:
    """A ratio with its spread, and whether it keeps to the limit."""
    return judged(spread(figure["ratio"], 3), figure["ratio"]["median"], limit)


def own_time(what: str, figure: Figures) -> str:
    """Milliseconds and percent, and whether they keep to the limits."""
    milliseconds = figure["ours_ms"]["median"]
    text = judged(f"{milliseconds:.2f} ms, {100 * figure['share']:.2f} %", 1 + figure["share"], LIMITS[what])
    too_long = what == "panels" and milliseconds > MILLISECONDS
    return text if not too_long or text.endswith("**") else f"{text} **missed**"


def main() -> None:
    """Measure, and print the tables."""
    options = network_parser(__doc__ or "", rounds=11)
    run(__file__, options, partial(by_network, measure_network), show, pixels=64, batch_size=4, images=2)


if __name__ == "__main__":
    main()
