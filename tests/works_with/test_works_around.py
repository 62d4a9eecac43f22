"""What users do around training: copies, exports, other callbacks, tuners, profilers, Ctrl-C, many fits in one process.

Rows of the README's table "Works with"; each trains with and without the callback, and nothing may differ.
"""

import copy
import gc
import io
import os
import pickle
import signal
import subprocess
import sys
import tracemalloc
import weakref
from functools import partial
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from networks import ResNet, batch
from pytorch_lightning import callbacks
from pytorch_lightning.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from twice import (
    LAYERS,
    Lit,
    assert_same,
    loader,
    panels,
    random_state,
    row,
    same,
    set_random_state,
    train,
    twice,
    watching,
)

from normgrad_lightning.hooks.recorder import NormGrad
from normgrad_lightning.hooks.safe_hooks import Hook
from normgrad_lightning.layers.own_passes import current_pass


def hooks_of(module):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [hook for part in module.modules() for kind in kinds for hook in vars(part)[kind].values()]


class Acts(Lit):
    """Calls `act(module, moment)` at several moments of training, without a trace in the random numbers.

    Args:
        act: what to do.
        moments: when: "step", in `training_step`; "before" and "after" the callbacks at the end of a batch, "epoch",
            "validation".
        net: makes the network.
    """

    def __init__(self, act, moments, net=None):
        super().__init__(net)
        self.acts = partial(self._act, act, moments)

    def _act(self, act, moments, moment):
        if moment in moments and current_pass() is None:
            before = random_state()
            act(self, moment)
            set_random_state(before)

    def __getstate__(self):
        return {name: value for name, value in super().__getstate__().items() if name != "acts"}

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.acts("step")
        return loss

    def on_train_batch_end(self, *_):
        self.acts("after")

    def validation_step(self, batch, batch_idx):
        pass


class Tells(pl.Callback):
    """Tells the module of the moments that callbacks hear of first."""

    def on_train_batch_end(self, trainer, pl_module, *_):
        pl_module.acts("before")

    def on_train_epoch_end(self, trainer, pl_module):
        pl_module.acts("epoch")

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            pl_module.acts("validation")


# --- copies -----------------------------------------------------------------------------------------------------------


def by_pickle(module):
    return pickle.loads(pickle.dumps(module))


def by_torch(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def assert_a_copy_is_free(make_copy, module, moment):
    twin = make_copy(module)
    assert not any(isinstance(hook, Hook) for hook in hooks_of(twin))
    assert same(dict(twin.state_dict()), dict(module.state_dict()))
    net = ResNet(dropout=0.3, smooth=True)
    net.load_state_dict(module.net.state_dict())
    images = batch(2)[0]
    assert torch.equal(twin.net.eval()(images), net.eval()(images))


@row(
    "Around it",
    "`copy.deepcopy(module)`, `pickle.dumps(module)`, `torch.save(module)`, at any moment",
    "a copy has no live hook of ours (one made in an event's own step has some that do nothing), and loads "
    "where this package is not installed",
)
@pytest.mark.parametrize("make_copy", [copy.deepcopy, by_pickle, by_torch])
def test_copies(tmp_path, make_copy):
    """In the event's own step, in another callback before and after ours, and between events."""
    act = partial(assert_a_copy_is_free, make_copy)
    make = partial(Acts, act, ("step", "before", "after"))
    options = {"steps": (0, 2, 4, 5), "order1_steps": (0, 2, 4, 5), "eager": Lit, "callbacks": lambda: [Tells()]}
    twice(tmp_path, make, flags={"every_n_steps": 2, "order1_every_n_steps": 2}, **options)


LOAD_WITHOUT_US = """
import sys, torch
class Refuse:
    def find_spec(self, name, *_):
        if name.startswith("normgrad_lightning"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import conftest
from networks import batch
net = torch.load(sys.argv[1], weights_only=False)
assert any(part._forward_hooks for part in net.modules()), "this net was not saved in an event"
expected = torch.load(sys.argv[2])
assert torch.equal(net.eval()(batch(2)[0]), expected)
print("LOADED", "normgrad_lightning" in sys.modules)
"""


def test_a_network_that_was_saved_in_an_event_loads_where_we_are_not_installed(tmp_path):
    def save(module, moment):
        torch.save(module.net, tmp_path / "net.pt")
        twin = copy.deepcopy(module.net).eval()
        torch.save(twin(batch(2)[0]).detach(), tmp_path / "output.pt")

    train(partial(Acts, save, ("step",)), tmp_path, watching(), limit_train_batches=1)
    done = run_script(LOAD_WITHOUT_US, tmp_path / "net.pt", tmp_path / "output.pt")
    assert done.stdout.split() == ["LOADED", "False"], done.stderr[-2000:]


def run_script(code, *arguments):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=600, check=False)


def environment():
    here = Path(__file__).parents[1]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])}


# --- exports ----------------------------------------------------------------------------------------------------------


def small_net():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 2), nn.Softplus(), nn.Conv2d(4, 6, 3, 2), nn.Softplus(), nn.Flatten(), nn.Linear(90, 5)
    )


def script(module):
    return torch.jit.script(module.net)


def script_whole(module):
    return module.to_torchscript(method="script")


def trace(module):
    return torch.jit.trace(module.net, batch(2)[0])


def trace_whole(module):
    return module.to_torchscript(method="trace", example_inputs=batch(2)[0])


def export(module):
    return torch.export.export(module.net, (batch(2)[0],), strict=False).module()


def export_strictly(module):
    return torch.export.export(module.net, (batch(2)[0],), strict=True).module()


def fx(module):
    return torch.fx.symbolic_trace(module.net)


EXPORTS = [script, script_whole, trace, trace_whole, export, export_strictly, fx]


def assert_exports(how, module, moment):
    images = batch(2)[0]
    assert torch.equal(how(module)(images), copy.deepcopy(module.net)(images))


WATCH_SMALL_NET = {"layers": ["net.0", "net.2"], "every_n_steps": 2, "order1_every_n_steps": 4}


@row(
    "Around it",
    "`to_torchscript`, `torch.jit.script` and `trace`, `torch.export`, `torch.fx`",
    "scripting is for the end of a batch, after ours, or later: in an event's own step torch would compile the hooks",
)
@pytest.mark.parametrize("how", EXPORTS)
def test_exports(tmp_path, how):
    """From an event's end and from between events, from the end of an epoch and of a validation."""
    make = partial(Acts, partial(assert_exports, how), ("after", "epoch", "validation"), small_net)
    twice(
        tmp_path,
        make,
        eager=partial(Lit, small_net),
        flags=WATCH_SMALL_NET,
        layers=WATCH_SMALL_NET["layers"],
        steps=(0, 2),
        order1_steps=(0, 2),
        callbacks=lambda: [Tells()],
        run=lambda trainer, module, data: trainer.fit(module, data, loader(4)),
        limit_train_batches=3,
    )


@pytest.mark.parametrize(
    "how",
    [
        trace,
        trace_whole,
        export,
        export_strictly,
        fx,
    ],
)
def test_exports_in_an_events_own_step(tmp_path, how):
    """While the hooks are on: in `training_step`, or at the batch's end in a callback that comes before ours."""
    make = partial(Acts, partial(assert_exports, how), ("step", "before"), small_net)
    options = {"callbacks": lambda: [Tells()], "limit_train_batches": 1}
    plain = train(make, tmp_path / "plain", **options)
    run = train(make, tmp_path, watching(on_error="warn"), **options)
    assert_same(plain, run)
    assert not run.warned
    assert list(run.history.maps) == [0]


@pytest.mark.parametrize("how", [script, script_whole])
@pytest.mark.parametrize("moment", ["step", "before"])
def test_scripting_in_an_events_own_step_is_refused_by_torch(tmp_path, how, moment):
    """It compiles hooks, too. The README says where to do it instead."""
    make = partial(Acts, partial(assert_exports, how), (moment,), small_net)
    with pytest.raises(AttributeError, match="__name__"):
        train(make, tmp_path, watching(), callbacks=lambda: [Tells()])


# --- other callbacks --------------------------------------------------------------------------------------------------


@row(
    "Around it",
    "`EarlyStopping`, `LearningRateMonitor`, `ModelSummary`, `Timer`, `TQDMProgressBar`, `LambdaCallback`",
)
def test_callbacks_that_look_on(tmp_path):
    seen = []

    def others():
        return [
            callbacks.EarlyStopping("loss_epoch", patience=0, min_delta=10.0),
            callbacks.LearningRateMonitor("step", log_momentum=True),
            callbacks.ModelSummary(max_depth=2),
            callbacks.Timer("00:00:10:00"),
            callbacks.TQDMProgressBar(),
            callbacks.LambdaCallback(on_train_batch_end=lambda trainer, *_: seen.append(trainer.global_step)),
        ]

    options = {"enable_progress_bar": True, "enable_model_summary": True, "max_epochs": 9}
    twice(tmp_path, callbacks=others, steps=range(12), order1_steps=(0, 3, 6, 9), **options)
    assert seen == [*range(1, 13)] * 2


@row("Around it", "`DeviceStatsMonitor`")
def test_device_stats(tmp_path):
    def monitor():
        return [callbacks.DeviceStatsMonitor(cpu_stats=True)]

    runs = [train(Lit, tmp_path / str(c), c, callbacks=monitor) for c in (None, watching())]
    for run in runs:  # what it measures is never the same twice
        logged = run.traces["logged"]
        measured = [tag for tag in logged if tag.startswith("DeviceStatsMonitor")]
        assert {len(logged.pop(tag)) for tag in measured} == {6}
    assert_same(*runs)


@row("Around it", "`ModelCheckpoint`, also at each step", "its files are the same, and load with `weights_only=True`")
def test_checkpoints_of_each_step(tmp_path):
    def checkpoints():
        return [callbacks.ModelCheckpoint(every_n_train_steps=1, save_top_k=-1, filename="{step}")]

    runs = twice(tmp_path, callbacks=checkpoints, enable_checkpointing=True)
    plain, watched = (sorted(Path(run.trainer.log_dir).rglob("*.ckpt")) for run in runs)
    assert [path.name for path in plain] == [path.name for path in watched] == [f"step={i}.ckpt" for i in range(1, 7)]
    for ours, theirs in zip(watched, plain, strict=True):
        a, b = (torch.load(path, weights_only=True) for path in (ours, theirs))
        assert all(same(a[part], b[part]) for part in ("state_dict", "optimizer_states", "lr_schedulers"))


@row(
    "Around it",
    "`StochasticWeightAveraging`",
    "its last epoch trains nothing: it has no order-0 maps but those of the last event, from an extra pass",
)
def test_stochastic_weight_averaging(tmp_path):
    def average():
        return [callbacks.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)]

    twice(tmp_path, callbacks=average, max_epochs=2, steps=range(12), order1_steps=(0, 3, 6, 9, 12))


@row("Around it", "`EMAWeightAveraging`, `WeightAveraging`")
@pytest.mark.skipif(not hasattr(callbacks, "EMAWeightAveraging"), reason="from Lightning 2.6 on")
def test_weight_averaging(tmp_path):
    def average():
        return [callbacks.EMAWeightAveraging(decay=0.5, update_every_n_steps=1)]

    twice(tmp_path, callbacks=average)


@row("Around it", "`GradientAccumulationScheduler`", "an event is an optimizer step's first batch")
def test_gradient_accumulation_scheduler(tmp_path):
    def schedule():
        return [callbacks.GradientAccumulationScheduler({0: 1, 1: 3})]

    twice(tmp_path, callbacks=schedule, max_epochs=2, steps=range(8), order1_steps=(0, 3, 6, 7))


class HasBackbone(Lit):
    @property
    def backbone(self):
        return self.net.stem


@row("Around it", "`BackboneFinetuning`, `BaseFinetuning`: layers that are unfrozen in mid-run")
def test_unfreezing(tmp_path):
    def unfreeze():
        return [callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1)]

    order1_steps = (0, 3, 6, 9, 11)
    runs = twice(tmp_path, HasBackbone, callbacks=unfreeze, max_epochs=2, steps=range(12), order1_steps=order1_steps)
    assert runs[0].moments[5].frozen
    assert not runs[0].moments[6].frozen


@row("Around it", "`ModelPruning`")
def test_pruning(tmp_path):
    """Its weights have other names, so there is no reference; the runs are the same, and there are maps."""

    def prune():
        return [callbacks.ModelPruning("l1_unstructured", amount=0.3, make_pruning_permanent=False)]

    plain = train(Lit, tmp_path / "plain", callbacks=prune, max_epochs=2)
    watched = train(Lit, tmp_path / "watched", watching(), callbacks=prune, max_epochs=2)
    assert_same(plain, watched)
    assert list(watched.history.maps) == list(range(12))
    assert list(watched.history.order1) == [0, 3, 6, 9, 11]


class Tunable(Lit):
    def __init__(self):
        super().__init__()
        self.batch_size, self.lr = 2, 0.05

    def train_dataloader(self):
        return loader(24, self.batch_size)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


TUNERS = {
    "`BatchSizeFinder`": lambda: callbacks.BatchSizeFinder(max_trials=2, steps_per_trial=2, init_val=2),
    "`LearningRateFinder`": lambda: callbacks.LearningRateFinder(num_training_steps=8, min_lr=1e-4, max_lr=1e-1),
}


@row("Around it", "`BatchSizeFinder`, `LearningRateFinder`", "their trial steps are not watched")
@pytest.mark.parametrize("tuner", TUNERS)
def test_tuners(tmp_path, tuner):
    options = {"callbacks": lambda: [TUNERS[tuner]()], "run": lambda trainer, module, _: trainer.fit(module)}
    _, watched = twice(tmp_path, Tunable, steps=None, order1_steps=None, **options)
    steps = watched.trainer.global_step
    assert list(watched.history.maps) == list(range(steps))
    assert list(watched.history.order1) == sorted({*range(0, steps, 3), steps - 1})


@row("Around it", '`profiler="simple"`, `"advanced"`, `"pytorch"`')
@pytest.mark.parametrize(
    "profiler",
    [SimpleProfiler, *(pytest.param(p, marks=pytest.mark.slow) for p in (AdvancedProfiler, PyTorchProfiler))],
)
def test_profilers(tmp_path, profiler):
    for name in ("plain", "watched"):
        (tmp_path / name).mkdir()
    plain = train(Lit, tmp_path / "plain", profiler=profiler(dirpath=tmp_path / "plain", filename="profile"))
    own = profiler(dirpath=tmp_path / "watched", filename="profile")
    watched = train(Lit, tmp_path / "watched", watching(), profiler=own)
    assert_same(plain, watched)
    assert panels(watched.trainer)


@row("Around it", "`barebones=True`", "no logger, so no panels: only `callback.maps`")
def test_barebones(tmp_path):
    twice(tmp_path, barebones=True, log_every_n_steps=0)


# --- ends and beginnings ----------------------------------------------------------------------------------------------


class Evaluated(Lit):
    def __init__(self):
        super().__init__()
        self.hooks = []

    def evaluate(self, batch, batch_idx):
        self.hooks.append(len(hooks_of(self)))
        return self.net(batch[0])

    validation_step = test_step = predict_step = evaluate


@row("Around it", "`trainer.validate`, `test`, `predict`", "nothing is attached")
def test_evaluation(tmp_path):
    """Alone, and before and after a fit that is evaluated in its middle, too."""

    def evaluate(trainer, module, data):
        for function in (trainer.validate, trainer.test, trainer.predict):
            function(module, data)
        trainer.fit(module, data, loader(8))
        for function in (trainer.validate, trainer.test, trainer.predict):
            function(module, data)

    _, watched = twice(tmp_path, Evaluated, run=evaluate, val_check_interval=2)
    assert len(watched.module.hooks) > 6 * 6
    assert not any(watched.module.hooks)


INTERRUPTED = """
import signal, sys, time
import conftest
from twice import *

class Slow(pl.Callback):
    def on_train_batch_end(self, trainer, *_):
        print("step", trainer.global_step, flush=True)
        time.sleep(0.3 if trainer.global_step > 3 else 0)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
module = Lit()
trainer = pl.Trainer(
    max_epochs=50, accelerator="cpu", default_root_dir=sys.argv[1], enable_progress_bar=False, log_every_n_steps=1,
    enable_model_summary=False, enable_checkpointing=False, callbacks=[watching(), Slow()],
)
try:
    trainer.fit(module, loader())
finally:
    print("hooks", sum(map(sum, map(hooks_on, module.modules()))), flush=True)
"""


def begin(folder):
    command = [sys.executable, "-X", "faulthandler", "-c", INTERRUPTED, str(folder)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment()}
    return subprocess.Popen(command, **pipes)


def interrupt(process):
    """The exit code, the last line and the errors of a training run that the user stops with Ctrl-C in its epoch."""
    with process:
        if "step 4\n" not in process.stdout:
            pytest.fail(f"The run has ended before its fifth step:\n{process.communicate()[1]}")
        process.send_signal(signal.SIGINT)
        try:
            rest, errors = process.communicate(timeout=600)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # and it writes where it hangs
            rest, errors = process.communicate()
            pytest.fail(f"It goes on long after Ctrl-C. Its last line: {rest.splitlines()[-1:]}; its errors:\n{errors}")
    return process.returncode, rest.splitlines()[-1], errors


@row("Around it", "Ctrl-C", "hooks are gone, and the panels of all events so far are in the log")
def test_ctrl_c(tmp_path):
    code, end, errors = interrupt(begin(tmp_path))
    assert code == 1  # Lightning's own
    assert end == "hooks 0"
    assert "NormGrad failed" not in errors
    (folder,) = (tmp_path / "lightning_logs").iterdir()
    events = EventAccumulator(str(folder), size_guidance={"images": 0})
    events.Reload()
    steps = [
        [e.step for e in events.Images(tag)] for tag in events.Tags()["images"] if tag.startswith("normgrad_order0")
    ]
    assert len(steps) == len(LAYERS)
    assert all(seen[:4] == [0, 1, 2, 3] for seen in steps)


class FitsMany:
    """Fits new modules with new callbacks, and keeps weak references to all of it."""

    def __init__(self):
        self.references = []

    def fit(self):
        callback, module = watching(on_error="raise"), Lit()
        trainer = pl.Trainer(
            max_epochs=1,
            limit_train_batches=2,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            callbacks=[callback],
        )
        trainer.fit(module, loader())
        assert not hooks_of(module)
        self.references += map(weakref.ref, (callback, module, module.net.stage1, callback.maps["net.stage1"]))

    def count_after(self, fits):
        """How many of our objects and of all tensors are alive after so many fits, and how much memory python has."""
        for _ in range(fits):
            self.fit()
        gc.collect()
        alive = [o for o in gc.get_objects() if isinstance(o, NormGrad | Hook)]
        tensors = sum(isinstance(o, Tensor) for o in gc.get_objects())
        return len(alive), tensors, tracemalloc.get_traced_memory()[0]


@row("Around it", "many fits in one process", "nothing is left behind")
def test_many_fits_leave_nothing_behind():
    many = FitsMany()
    many.count_after(1)  # what torch and Lightning keep for good is there now
    tracemalloc.start()
    try:
        alive_before, tensors_before, memory_before = many.count_after(1)
        alive, tensors, memory = many.count_after(4)
    finally:
        tracemalloc.stop()
    assert not any(reference() is not None for reference in many.references)
    assert alive == alive_before
    assert tensors == tensors_before
    assert memory - memory_before < 100_000
