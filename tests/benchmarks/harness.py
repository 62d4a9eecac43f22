"""What all benchmarks share: variants that take turns, ratios of what ran side by side, a table and a JSON file.

A shared machine slows down and speeds up by the minute. So variants run in turns within one round, each is divided by
what the plain one took in the same round, and the median and the quartiles of these ratios are what is reported.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

Times = dict[str, list[float]]


def parser(description: str, *, rounds: int) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    options.add_argument("--rounds", type=int, default=rounds, help="how often each variant runs")
    options.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    options.add_argument("--quick", action="store_true", help="tiny inputs, two rounds: for correctness only")
    options.add_argument("--json", type=Path, help="write the figures here, too")
    return options


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


def ratio(times: Times, name: str, base: str) -> dict[str, float]:
    """How many times as long as `base` it took, in the same rounds: the median and the quartiles."""
    ratios = [a / b for a, b in zip(times[name], times[base], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {"median": middle, "low": low, "high": high, "seconds": statistics.median(times[name])}


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most bytes that tensors took at once during the call, beyond those there were before."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


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


def report(figures: Any, text: str, path: Path | None) -> None:
    """Print the table, and keep the figures if a file is named."""
    print(text)
    print(f"\n{machine()}")
    if path is not None:
        path.write_text(json.dumps({"machine": machine(), "figures": figures}, indent=2) + "\n")
