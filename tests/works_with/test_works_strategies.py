"""In however many processes training runs: the same bits in each with the callback and without, and the right maps.

The runs are those of `two_processes.py`. Here their results are compared, and the maps of the first process with the
reference.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from pytorch_lightning.strategies import FSDPStrategy
from twice import (
    LAYERS,
    NUM_IMAGES,
    Lit,
    Moment,
    assert_close,
    at,
    order0,
    order1,
    panels,
    pictures,
    row,
    same,
    with_statistics,
)
from two_processes import KILLED_AFTER, SETUPS, LossOfBoth, UsesSomeOnSomeSteps, WithoutDropout

from normgrad_lightning import order0_maps
from normgrad_lightning.step.loss import check_training_loss

RANKS = (0, 1)
STEPS = [0, 1, 2, 3, 4, 5]
ORDER1_STEPS = [0, 3, 5]
SHARDED = [name for name, setup in SETUPS.items() if setup.sharded]
QUICK = ["ddp", "probe", "checked", "talks_in_forward", "talks_in_backward", "talks_in_network", "fsdp2", "killed"]
ALONE = ["ddp_spawn"]
AT_NIGHT = [name for name in SETUPS if name not in (*QUICK, *ALONE)]
TIMEOUT = 600
"""Seconds that all runs together may take."""


class Ending(NamedTuple):
    """How a pair of processes ended that did not come to its end: its code (None: it hung), and what it wrote."""

    code: int | None
    told: str


@dataclass
class Ran:
    """What some runs left."""

    folder: Path
    endings: dict[str, Ending]

    def of(self, name: str, which: str) -> list[Any]:
        """What each of the two processes left of a run."""
        assert name not in self.endings, self.endings[name].told
        return [torch.load(self.folder / f"{name}.{which}.rank{rank}.pt", weights_only=False) for rank in RANKS]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The runs of every commit."""
    folder = tmp_path_factory.mktemp("quick")
    return Ran(folder, run_all(folder, QUICK))


@pytest.fixture(scope="module")
def ran_at_night(tmp_path_factory):
    """The other runs. While one pair of processes is being started, another trains."""
    folder = tmp_path_factory.mktemp("at_night")
    with ThreadPoolExecutor() as pool:
        endings = pool.map(partial(run_all, folder), (AT_NIGHT, ALONE))
    return Ran(folder, {name: ending for of in endings for name, ending in of.items()})


def run_all(folder: Path, names: Sequence[str]) -> dict[str, Ending]:
    """Run set-ups in one pair of processes; if one of them ends it, the others in a new pair."""
    endings: dict[str, Ending] = {}
    deadline = time.monotonic() + TIMEOUT
    while names:
        code, log = run_script(folder, names, deadline - time.monotonic())
        unfinished = [name for name in names if not has_finished(folder, name)]
        if unfinished:
            culprit = unfinished[0]
            told = [path.read_text() for path in sorted(folder.glob(f"{culprit}.rank*.error"))]
            endings[culprit] = Ending(code, "\n".join(told) or log[-3000:])
        names = unfinished[1:]
    return endings


def has_finished(folder: Path, name: str) -> bool:
    return all((folder / f"{name}.watched.rank{rank}.pt").exists() for rank in RANKS)


def run_script(folder: Path, names: Sequence[str], timeout: float) -> tuple[int | None, str]:
    """Run the script, and leave no process of it; its code (None: it hung), and all it wrote."""
    log = folder / f"{names[0]}.log"
    script = Path(__file__).parents[1] / "two_processes.py"
    command = [sys.executable, str(script), str(folder), *names]
    not_for_it = ("LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED")
    environment = {name: value for name, value in os.environ.items() if name not in not_for_it}
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(timeout, 0))
            code = process.poll()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return code, log.read_text()


def check(
    ran: Ran,
    name: str,
    eager: Callable[[], Any] = Lit,
    *,
    order1_steps: Sequence[int] = ORDER1_STEPS,
    reference: Callable[[int], dict[str, torch.Tensor]] | None = None,
) -> None:
    """Raise if a bit differs in any process, if a map is wrong, or if another process than the first shows anything.

    Args:
        ran: these runs and others.
        name: the set-up.
        eager: makes the module for the reference.
        order1_steps: which steps must have order-1 maps.
        reference: the order-0 maps of a step, if the first process does not know enough.
    """
    plain, watched = ran.of(name, "plain"), ran.of(name, "watched")
    for rank in RANKS:
        for what in plain[rank]["traces"]:
            alike = same(plain[rank]["traces"][what], watched[rank]["traces"][what])
            assert alike, f"{what} of rank {rank} differ with the callback"
        assert watched[rank].get("warned", []) == []
    moments, first = plain[0]["moments"], watched[0]
    assert list(first["maps"]) == list(moments) == STEPS
    assert list(first["order1"]) == list(order1_steps)
    for step, maps in first["maps"].items():
        assert list(maps) == LAYERS
        assert_close(maps, reference(step) if reference else order0(moments[step], eager, LAYERS), 1e-5)
    for step, kinds in first["order1"].items():
        check_order1(kinds, moments[step], eager)
    check_others_are_silent(first, watched[1])


def check_order1(kinds: dict[str, dict[str, torch.Tensor]], moment: Moment, eager: Callable[[], Any]) -> None:
    for kind in ("order1", "adversarial"):
        assert list(kinds[kind]) == LAYERS
        assert_close(kinds[kind], order1(moment, eager, LAYERS, tuple, adversarial=kind == "adversarial"), 1e-4)


def check_others_are_silent(first: dict[str, Any], other: dict[str, Any]) -> None:
    """Raise if another process than the first has maps or has written an event file, or if a panel is missing."""
    assert first["process"] != other["process"]
    assert other["maps"] == other["order1"] == {}
    assert other["shown"] == [{}, {}, None]
    files = list(Path(first["log_dir"]).rglob("events*"))
    assert [file.name.split(".")[-2] for file in files] == [str(first["process"])]
    assert panels_in(first["log_dir"]) == expected_panels(list(first["maps"]), list(first["order1"]))
    of_classes = {
        tag: steps
        for tag, steps in pictures(logs(first["log_dir"])).items()
        if tag.startswith(("normgrad/1_", "normgrad/4_"))
    }
    names = [f"{view}/{of}" for view in ("1_patches", "4_atlas") for of in ("0_combined", f"02_{LAYERS[-1]}")]
    assert of_classes == {f"normgrad/{name}": list(first["maps"]) for name in names}


def panels_in(folder: str | Path) -> dict[str, list[int]]:
    return panels(logs(folder))


def logs(folder: str | Path) -> SimpleNamespace:
    return SimpleNamespace(logger=SimpleNamespace(log_dir=str(folder)))


def expected_panels(steps: list[int], order1_steps: list[int]) -> dict[str, list[int]]:
    of = {"order0": steps} | dict.fromkeys(("order1", "adversarial", "contrast") if order1_steps else (), order1_steps)
    layers = [f"{number:02d}_{layer}" for number, layer in enumerate(LAYERS)]
    return {f"normgrad_{kind}/{layer}": steps for kind, steps in of.items() for layer in layers}


@row("Strategies", '`strategy="ddp"`', "the maps are those of rank 0, of its own share of the batch")
def test_ddp(ran):
    check(ran, "ddp")


@row("Strategies", '`strategy="ddp_spawn"`', "the panels are written, but `callback.maps` stays in the spawned process")
@pytest.mark.slow
def test_ddp_spawn(ran_at_night):
    check(ran_at_night, "ddp_spawn")


@row("Strategies", '`strategy="ddp_find_unused_parameters_true"`')
@pytest.mark.slow
def test_ddp_with_unused_parameters(ran_at_night):
    check(ran_at_night, "find_unused_parameters", UsesSomeOnSomeSteps)
    moments = ran_at_night.of("find_unused_parameters", "plain")[0]["moments"].values()
    assert {int(moment.batch[1].sum()) % 2 for moment in moments} == {0, 1}


@row(
    "Strategies",
    "`sync_batchnorm=True`",
    "the gradient at an image's features also comes from the other ranks' losses, through the joint statistics",
)
@pytest.mark.slow
def test_sync_batchnorm(ran_at_night):
    ours, theirs = (of["moments"] for of in ran_at_night.of("sync_batchnorm", "plain"))

    def of_both(step: int) -> dict[str, torch.Tensor]:
        batch = [torch.cat(parts) for parts in zip(ours[step].batch, theirs[step].batch, strict=True)]
        return order0(replace(ours[step], batch=batch), LossOfBoth, LAYERS)

    check(ran_at_night, "sync_batchnorm", WithoutDropout, reference=of_both)
    alone = order0(ours[0], WithoutDropout, LAYERS)
    with pytest.raises(AssertionError, match="away from the reference"):
        assert_close({name: m[:NUM_IMAGES] for name, m in alone.items()}, of_both(0), 1e-2)


@row("Strategies", "`DDPStrategy(gradient_as_bucket_view=True)`")
@pytest.mark.slow
def test_gradients_that_are_views_of_buckets(ran_at_night):
    check(ran_at_night, "gradient_as_bucket_view")


@row("Strategies", "`DDPStrategy(static_graph=True)`")
@pytest.mark.slow
def test_static_graph(ran_at_night):
    check(ran_at_night, "static_graph")


@row("Strategies", "DDP with a communication hook (`fp16_compress_hook`)")
@pytest.mark.slow
def test_communication_hook(ran, ran_at_night):
    check(ran_at_night, "comm_hook")
    runs = ran.of("ddp", "plain"), ran_at_night.of("comm_hook", "plain")
    exact, compressed = (of[0]["traces"]["weights and buffers"] for of in runs)
    assert not same(exact, compressed)


@row("Strategies", "`torch.compile` under DDP", "order-0 maps come from an extra pass, on rank 0 alone")
@pytest.mark.slow
def test_compiled_network_under_ddp(ran_at_night):
    check(ran_at_night, "compiled")


@row("Strategies", "a probe under DDP", "its passes run on rank 0 alone, on images of that rank's share of the batch")
def test_probe_under_ddp(ran):
    plain, watched = ran.of("probe", "plain"), ran.of("probe", "watched")
    for rank in RANKS:
        for what in plain[rank]["traces"]:
            assert same(plain[rank]["traces"][what], watched[rank]["traces"][what]), f"{what} of rank {rank} differ"
        assert watched[rank]["warned"] == []
    assert watched[1]["probe"] == []
    step, images, labels, maps = watched[0]["probe"]
    moments = plain[0]["moments"]
    assert step == STEPS[-1]
    first = moments[0].batch[0]
    assert all(any(torch.equal(one, other) for other in first) for one in images)
    probed = images, torch.tensor(labels)
    module = at(with_statistics(moments[step], Lit, probed), Lit).train()
    wanted = order0_maps(module, lambda m, b: m.loss(b), probed, LAYERS)
    assert_close(maps, wanted, 1e-5)
    of_probe = [tag for tag in panels(logs(watched[0]["log_dir"]), probe=True) if "probe" in tag]
    assert len(of_probe) == 4 * len(LAYERS)


@row(
    "Strategies",
    "Collectives in the loss, or in its backward pass",
    "passes of our own run on rank 0 alone, so order 1 and a probe are one warning; order 0 is as ever",
)
@pytest.mark.parametrize("name", ["talks_in_forward", "talks_in_backward"])
def test_passes_that_would_talk_are_refused(ran, name):
    plain, watched = ran.of(name, "plain"), ran.of(name, "watched")
    for rank in RANKS:
        for what in plain[rank]["traces"]:
            assert same(plain[rank]["traces"][what], watched[rank]["traces"][what]), f"{what} of rank {rank} differ"
    told = watched[0]["warned"]
    assert len(told) == 1
    assert "in a pass that only one process runs" in told[0]
    assert watched[0]["shown"][0].keys() == set(LAYERS)
    assert not any(watched[0]["order1"].values())
    assert watched[0]["probe"] == watched[1]["warned"] == []


@row("Strategies", "Collectives in the network", "no probe by default and no check, without a word")
def test_what_runs_by_default_does_not_talk(ran):
    plain, watched = ran.of("talks_in_network", "plain"), ran.of("talks_in_network", "watched")
    for rank in RANKS:
        for what in plain[rank]["traces"]:
            assert same(plain[rank]["traces"][what], watched[rank]["traces"][what]), f"{what} of rank {rank} differ"
        assert watched[rank]["warned"] == watched[rank]["probe"] == []
    assert watched[0]["shown"][0].keys() == set(LAYERS)


@row("Strategies", "`FSDPStrategy`", "order 0 only: order 1 needs all weights in one process, and is refused at once")
@pytest.mark.slow
def test_fsdp1(ran_at_night):
    check(ran_at_night, "fsdp1", order1_steps=[])
    check_order1_is_refused(ran_at_night, "fsdp1", "FSDPOnCPU")


@row("Strategies", "`ModelParallelStrategy` with `fully_shard` (FSDP2)", "order 0 only, as with `FSDPStrategy`")
def test_fsdp2(ran):
    check(ran, "fsdp2", order1_steps=[])
    check_order1_is_refused(ran, "fsdp2", "ModelParallelStrategy")


def check_order1_is_refused(ran: Ran, name: str, strategy: str) -> None:
    for refused in ran.of(name, "refused"):
        reason = f"order-1 maps need all weights in one process, but {strategy} spreads them over several. "
        assert refused["told"].startswith(f"`order1_every_n_steps`: {reason}")
        assert refused["batches"] == 0


class Renamed(FSDPStrategy):
    """A user's own, whatever it is called."""


def test_a_strategy_made_of_fsdp_is_refused_by_any_name():
    trainer = SimpleNamespace(strategy=Renamed())
    with pytest.raises(ValueError, match="need all weights in one process, but Renamed spreads them over several"):
        check_training_loss(trainer, Lit(), "`order1_every_n_steps`: order-1 maps")


def test_the_check_runs_on_rank_0_alone(ran):
    plain, (first, other) = ran.of("checked", "plain"), ran.of("checked", "watched")
    for before, after in zip(plain, (first, other), strict=True):
        for what in before["traces"]:
            assert same(before["traces"][what], after["traces"][what]), f"{what} differ with the check"
        assert after["warned"] == []
    assert len(first["check"]) >= 3
    assert min(first["check"].values()) >= 8
    assert other["check"] == {}


@pytest.mark.parametrize("name", [*QUICK[:-1], *(pytest.param(name, marks=pytest.mark.slow) for name in AT_NIGHT)])
def test_no_collective_is_ours(request, name):
    ran = request.getfixturevalue("ran" if name in QUICK else "ran_at_night")
    plain, watched = ran.of(name, "off" if name in SHARDED else "plain"), ran.of(name, "watched")
    counts = [of["collectives"] for of in (*plain, *watched)]
    assert counts[0] >= len(STEPS)
    assert set(counts) == {counts[0]}


@row("Strategies", "Events on rank 0 alone", "the callback never talks to other processes, so none can wait for it")
@pytest.mark.slow
def test_what_is_said_to_other_processes_is_the_same_word_for_word(ran_at_night):
    plain, watched = ran_at_night.of("counted", "plain"), ran_at_night.of("counted", "watched")
    check(ran_at_night, "counted")
    for rank in RANKS:
        assert plain[rank]["said"].count("c10d.allreduce_.default") >= len(STEPS)
        assert plain[rank]["said"] == watched[rank]["said"]


@row("Strategies", "A rank that is killed", "all panels of the events before are in the event file")
def test_a_killed_process_leaves_the_panels_of_its_events(ran):
    assert ran.endings["killed"].code == -signal.SIGKILL
    logs = ran.folder / "killed" / "watched"
    assert len(list(logs.rglob("events*"))) == 1
    before = [[step for step in steps if step <= KILLED_AFTER] for steps in (STEPS, ORDER1_STEPS)]
    assert before == [[0, 1, 2, 3], [0, 3]]
    assert panels_in(logs) == expected_panels(*before)
