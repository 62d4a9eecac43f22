"""State in places where few look for it: put back, refused, or noticed."""

import contextvars
import functools
import queue
import threading
import weakref
from array import array

import pytest
import torch
from networks import batch
from torch import nn
from torch.nn import functional as F
from twice import Lit, assert_same, train, watching

from normgrad_lightning.isolated.python_state import PythonState
from normgrad_lightning.isolated.repeatable import NotRepeatable, check_repeatable
from normgrad_lightning.isolated.sandbox import Sandbox


class Key:
    """What a weak dictionary can have as a key."""


KEYS = [Key(), Key()]
CONTEXT = contextvars.ContextVar("CONTEXT", default=0)


def counts_calls(function):
    """A decorator that counts calls in an attribute of the function."""

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        wrapped.calls += 1
        return function(*args, **kwargs)

    wrapped.calls = 0
    return wrapped


class Net(nn.Module):
    """Keeps something in every place that there is."""

    calls = 0
    weak_of_class = weakref.WeakKeyDictionary()  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.numbers = array("d", [1.0, float("nan")])
        self.weak = weakref.WeakKeyDictionary({KEYS[0]: 1})
        self.weak_values = weakref.WeakValueDictionary({1: KEYS[0]})
        self.weak_set = weakref.WeakSet(KEYS[:1])
        self.local = threading.local()
        self.local.count = 0
        self.context = CONTEXT
        self.method = self.called
        type(self).weak_of_class.clear()

    def with_default(self, seen=[], *, of_keyword={}):  # noqa: B006
        return seen, of_keyword

    @counts_calls
    def called(self):
        return self

    @staticmethod
    @counts_calls
    def static():
        pass

    @functools.lru_cache  # noqa: B019
    def table(self, size):
        return self.layer.weight * size

    @property
    def doubled(self):
        return 2 * self.layer.weight

    def everything(self):
        """All that code can see of it."""
        return {
            "class": [Net.calls, "new" in vars(Net), dict(Net.weak_of_class)],
            "array": [repr(self.numbers), id(self.numbers)],
            "weak": [dict(self.weak), dict(self.weak_values), set(self.weak_set)],
            "local": vars(self.local),
            "context": CONTEXT.get(),
            "defaults": self.with_default(),
            "attributes": [Net.called.calls, Net.static.calls, vars(Net.with_default)],
            "property": hasattr(Net.doubled.fget, "seen"),
        }


def change_class(net):
    type(net).calls += 1
    type(net).new = 1
    net.weak_of_class[KEYS[1]] = 1


def change_weak(net):
    net.weak[KEYS[1]] = net.weak[KEYS[0]] = 2
    net.weak_values[2] = KEYS[1]
    net.weak_set.add(KEYS[1])


def change_local(net):
    net.local.count += 1
    net.local.new = 1


def change_array(net):
    net.numbers.append(2)
    net.numbers[0] = 5


def change_defaults(net):
    net.with_default()[0].append(1)
    net.with_default()[1]["key"] = 1


def change_attributes(net):
    net.called(), net.static()
    Net.with_default.seen = 1
    Net.doubled.fget.seen = 1


CHANGES = [
    change_class,
    change_weak,
    change_local,
    change_array,
    change_defaults,
    change_attributes,
    lambda net: net.context.set(1),
    lambda net: CONTEXT.set(1),
]


@pytest.mark.parametrize("change", CHANGES)
def test_it_is_put_back(change):
    net = Net()
    before = repr(net.everything())
    Sandbox(net).run(change)
    assert repr(net.everything()) == before
    change(net)
    assert repr(net.everything()) != before, "the test sees no change at all"
    undo()


def undo():
    Net.calls = 0
    if hasattr(Net, "new"):
        del Net.new
    seen, of_keyword = Net().with_default()
    seen.clear(), of_keyword.clear()
    Net.called.calls = Net.static.calls = 0
    vars(Net.with_default).clear(), vars(Net.doubled.fget).clear()
    CONTEXT.set(0)


def test_a_cache_holds_no_stand_in_weights():
    net = Net()
    kept = net.table(1)
    Sandbox(net).run(lambda m: m.table(1))
    assert net.table(1) is kept
    Sandbox(net).run(lambda m: m.table(2))
    assert net.table(2).grad_fn is not None
    net.table(2).backward()
    assert net.layer.weight.grad is not None


def test_a_simple_queue_is_refused_as_an_iterator_is():
    net = Net()
    net.waiting = queue.SimpleQueue()
    assert PythonState(net).iterators == ["SimpleQueue"]


# ---------------------------------------------------------------------------------------------------------------------
# What is out of reach


STEPS = []


class LooksAtGlobals(Lit):
    """Its loss depends on how often it was computed in this process, and nothing of the module shows that."""

    def loss(self, batch):
        STEPS.append(1)
        return F.cross_entropy(self.net(batch[0]), batch[1]) * (1 + 0.1 * len(STEPS))


class LooksAtGlobalsButSaysSo(LooksAtGlobals):
    def normgrad_loss(self, batch):
        return F.cross_entropy(self.net(batch[0]), batch[1])


@pytest.mark.parametrize("flags", [{}, {"probe": "train"}], ids=["order 1", "order 1 and a probe"])
def test_a_loss_that_is_another_the_second_time_is_told_once_and_has_no_passes(flags, tmp_path):
    STEPS.clear()
    watched = train(LooksAtGlobals, tmp_path, watching(on_error="warn", **flags))
    (told,) = watched.warned
    assert "It depends on something that it changes and that cannot be put back, such as a global variable" in told
    assert len(STEPS) == 2 + 6  # tried twice, then trained
    assert watched.callback.maps
    assert not watched.callback.order1


def test_what_the_warning_advises_works(tmp_path):
    STEPS.clear()
    watched = train(LooksAtGlobalsButSaysSo, tmp_path, watching())
    assert watched.warned == []
    assert len(STEPS) == 6
    assert watched.callback.order1


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, b: F.dropout(model(b[0]), 0.5).sum(),
        lambda model, b: model(b[0]).sum() * (1 + 1e-5 * torch.randn(())),
        lambda model, b: model(b[0]).sum() * float("nan"),
        lambda model, b: 1 / 0,
    ],
    ids=["random", "nearly the same", "not a number", "an error"],
)
def test_a_loss_that_is_the_same_or_has_another_problem_passes(loss):
    check_repeatable(nn.Sequential(nn.Conv2d(3, 1, 1)), loss, batch(3))


def test_a_model_is_tried_once():
    calls = []

    def loss(model, images):
        calls.append(len(images[0]))
        return model(images[0]).sum() + len(calls)

    model = nn.Conv2d(3, 1, 1)
    for _ in range(2):
        with pytest.raises(NotRepeatable, match="`loss_fn`: expected a loss that can be computed again"):
            check_repeatable(model, loss, batch(3))
    assert calls == [2, 2]


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers


class ChangesItsOptimizer(Lit):
    def training_step(self, batch, batch_idx):
        (group,) = self.trainer.optimizers[0].param_groups
        group.setdefault("calls", 0)
        group["calls"] += 1
        group.setdefault(f"batch {batch_idx}", len(group["params"]))
        return super().training_step(batch, batch_idx)


def test_new_keys_in_the_groups_of_an_optimizer_are_put_back(tmp_path):
    plain, watched = (
        train(ChangesItsOptimizer, tmp_path / name, *callback)
        for name, callback in (("plain", []), ("watched", [watching(order1_every_n_steps=1, probe="train")]))
    )
    assert_same(plain, watched)
    assert watched.trainer.optimizers[0].param_groups[0]["calls"] == 6
