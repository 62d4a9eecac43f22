"""One callback for both Lightnings: accepted by both in any order of imports, and nothing that they share changes."""

import json
import pickle
from functools import cache
from pathlib import Path

import pytest
from run_script import run_python

from normgrad_lightning import NormGradCallback

TESTS = Path(__file__).parent
FLAVOURS = ("pytorch_lightning", "lightning.pytorch")
OTHER = dict(zip(FLAVOURS, ["lightning", "pytorch_lightning"], strict=True))
OURS = "from normgrad_lightning import NormGradCallback"
SEEDED = "import random, numpy, torch; random.seed(0); numpy.random.seed(0); torch.manual_seed(0)"
MINE = """
import logging, warnings
warnings.formatwarning = lambda message, *_: f"as I like it: {{message}}\\n"
logging.getLogger({flavour!r}).setLevel(logging.ERROR)
"""
TRAIN = """
def fit(flavour, callbacks=None, **options):
    class Lit(flavour.LightningModule):
        def __init__(self):
            super().__init__()
            features = [torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 4, 3, 2), torch.nn.Dropout(0.2)]
            self.net = torch.nn.Sequential(*features, torch.nn.Flatten(), torch.nn.Linear(144, 2))
        def training_step(self, batch, batch_idx):
            loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    flavour.seed_everything(0)
    data = torch.utils.data.TensorDataset(torch.randn(8, 3, 16, 16), torch.arange(8) % 2)
    options = dict(max_epochs=1, accelerator="cpu", enable_progress_bar=False, **options)
    trainer = flavour.Trainer(callbacks=callbacks, **options)
    trainer.fit(Lit(), torch.utils.data.DataLoader(data, 4, shuffle=True))
    return trainer
"""
EVERY_STEP = "every_n_steps=1, order1_every_n_steps=1"


def said(folder, *lines, **environment):
    """What the last line of a script prints, as an object, and what it has written to stderr."""
    code = "\n".join(["import json", "from global_state import state", SEEDED, "states = []", *lines])
    done = run_python(folder, "-c", code, imported=("torch",), PYTHONPATH=str(TESTS), **environment)
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def states(folder, *lines, **environment):
    """The global state after each of these pieces of a script, and what it has written to stderr."""
    pieces = [f"{line}\nstates.append(state())" for line in lines]
    return said(folder, *pieces, 'warnings.warn("hot")', "print(json.dumps(states))", **environment)


# ---------------------------------------------------------------- nothing changes


@pytest.mark.parametrize("flavour", [FLAVOURS[0], pytest.param(FLAVOURS[1], marks=pytest.mark.slow)])
def test_neither_our_import_nor_a_run_changes_anything(flavour, tmp_path):
    """Loggers and the format of warnings are also those that the user has set."""
    lightning, mine = f"import {flavour} as L", MINE.format(flavour=flavour)
    fit, fit_with_ours = (
        f"{TRAIN}\nfit(L)",
        f"{TRAIN}\nassert fit(L, [NormGradCallback({EVERY_STEP})]).callbacks[0].maps",
    )
    plain, _ = states(tmp_path / "plain", lightning, mine, fit)
    after, stderr_after = states(tmp_path / "after", lightning, mine, OURS, fit_with_ours)
    before, stderr_before = states(tmp_path / "before", OURS, lightning, mine, fit_with_ours)
    asked = {"NORMGRAD": "1", "NORMGRAD_EVERY_N_STEPS": "1", "NORMGRAD_ORDER1_EVERY_N_STEPS": "1"}
    switched_on, stderr_on = states(tmp_path / "on", lightning, mine, fit, **asked)

    assert OTHER[flavour] not in plain[-1]["Lightnings"]
    assert after == [plain[0], plain[1], plain[1], plain[2]]
    assert before[1:] == plain
    assert before[0]["Lightnings"] == []
    assert not [name for name in before[0]["loggers"] if "lightning" in name]
    assert switched_on == plain
    for run, stderr in {"after": stderr_after, "before": stderr_before, "on": stderr_on}.items():
        assert list((tmp_path / run).rglob("events*"))
        assert "NormGrad reads" not in stderr
        assert "as I like it: hot" in stderr


# ---------------------------------------------------------------- accepted by both

L, P = "import lightning.pytorch as L", "import pytorch_lightning as P"
MAKE = """
class Mine(NormGradCallback): pass
early, mine = NormGradCallback(every_n_steps=7), Mine()
"""
ORDERS = {
    "first": ([OURS, L, P], 0),
    "first, the other way": ([OURS, P, L], 0),
    "in between": ([L, OURS, P], 1),
    "in between, the other way": ([P, OURS, L], 1),
    "last": ([P, L, OURS], 2),
}
LOOK = """
import copy, pickle
from lightning.pytorch.cli import LightningCLI as LCLI
from pytorch_lightning.cli import LightningCLI as PCLI

def flags_by_cli(flavour, CLI):
    class Own(CLI):
        def add_arguments_to_parser(self, parser):
            parser.add_lightning_class_args(NormGradCallback, "own")
    path = "normgrad_lightning.callback.NormGradCallback"
    given = ["--own.every_n_steps=2", f"--trainer.callbacks+={path}", "--trainer.callbacks.layers=net.2"]
    module = flavour.demos.boring_classes.BoringModel
    cli = Own(module, args=[*given, "--trainer.accelerator=cpu"], run=False, save_config_callback=None)
    made = [one for one in cli.trainer.callbacks if isinstance(one, NormGradCallback)]
    return sorted([one.layers, one.every_n_steps] for one in made)

import lightning.pytorch.demos.boring_classes, pytorch_lightning.demos.boring_classes
bases, quiet = [L.Callback, P.Callback], dict(logger=False, enable_checkpointing=False)
copies = [copy.deepcopy(early), pickle.loads(pickle.dumps(early))]
print(json.dumps({
    "states": states,
    "subclass": [issubclass(cls, base) for cls in (NormGradCallback, Mine) for base in bases],
    "instance": [isinstance(one, base) for one in (early, mine, *copies) for base in bases],
    "resolved": [cls.__name__ for cls in Mine.__mro__[:2]],
    "key": early.state_key,
    "copies": [[type(one).__name__, one.every_n_steps] for one in copies],
    "alone": [early in flavour.Trainer(callbacks=early, **quiet).callbacks for flavour in (L, P)],
    "maps": [list(fit(flavour, [NormGradCallback(layers="net.2")], **quiet).callbacks[0].maps) for flavour in (L, P)],
    "cli": [flags_by_cli(L, LCLI), flags_by_cli(P, PCLI)],
}))"""


@pytest.fixture(scope="module")
def plain_states(tmp_path_factory):
    """The global state after each import, in either order, without ours."""

    @cache
    def of_order(order):
        lines = [f"{line}\nstates.append(state())" for line in order]
        return said(tmp_path_factory.mktemp("plain"), *lines, "print(json.dumps(states))")[0]

    return of_order


QUICK = ("first", "in between")


@pytest.mark.parametrize(
    "order", [pytest.param(order, marks=() if order in QUICK else pytest.mark.slow) for order in ORDERS]
)
def test_it_is_a_callback_of_both_in_any_order_of_imports(order, plain_states, tmp_path):
    imports, index = ORDERS[order]
    lines = [f"{line}\nstates.append(state())" for line in imports]
    lines[index] += MAKE
    got, _ = said(tmp_path, *lines, TRAIN, LOOK)
    seen = got.pop("states")
    del seen[index]
    assert seen == plain_states(tuple(line for line in imports if line != OURS))
    flags = [["auto", 2], ["net.2", None]]
    assert got == {
        "subclass": [True] * 4,
        "instance": [True] * 8,
        "resolved": ["Mine", "NormGradCallback"],
        "key": "NormGradCallback{'every_n_steps': 7}",
        "copies": [["NormGradCallback", 7], ["NormGradCallback", 7]],
        "alone": [True, True],
        "maps": [["net.2"], ["net.2"]],
        "cli": [flags, flags],
    }


def test_a_pickle_loads_where_nothing_is_imported_yet_and_a_lightning_may_be_imported_anew(tmp_path):
    """As in a spawned process; as when the first import of Lightning has failed half-way."""
    load = f"import pickle, sys\nit = pickle.loads({pickle.dumps(NormGradCallback(every_n_steps=5))!r})"
    check = "assert not {'lightning', 'pytorch_lightning'} & set(sys.modules)"
    forget = "for name in [name for name in sys.modules if name.startswith('lightning.pytorch')]: del sys.modules[name]"
    first = f"{L}\nfirst, was = L.Callback, isinstance(it, L.Callback)"
    look = "print(json.dumps([was, first is L.Callback, isinstance(it, L.Callback), it.every_n_steps]))"
    assert said(tmp_path, load, check, first, forget, L, look)[0] == [True, False, True, 5]
