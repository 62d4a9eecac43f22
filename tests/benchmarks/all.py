"""Runs all benchmarks, one after the other, and writes their tables.

    python tests/benchmarks/all.py

The figures are kept in `figures/`; `--tables` writes the tables from these, without a run. A table stands between
`<!-- benchmark: NAME -->` and `<!-- end -->`: the short one in the project's README, all others in the README here.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import memory
import order1
import overhead
import peers
import short_steps
import startup
from harness import FIGURES, Figures, judged, spread, table

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGES = (ROOT / "README.md", HERE / "README.md")
OPTIONS = {
    "overhead": [],
    "short_steps": [],
    "counts": [],
    "memory": [],
    "peers": [],
    "order1": [],
    "scaling": ["--picture", "examples/pictures/scaling.png"],
    "log": [],
    "drawing": [],
    "compile": [],
    "startup": [],
    "tab": [],
}


def command(name: str) -> str:
    """What to type for one benchmark."""
    return " ".join(["python", f"tests/benchmarks/{name}.py", *OPTIONS[name]])


def kept(name: str) -> Figures:
    """The figures of the latest run."""
    figures: Figures = json.loads((FIGURES / f"{name}.json").read_text())
    return figures


def block(name: str) -> str:
    """What stands in the place of this name."""
    if name in SUMMARIES:
        return SUMMARIES[name]()
    figures = kept(name)
    tables = importlib.import_module(name).show(figures)
    return f"{tables}\n\n(`{command(name)}`; {figures['machine']})"


def summary() -> str:
    """What was promised, and the worst that was measured of it."""
    rows = [
        *of_steps(),
        *of_short_steps(),
        of_memory(),
        of_an_event(),
        *of_peers(),
        *of_order1(),
        of_compiled(),
        of_startup(),
    ]
    return table(["", "measured, at worst", "promised"], rows)


def short() -> str:
    """Some lines for the project's README: the worst network's median of each."""
    rows = [*short_of_steps(), *short_of_short_steps()]
    machines = "; ".join(sorted({kept(name)["machine"] for name in ("overhead", "short_steps")}))
    return table(["", f"cost ({machines})", "`python tests/benchmarks/…`"], rows)


def percent(share: float, digits: int = 2) -> str:
    """A share, for people."""
    return f"{100 * share:.{digits}f} %"


def short_of_steps() -> Iterator[list[str]]:
    """Our own time in an event, and on the default schedule."""
    networks = overhead.with_schedules(kept("overhead")["networks"])
    slow, of = worst(networks, lambda of: of["everything"]["ours_ms"]["median"])
    fast, of_fast = worst(networks, lambda of: of["everything"]["share"])
    text = f"{of['everything']['ours_ms']['median']:.1f} ms ({slow})"
    text = f"{text}, {percent(of_fast['everything']['share'], 1)} of the step ({fast})"
    yield ["an event, with all pictures in TensorBoard", text, "`overhead.py`"]
    network, of = worst(networks, lambda of: of["later"]["share"])
    first, later = (percent(of[what]["share"]) for what in ("first", "later"))
    text = f"{later} of the training time, and {first} in the first {overhead.EARLY_END} steps ({network})"
    yield ["the default schedule, without the check and the probe", text, "`overhead.py`"]


def short_of_short_steps() -> Iterator[list[str]]:
    """The defaults where steps are short, on a CPU."""
    for name, of in kept("short_steps")["cases"].items():
        if name == "3 ms":
            first, later = (f"{spread(of[what])} ×" for what in ("first", "later"))
            text = f"{later}, and {first} in the first {short_steps.FIRST}"
            yield [f"steps of {of['plain']['median']:.1f} ms, with the defaults", text, "`short_steps.py`"]


SUMMARIES = {"summary": summary, "short": short}


def worst(of_networks: Figures, value: Callable[[Figures], float]) -> tuple[str, Figures]:
    """The network with the largest value, and its figures."""
    return max(of_networks.items(), key=lambda item: value(item[1]))


def of_steps() -> Iterator[list[str]]:
    """Ratios of training steps."""
    networks = overhead.with_schedules(kept("overhead")["networks"])
    for what, limit in overhead.LIMITS.items():
        name = overhead.NAMES[what]
        network, of = worst(networks, lambda of, what=what: of[what]["share"])
        own = judged(f"1 + {of[what]['share']:.4f}, {network}", 1 + of[what]["share"], limit)
        yield [f"plain step and our code ÷ plain step: {name}", own, f"≤ {limit:g}"]
        network, of = worst(networks, lambda of, what=what: of[what]["ratio"]["median"])
        ratio = of[what]["ratio"]
        noise = spread(of[overhead.CONTROL]["ratio"], 3)
        text = judged(f"{spread(ratio, 3)}, {network}, where plain ÷ plain is {noise}", ratio["median"], limit)
        yield [f"step ÷ plain step: {name}", text, f"≤ {limit:g}"]


def of_short_steps() -> Iterator[list[str]]:
    """The case of short steps that takes most longer."""
    cases = kept("short_steps")["cases"]
    for name, of in sorted(cases.items(), key=lambda item: -item[1]["later"]["median"])[:1]:
        text = judged(f"{spread(of['later'], 3)}, {name}", of["later"]["median"], short_steps.LIMIT)
        yield [f"defaults ÷ plain after {short_steps.FIRST} short steps", text, f"≤ {short_steps.LIMIT}"]


def of_memory() -> list[str]:
    """Peak memory."""
    network, of = worst(kept("memory")["networks"], lambda of: of["tensors"]["ratio"])
    value = of["tensors"]["ratio"]
    text = judged(f"{value:.4f}, {network}", value, memory.LIMIT)
    return ["peak memory of tensors with an event ÷ without", text, f"≤ {memory.LIMIT}"]


def of_an_event() -> list[str]:
    """Milliseconds."""
    network, of = worst(kept("overhead")["networks"], lambda of: of["panels"]["ours_ms"]["median"])
    figure, limit = of["panels"]["ours_ms"], overhead.MILLISECONDS
    text = judged(f"{spread(figure, 1, ' ms')}, {network}", figure["median"], limit)
    return ["training thread, per event, overview and panels", text, f"≤ {limit} ms"]


def of_peers() -> Iterator[list[str]]:
    """Against the fastest of other tools."""
    figures, at_least = kept("peers"), peers.CHEAPER_IN_TRAINING
    fastest, factor = figures["in_training"]["fastest"], figures["in_training"]["factor"]
    text = peers.judged_from(f"{factor:.0f} ×, {fastest}", factor, at_least)
    yield ["a map by another tool ÷ a map in training", text, f"≥ {at_least} ×"]
    tools = {name: of for name, of in figures["alone"].items() if not peers.TOOLS[name].is_ours}
    for layers in ("five", "one"):
        of_layers = {name: of[layers] for name, of in tools.items() if layers in of}
        name, figure = min(of_layers.items(), key=lambda item: item[1]["median"])
        text = peers.judged_from(f"{spread(figure)}, {name}", figure["median"], peers.FASTER_THAN_PEERS)
        what = f"other tools ÷ `order0_maps`, {layers} layer{'s' * (layers == 'five')}"
        yield [what, text, f"> {peers.FASTER_THAN_PEERS}"]


def of_order1() -> Iterator[list[str]]:
    """In forward-backwards of the same images."""
    for variant, limit in order1.LIMITS.items():
        network, of = worst(kept("order1")["networks"], lambda of, variant=variant: of[variant]["median"])
        figure = of[variant]
        text = judged(f"{spread(figure)}, {network}", figure["median"], limit)
        yield [f"order 1 ÷ forward-backward: {order1.NAMES[variant]}", text, f"≤ {limit:g}"]


def of_compiled() -> list[str]:
    """A compiled network."""
    figure = kept("compile")["ratios"]["attached"]
    breaks = kept("compile")["compiled"]["all"]["breaks"]
    text = judged(f"{spread(figure, 3)}, {breaks} graph breaks", figure["median"] + breaks, 1.005)
    return ["compiled step ÷ plain step: attached, no event", text, "≤ 1.005"]


def of_startup() -> list[str]:
    """The entry point of every Trainer."""
    of = kept("startup")["variants"]
    name = max(("unset", "off"), key=lambda name: of[name]["more_ms"]["median"])
    figure, limit = of[name]["more_ms"], startup.LIMIT
    text = judged(f"{spread(figure, 1, ' ms')}, {startup.VARIANTS[name]}", figure["median"], limit)
    return ["`Trainer()` with our entry point, not switched on − without it", text, f"≤ {limit:g} ms"]


def rewritten(page: str) -> str:
    """The page with the tables of the kept figures."""
    return re.sub(
        r"(<!-- benchmark: (\w+) -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}\n{block(match[2])}\n\n{match[3]}",
        page,
        flags=re.DOTALL,
    )


def main() -> None:
    """Run what is asked for, and rewrite the tables."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", nargs="+", choices=list(OPTIONS), default=list(OPTIONS), help="run just these")
    options.add_argument("--tables", action="store_true", help="run nothing, only write the tables")
    args = options.parse_args()
    for name in [] if args.tables else args.only:
        print(f"\n+ {command(name)}", flush=True)
        subprocess.run([sys.executable, HERE / f"{name}.py", *OPTIONS[name]], cwd=ROOT, check=True)
    for page in PAGES:
        page.write_text(rewritten(page.read_text()))


if __name__ == "__main__":
    main()
