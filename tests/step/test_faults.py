"""Whatever goes wrong on our side, training ends with the same bits and one warning says why.

Each test trains with and without the callback and compares all that a run leaves behind. Disks are really full, folders
really lost and files really too large; only what cannot be had otherwise is made to fail by a monkeypatch.
"""

import itertools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from networks import batch
from pytorch_lightning.loggers import CSVLogger
from run_script import run_python
from tensorboard.compat.tensorflow_stub.io.gfile import GFile
from torch import nn
from twice import LAYERS, Lit, assert_same, panels, scalars, train, watching

from normgrad_lightning.layers.own_passes import current_pass
from normgrad_lightning.maths.products import OuterProducts
from normgrad_lightning.views import drawing

TAGS = [f"{i:02d}_{layer}" for i, layer in enumerate(LAYERS)]
KINDS = ("order1", "adversarial", "contrast")
ALL_PANELS = {f"normgrad_order0/{tag}": [0, 1, 2, 3, 4, 5] for tag in TAGS} | {
    f"normgrad_{kind}/{tag}": [0, 3, 5] for kind in KINDS for tag in TAGS
}


def survived(folder, make=Lit, *, flags=None, root=None, **options):
    """The run with the callback, after a check that it left the same behind as the one without."""
    plain = train(make, folder / "plain", **options)
    watched = train(make, root or folder / "watched", watching(on_error="warn", **(flags or {})), **options)
    assert_same(plain, watched)
    return watched


def assert_raised(folder, error, match, make=Lit, **options):
    """Raise unless the failure stops training for somebody who asked for that, and leaves no hook behind."""
    module = make()
    with pytest.raises(error, match=match):
        train(lambda: module, folder / "raise", watching(), **options)
    assert not hooks_of(module)


def hooks_of(module):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [hook for part in module.modules() for kind in kinds for hook in vars(part)[kind].values()]


def without(steps, of=ALL_PANELS):
    """The panels of all other steps."""
    return {tag: [step for step in seen if step not in steps] for tag, seen in of.items()}


CALLS = []  # of each `Sometimes`, where passes put nothing back


class Sometimes:
    """Runs a function, but raises at some of its calls.

    Args:
        function: what it stands for.
        error: what is raised.
        at: the numbers of these calls, from 0 on.
    """

    def __init__(self, function, error, at):
        self.function, self.error, self.at = function, error, at
        self.index = len(CALLS)
        CALLS.append(0)

    def __call__(self, *args, **kwargs):
        CALLS[self.index] += 1
        if CALLS[self.index] - 1 in self.at:
            raise self.error
        return self.function(*args, **kwargs)

    def __get__(self, owner, kind=None):
        return lambda *args, **kwargs: self(owner, *args, **kwargs)


ONCE, ALWAYS = range(1), range(10**6)


# --- loggers ----------------------------------------------------------------------------------------------------------


def refuse_images(monkeypatch, at):
    """Let the file of TensorBoard's writer raise at these events with images; scalars pass."""
    write, events = GFile.write, itertools.count()

    def write_all_but_images(self, content):
        if b"JFIF" in content and next(events) in at:
            raise ConnectionError("the server is asleep")
        return write(self, content)

    monkeypatch.setattr(GFile, "write", write_all_but_images)


def test_a_logger_that_takes_no_image_is_one_warning(tmp_path, monkeypatch):
    refuse_images(monkeypatch, ALWAYS)
    run = survived(tmp_path)
    (told,) = run.warned
    assert "NormGrad failed while writing to TensorBoard" in told
    assert told.endswith("training continues. ConnectionError: the server is asleep")
    assert not panels(run.trainer)
    assert list(run.history.maps) == [0, 1, 2, 3, 4, 5]
    assert_raised(tmp_path, ConnectionError, "the server is asleep")


def test_after_a_logger_refused_one_event_all_others_are_there(tmp_path, monkeypatch):
    refuse_images(monkeypatch, ONCE)
    run = survived(tmp_path)
    assert len(run.warned) == 1
    assert panels(run.trainer) == without({0})


# --- disks and files --------------------------------------------------------------------------------------------------

DISK = 4 * 2**20


@pytest.fixture
def tiny_disk(tmp_path):
    """A real disk of 4 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs is not allowed here (it needs root on Linux)")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk, left):
    """Leave so many bytes free above the tenth of the disk that is for the run itself."""
    (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - DISK // 10 - left))


class FreesSpace(pl.Callback):
    """Takes the filler off the disk at the start of a batch."""

    def __init__(self, disk, batch_idx=3):
        self.disk, self.batch_idx = disk, batch_idx

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.batch_idx and trainer.default_root_dir == str(self.disk):
            (self.disk / "filler").unlink()


def assert_told_of_a_full_disk(run):
    (told,) = [sentence for sentence in run.warned if "failed" in sentence]
    assert "NormGrad failed while writing to" in told
    assert "training continues. OSError: [Errno 28]" in told
    assert "MB are left on the disk" in told
    assert "MB free for the run's own files" in told


def test_a_full_disk_costs_panels_and_nothing_of_the_run_itself(tmp_path, tiny_disk):
    fill(tiny_disk, left=400_000)
    run = survived(tmp_path, root=tiny_disk)
    assert_told_of_a_full_disk(run)
    written = panels(run.trainer)
    assert 0 < len(written[f"normgrad_order0/{TAGS[0]}"]) < 6  # what fitted
    assert len({tuple(written[f"normgrad_order0/{tag}"]) for tag in TAGS}) == 1  # whole events, or nothing of them
    assert scalars(run.trainer)["loss_step"][-1][0] == 5
    assert_raised(tmp_path, OSError, "MB are left on the disk", default_root_dir=tiny_disk)


def test_once_there_is_space_again_panels_are_written_to_tensorboard_again(tmp_path, tiny_disk):
    fill(tiny_disk, left=0)
    run = survived(tmp_path, root=tiny_disk, callbacks=lambda: [FreesSpace(tiny_disk)])
    assert_told_of_a_full_disk(run)
    assert panels(run.trainer) == without({0, 1, 2})


def test_a_full_disk_and_files(tmp_path, tiny_disk):
    """Of a CSVLogger's run, whose panels are files: no half of a file, and panels again once there is space."""
    fill(tiny_disk, left=60_000)
    plain = train(Lit, tmp_path, logger=CSVLogger(tmp_path))
    logger = CSVLogger(tiny_disk)
    callbacks = {"callbacks": lambda: [FreesSpace(tiny_disk)]}
    flags = {"views": ["overview", "panels"], "probe": False}
    run = train(Lit, tiny_disk, watching(on_error="warn", **flags), logger=logger, **callbacks)
    assert_same(plain, run)
    assert_told_of_a_full_disk(run)
    assert Path(logger.log_dir, "metrics.csv").read_text() == Path(plain.trainer.log_dir, "metrics.csv").read_text()
    files = [path for path in tiny_disk.rglob("*") if path.is_file() and "normgrad" in str(path)]
    steps = [int(path.stem.removeprefix("step_")) for path in files]  # raises for the half of a file
    assert 0 < sum(step < 3 for step in steps) < 5
    order0, order1 = 3 * (1 + 3), 2 * 3 * (1 + 3)  # overviews and panels of three steps, and of two
    assert sum(step >= 3 for step in steps) == order0 + order1


LARGE_FILES = """
import resource, sys
import conftest
from twice import *
make, folder = Lit, sys.argv[1]
plain = train(make, folder + "/plain")
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))
watched = train(make, folder + "/watched", watching(on_error="warn", views=["overview", "panels"]))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert_same(plain, watched)
(told,) = watched.warned
assert "File too large" in told or "Errno 27" in told, told
assert 0 < sum(map(len, panels(watched.trainer).values())) < 3 * 16 + 3 * 4
print("SAME")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no such limit")
def test_an_event_file_that_may_not_grow_costs_panels_and_not_the_run(tmp_path):
    """`ulimit -f`, as some clusters set it: at the limit TensorBoard's writer would be broken for good."""
    done = run_script(tmp_path, LARGE_FILES)
    assert done.stdout.splitlines()[-1:] == ["SAME"], done.stderr[-2000:]


def run_script(folder, code):
    here = Path(__file__).parents[1]
    return run_python(folder, "-c", code, folder, PYTHONPATH=os.pathsep.join([str(here), str(here.parent)]))


def disappears(folder):
    folder.rename(folder.with_name("moved"))


def is_a_file(folder):
    folder.rename(folder.with_name("moved"))
    folder.write_text("in the way")


def comes_back(folder):
    if folder.is_file():
        folder.unlink()
    folder.with_name("moved").rename(folder)


def cannot_be_written(folder):
    remount(folder, "ro")


def can_be_written(folder):
    remount(folder, "rw")


def remount(folder, how):
    disk = next((parent for parent in folder.parents if parent.is_mount()), None)
    if disk is not None and disk.name == "disk":  # not in the run without the callback, which is elsewhere
        subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)


class Away(pl.Callback):
    """Takes the folder of the logs away while callbacks end the third batch."""

    def __init__(self, how):
        self.how = how

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 2:
            getattr(trainer.logger.experiment, "flush", trainer.logger.save)()
            self.how(Path(trainer.log_dir))


def brings_back(how):
    """A module that has the folder back before Lightning logs the values of that batch."""

    class BringsBack(Lit):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 2:
                how(Path(self.trainer.log_dir))

    return BringsBack


@pytest.mark.parametrize(
    ("goes", "returns", "told"),
    [
        (disappears, comes_back, "FileNotFoundError: [Errno 2]"),
        (is_a_file, comes_back, "NotADirectoryError: [Errno 20]"),
        (cannot_be_written, can_be_written, "OSError: [Errno 30] Read-only file system"),
    ],
)
def test_a_folder_that_is_away_during_an_event_costs_that_event(tmp_path, tiny_disk, goes, returns, told):
    """As a network's disk is, for a moment: the run itself writes nothing in that time, so it must not notice."""
    run = survived(tmp_path, brings_back(returns), root=tiny_disk, callbacks=lambda: [Away(goes)])
    (sentence,) = run.warned
    assert "NormGrad failed while writing to TensorBoard" in sentence
    assert f"training continues. {told}" in sentence
    assert panels(run.trainer) == without({2})


@pytest.mark.parametrize(
    ("goes", "returns", "told"),
    [(is_a_file, comes_back, "Error: [Errno "), (cannot_be_written, can_be_written, "OSError: [Errno 30]")],
)
def test_files_are_written_again_when_their_folder_is_back(tmp_path, tiny_disk, goes, returns, told):
    options = {"callbacks": lambda: [Away(goes)]}
    plain = train(brings_back(returns), tmp_path, logger=CSVLogger(tmp_path), **options)
    run = train(brings_back(returns), tiny_disk, watching(on_error="warn"), logger=CSVLogger(tiny_disk), **options)
    assert_same(plain, run)
    (sentence,) = [sentence for sentence in run.warned if "failed" in sentence]
    assert "NormGrad failed while writing to" in sentence
    assert told in sentence
    assert {path.stem for path in tiny_disk.rglob("*.jpg")} == {f"step_0000000{step}" for step in (0, 1, 3, 4, 5)}


# --- drawing ----------------------------------------------------------------------------------------------------------


def too_wide(*args, **kwargs):
    """A panel wider than a JPEG can be."""
    return np.zeros((1, 70_000, 4), np.uint8)


@pytest.mark.parametrize(
    ("place", "broken", "error", "first"),
    [
        ("views.panels.Sheet.panel", too_wide, OSError, "panels"),
        ("views.drawing._paint", Sometimes(None, LookupError("no such colour"), ALWAYS), LookupError, "overview"),
    ],
)
def test_a_panel_that_cannot_be_drawn_is_one_warning(tmp_path, monkeypatch, place, broken, error, first):
    monkeypatch.setattr(f"normgrad_lightning.{place}", broken)
    run = survived(tmp_path)
    (told,) = run.warned
    assert f"NormGrad failed while drawing {first}; training continues. {error.__name__}" in told
    assert not panels(run.trainer)
    assert list(run.history.maps) == [0, 1, 2, 3, 4, 5]
    assert list(run.history.order1) == [0, 3, 5]
    assert_raised(tmp_path, error, None)


def test_after_one_panel_that_could_not_be_drawn_later_events_are(tmp_path, monkeypatch):
    broken = Sometimes(drawing.jpeg, MemoryError("no room for a picture"), ONCE)
    monkeypatch.setattr("normgrad_lightning.views.panels.jpeg", broken)
    run = survived(tmp_path)
    (told,) = run.warned
    assert told.endswith("MemoryError: no room for a picture")
    assert panels(run.trainer) == without({0})


# --- hooks ------------------------------------------------------------------------------------------------------------


def break_hooks(monkeypatch, where, at):
    """Let the norms in a forward (`x_norms`) or backward (`g_norms`) hook raise, but not in passes of our own."""
    norms = getattr(OuterProducts, where)
    broken = Sometimes(norms, RuntimeError("we are broken"), at)
    in_training = lambda self, t: (broken if current_pass() is None else norms)(self, t)  # noqa: E731
    monkeypatch.setattr(OuterProducts, where, in_training)


@pytest.mark.parametrize("where", ["x_norms", "g_norms"])
def test_hooks_that_always_raise_are_one_warning_for_each_layer(tmp_path, monkeypatch, where):
    break_hooks(monkeypatch, where, ALWAYS)
    run = survived(tmp_path, flags={"layers": LAYERS})
    assert run.warned == [f"NormGrad cannot read the layer {name!r}: RuntimeError: we are broken." for name in LAYERS]
    assert not run.history.maps
    assert list(run.history.order1) == [0, 3, 5]  # these have passes of their own
    with pytest.raises(RuntimeError, match=f"NormGrad cannot read the layer '{LAYERS[0]}': RuntimeError: we are br"):
        train(Lit, tmp_path / "raise", watching(layers=LAYERS))


@pytest.mark.parametrize("where", ["x_norms", "g_norms"])
def test_hooks_that_always_raise_are_one_warning_where_no_layer_is_named(tmp_path, monkeypatch, where):
    break_hooks(monkeypatch, where, ALWAYS)
    run = survived(tmp_path)
    assert run.warned == ["NormGrad found no layer to read: RuntimeError: we are broken."]
    assert_raised(tmp_path, RuntimeError, "we are broken")


@pytest.mark.parametrize(
    ("where", "step"),
    [
        ("x_norms", 0),
        ("x_norms", 1),
        ("g_norms", 0),
        ("g_norms", 1),
    ],
)
def test_a_hook_that_raised_once_costs_the_map_of_one_layer(tmp_path, monkeypatch, where, step):
    break_hooks(monkeypatch, where, [step * len(LAYERS)])
    run = survived(tmp_path, flags={"layers": LAYERS})
    (told,) = run.warned
    assert told.endswith("RuntimeError: we are broken.")
    (broken,) = [name for name in LAYERS if repr(name) in told]
    assert {at: set(LAYERS) - set(maps) for at, maps in run.history.maps.items()} == {
        at: {broken} if at == step else set() for at in range(6)
    }
    assert list(run.history.order1) == [0, 3, 5]


def test_a_users_own_hook_that_raises_reaches_the_user_unchanged(tmp_path):
    error, module = LookupError("mine"), Lit()
    module.net.stage2.register_forward_hook(Sometimes(lambda *_: None, error, [3]))
    with pytest.raises(LookupError) as raised:
        train(lambda: module, tmp_path, watching(order1_every_n_steps=None))
    assert raised.value is error
    assert len(hooks_of(module)) == 1
    assert all(isinstance(p, torch.nn.Parameter) for p in module.parameters())


@pytest.mark.parametrize("step", [0, 3])
def test_an_error_in_the_users_step_reaches_the_user_unchanged(tmp_path, step):
    error = LookupError("mine")
    fails = in_training(Sometimes(lambda: None, error, [step]))
    module = fails()
    with pytest.raises(LookupError) as raised:
        train(lambda: module, tmp_path, watching())
    assert raised.value is error
    assert not hooks_of(module)


def in_training(do):
    """A module that does this in each of its own steps, before the loss is computed."""

    class InTraining(Lit):
        def loss(self, batch):
            if current_pass() is None:
                do()
            return super().loss(batch)

    return InTraining


# --- passes of our own ------------------------------------------------------------------------------------------------


def in_our_passes(do, *net):
    """A module that does this after the loss is computed, but in none of its own steps."""

    class InOurPasses(Lit):
        def __init__(self):
            super().__init__(*net)

        def loss(self, batch):
            loss = super().loss(batch)
            if current_pass() is not None:
                do()
            return loss

    return InOurPasses


@pytest.mark.parametrize("error", [LookupError("mine"), RuntimeError("CUDA error")])
def test_a_loss_that_fails_in_our_passes_only_costs_their_maps(tmp_path, error):
    run = survived(tmp_path, in_our_passes(Sometimes(None, error, ALWAYS)))
    (told,) = run.warned
    assert told.startswith("NormGrad failed while running the order-1 passes")
    assert told.endswith(f"training continues. {type(error).__name__}: {error}")
    assert list(run.history.maps) == [0, 1, 2, 3, 4, 5]
    assert panels(run.trainer) == {tag: steps for tag, steps in ALL_PANELS.items() if "order0" in tag}
    assert_raised(tmp_path, type(error), str(error), in_our_passes(Sometimes(None, error, ALWAYS)))


@pytest.mark.parametrize("broken_passes", [range(5), [7]])
def test_after_a_pass_that_failed_once_the_next_event_has_its_maps(tmp_path, broken_passes):
    """`"auto"` tries up to four passes for its layers: of an image and of the batch, each without copies and with."""
    error = RuntimeError("not now")
    make = in_our_passes(Sometimes(lambda: None, error, broken_passes))
    run = survived(tmp_path, make)
    assert len(run.warned) == 1
    assert panels(run.trainer) == ALL_PANELS | {f"normgrad_{kind}/{tag}": [3, 5] for kind in KINDS for tag in TAGS}


@pytest.mark.parametrize("broken_passes", [range(1), range(3)])
def test_a_look_for_layers_that_works_in_the_end_costs_nothing(tmp_path, broken_passes):
    run = survived(tmp_path, in_our_passes(Sometimes(lambda: None, RuntimeError("not now"), broken_passes)))
    assert not run.warned
    assert panels(run.trainer) == ALL_PANELS


def compiled_net():
    net = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.Softplus(), nn.Conv2d(4, 4, 3, 2), nn.Flatten(), nn.LazyLinear(5))
    net(batch(1)[0])
    return torch.compile(net, backend="aot_eager")


def test_a_rehearsal_that_fails_costs_its_maps(tmp_path):
    """A rehearsal is tried without copies of the weights, then with: at the first and the third step, both fail."""
    make = in_our_passes(Sometimes(lambda: None, RuntimeError("not now"), [0, 1, 2, 4, 5]), compiled_net)
    run = survived(tmp_path, make, flags={"order1_every_n_steps": None})
    (told,) = run.warned
    assert told == ("NormGrad failed while replaying the training step; training continues. RuntimeError: not now")
    assert list(run.history.maps) == [1, 3, 4, 5]
    make = in_our_passes(Sometimes(lambda: None, RuntimeError("not now"), ALWAYS), compiled_net)
    assert_raised(tmp_path, RuntimeError, "not now", make)


# --- checkpoints and warnings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "on_error"),
    [
        ({"last_event": 5}, "warn"),
        ({"last_event": 5}, "raise"),
        ({"steps": [5]}, "warn"),
        ({"last_event": 5, "last_order1": 3, "last_reading": 5, "random": [99, [], None]}, "warn"),
    ],
)
def test_a_checkpoint_of_another_version_can_be_resumed_from(tmp_path, state, on_error):
    callback = watching(on_error=on_error)
    first = train(Lit, tmp_path / "first", callback)
    path = tmp_path / "first.ckpt"
    first.trainer.save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["callbacks"][callback.state_key] = state
    torch.save(checkpoint, path)
    run = survived(tmp_path, fit={"ckpt_path": path}, max_epochs=2)
    lightnings = [told for told in run.warned if told.startswith("Be aware that when using `ckpt_path`, callbacks")]
    assert len(lightnings) == (on_error != run.callback.on_error)  # of other flags, and so another key
    assert len(run.warned) - len(lightnings) <= 1
    assert list(run.history.maps) == [6, 7, 8, 9, 10, 11]


WARNINGS_AS_ERRORS = """
import sys, warnings
import conftest
from twice import *
warnings.simplefilter("error")
for noise in (".*many workers.*", ".*LeafSpec.*"):  # Lightning's own
    warnings.filterwarnings("ignore", noise)
from pytorch_lightning.loggers.logger import Logger
class Mine(Logger):
    name, version = "mine", 0
    def log_metrics(self, metrics, step=None): ...
    def log_hyperparams(self, params): ...
pl.seed_everything(7, verbose=False)
callback = watching(on_error="warn", layers=["net.stage1", "net.fc"])
trainer = pl.Trainer(
    max_epochs=1, accelerator="cpu", default_root_dir=sys.argv[1], logger=Mine(), callbacks=[callback],
    enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, log_every_n_steps=1,
)
trainer.fit(Lit(), loader())
print(trainer.global_step, *callback.maps, *callback.order1)
"""


def test_warnings_as_errors_do_not_stop_training(tmp_path):
    """As with `-W error`; a note of ours about the logger, and another about a layer, are due in this run."""
    done = run_script(tmp_path, WARNINGS_AS_ERRORS)
    assert done.stdout.splitlines()[-1:] == ["6 net.stage1 order1 adversarial contrast"], done.stderr[-2000:]
    assert done.stderr.count("cannot log images to Mine") == 1
    assert done.stderr.count("NormGrad cannot read the layer 'net.fc'") == 1


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


class Interrupts(pl.Callback):
    """What Ctrl-C does at the start or the end of a batch, in the run without the callback."""

    def __init__(self, hook, batch_idx):
        setattr(self, hook, lambda *args: press_ctrl_c() if args[-1] == batch_idx else None)


def press_ctrl_c():
    signal.default_int_handler(signal.SIGINT, None)  # what runs when it is pressed


def stops(trainer, module, data):
    with pytest.raises(SystemExit):
        trainer.fit(module, data)


def assert_interrupted_alike(folder, make, hook, batch_idx):
    """Compare a run that is interrupted inside of something of ours with one interrupted beside it."""
    plain = train(Lit, folder / "plain", run=stops, callbacks=lambda: [Interrupts(hook, batch_idx)])
    watched = train(make, folder / "watched", watching(on_error="warn"), run=stops)
    plain.traces["attributes"] = watched.traces["attributes"]
    assert_same(plain, watched)
    assert not watched.warned
    assert not hooks_of(watched.module)
    optimized = [p for group in watched.trainer.optimizers[0].param_groups for p in group["params"]]
    assert all(a is b for a, b in zip(optimized, watched.module.parameters(), strict=True))
    return watched


class CtrlC(Sometimes):
    """Runs a function; at one of its calls, the user presses Ctrl-C."""

    def __init__(self, function, at):
        super().__init__(function, None, [])
        self.pressed_at = at

    def __call__(self, *args, **kwargs):
        CALLS[self.index] += 1
        if CALLS[self.index] - 1 == self.pressed_at:
            press_ctrl_c()
        return self.function(*args, **kwargs)


@pytest.mark.parametrize("number", [0, 5, 25])
def test_ctrl_c_in_a_pass_of_ours_stops_training_and_leaves_no_trace(tmp_path, number):
    step = 3 * (number > 20)
    run = assert_interrupted_alike(tmp_path, in_our_passes(CtrlC(lambda: None, number)), "on_train_batch_start", step)
    assert list(run.history.maps) == list(range(step))


def test_ctrl_c_while_drawing_stops_training_and_leaves_no_trace(tmp_path, monkeypatch):
    drawn_at_step_0 = 3 + 3 * 3 + 3  # order 0, three kinds of order 1, the probe
    monkeypatch.setattr("normgrad_lightning.views.panels.jpeg", CtrlC(drawing.jpeg, drawn_at_step_0 + 1))
    run = assert_interrupted_alike(tmp_path, Lit, "on_train_batch_end", 1)
    assert panels(run.trainer) == {tag: [0] for tag in ALL_PANELS}


class Touchy(bytearray):
    """Bytes that are being put back for the third time when the user presses Ctrl-C."""

    cleared = 0

    def __setitem__(self, where, what):
        Touchy.cleared += 1
        if Touchy.cleared == 3:
            press_ctrl_c()
        super().__setitem__(where, what)


class HoldsTouchy(Lit):
    def __init__(self):
        super().__init__()
        self.touchy = Touchy()

    def loss(self, batch):
        if current_pass() is not None:
            self.touchy.append(1)
        return super().loss(batch)


def test_ctrl_c_while_the_model_is_put_back_leaves_it_whole(tmp_path):
    """The worst moment: the model still has the weights of the pass, which are not those of training."""
    Touchy.cleared = 0
    assert_interrupted_alike(tmp_path, HoldsTouchy, "on_train_batch_start", 0)
