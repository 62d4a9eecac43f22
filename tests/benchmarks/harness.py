"""What all benchmarks share: variants that take turns, ratios of what ran side by side, tables and files of figures.

A shared machine slows down and speeds up by the minute. So variants run in turns within one round, each is divided by
what the plain one took in the same round, and the median and the quartiles of these ratios are what is reported.

Each benchmark is a script with two functions: `measure(args)` returns figures that fit into a JSON file, and
`show(figures)` makes tables of them, in markdown. `all.py` runs the scripts and puts the tables into
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _EventType

Times = dict[str, list[float]]
Figures = dict[str, Any]

FIGURES = Path(__file__).parent / "figures"
"""Where the figures of the tables are kept, a file for each benchmark."""


def parser(description: str, *, rounds: int, **sizes: int) -> argparse.ArgumentParser:
    """The options that every benchmark has, and one for each of these sizes."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=rounds, help=f"how often each variant runs ({rounds})")
    options.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    options.add_argument("--quick", action="store_true", help="tiny inputs, two rounds: for correctness only")
    options.add_argument("--json", type=Path, help="where the figures go (those of the tables: figures/)")
    for name, default in sizes.items():
        options.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"({default})")
    return options


def run(
    script: str,
    options: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace], Figures],
    show: Callable[[Figures], str],
    **quick: Any,
) -> None:
    """Run a benchmark as its command line says; `quick` holds what `--quick` sets. Keeps the figures, prints them."""
    args = options.parse_args()
    if args.quick:
        vars(args).update({"rounds": 2, **quick})
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    settings = {k: v for k, v in vars(args).items() if k not in ("json", "quick") and v is not None}
    figures = {"machine": machine(), "settings": settings, **measure(args)}
    print(f"{show(figures)}\n\n{figures['machine']}")
    path = args.json or (None if args.quick else FIGURES / f"{Path(script).stem}.json")
    if path is not None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(figures, indent=1, default=str) + "\n")


def take_turns(variants: Mapping[str, Callable[[], Any]], rounds: int) -> Times:
    """Seconds of each variant in each round, after one that does not count; who begins changes from round to round."""
    names = list(variants)
    times: Times = {name: [] for name in names}
    for turn in range(-1, rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            variants[name]()
            if turn >= 0:
                times[name].append(time.perf_counter() - start)
    return times


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """The median of some values and the quartiles around it."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else list(values) * 3
    return {"median": median, "low": low, "high": high}


def ratio(times: Times, name: str, base: str) -> dict[str, float]:
    """How many times as long as `base` it took, in the same rounds: the median and the quartiles."""
    ratios = quartiles([a / b for a, b in zip(times[name], times[base], strict=True)])
    return {**ratios, "seconds": statistics.median(times[name])}


def spread(figure: Mapping[str, float], digits: int = 2, unit: str = "") -> str:
    """A median and its quartiles, for people."""
    return f"{figure['median']:.{digits}f}{unit} ({figure['low']:.{digits}f} – {figure['high']:.{digits}f})"


def judged(text: str, value: float, limit: float | None) -> str:
    """The text; with a mark, if the value is above the limit."""
    return text if limit is None or value <= limit else f"{text} **missed**"


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most bytes that tensors took at once during the call, beyond those there were before."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    sizes: dict[int, int] = {}
    live = peak = 0
    for _, pointer, size in sorted(_allocations(profiler.profiler.kineto_results.experimental_event_tree())):
        if size > 0:
            sizes[pointer] = size
        live += size if size > 0 else -sizes.pop(pointer, 0)  # not what was allocated before
        peak = max(peak, live)
    return peak


def _allocations(events: Iterable[Any]) -> Iterator[tuple[int, int, int]]:
    """When, where and how many bytes: of all allocations, and as negative numbers of all that were freed."""
    for event in events:
        if event.tag == _EventType.Allocation:
            yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size
        yield from _allocations(event.children)


def machine() -> str:
    """What it ran on."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = models[0] if models else name
    return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
