"""A pass of our own leaves no trace: not in weights, buffers, python state, modes, random numbers or compiled code."""

import itertools
import random
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed.nn.functional as differentiable
import torchmetrics
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.nn.utils import parametrizations

from normgrad_lightning.isolated.python_state import PythonState
from normgrad_lightning.isolated.sandbox import NoCollectives, Sandbox
from normgrad_lightning.layers.own_passes import current_pass, own_pass


class Net(nn.Module):
    """Convolution, BatchNorm, dropout, and whatever attributes a test needs."""

    def __init__(self, **attributes):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.5))
        self.head = nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros(()))
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


def x():
    return torch.randn(4, 1, 5, 5)


def stand_ins(model):
    return {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}


def snapshot(model):
    return {name: t.clone() for name, t in model.state_dict().items()}


def unchanged(model, before):
    after = model.state_dict()
    return list(after) == list(before) and all(torch.equal(t, before[name]) for name, t in after.items())


# ---------------------------------------------------------------------------------------------------------------------
# Weights


def test_it_gives_what_the_function_gives():
    model = Net().eval()
    images = x()
    assert torch.equal(Sandbox(model).run(lambda m: m(images)), model(images))
    assert Sandbox(model).run(lambda m: m is model)


def test_weights_may_be_written_to_where_they_are_copies():
    model = Net()
    before, real = snapshot(model), list(model.parameters())

    @torch.no_grad()
    def write(m):
        m.load_state_dict({name: torch.full_like(t, 7) for name, t in before.items()})
        for p in m.parameters():
            p.zero_()
        m.head.weight.data += 1
        m.body[0].weight.data = torch.ones(3)
        m.head.bias = nn.Parameter(torch.ones(2))
        m.head.weight.requires_grad_(False)

    Sandbox(model).run(write, stand_ins(model))
    assert unchanged(model, before)
    assert all(a is b and a.requires_grad for a, b in zip(real, model.parameters(), strict=True))


def test_by_default_weights_are_copies_that_ask_for_no_gradient():
    model = Net()
    before = snapshot(model)

    def write(m):
        assert not any(p.requires_grad for p in m.parameters())
        m.head.weight.fill_(7)
        m.head.bias = nn.Parameter(torch.ones(2))

    Sandbox(model).run(write)
    assert unchanged(model, before)
    assert model.head.weight.requires_grad


def test_hooks_that_come_and_go_inside_are_gone_and_back():
    model, kept = Net(), []
    handle = model.head.register_forward_hook(lambda *_: kept.append(1))

    def change(m):
        handle.remove()
        m.head.register_forward_pre_hook(lambda *_: kept.append(2))
        m.body.register_forward_hook(lambda *_: kept.append(3))

    Sandbox(model).run(change)
    model(x())
    assert kept == [1]


def closure():
    state, total = {"calls": 0}, 0

    def call():
        nonlocal total
        state["calls"] += 1
        total += 1
        return state["calls"], total

    return call


class Augmentation:
    calls = 0

    def __call__(self):
        self.calls += 1
        return self.calls


@pytest.mark.parametrize(
    "make", [closure, lambda: Augmentation().__call__, lambda: partial(Augmentation()), lambda: partial(closure())]
)
def test_what_methods_partials_and_closures_hold_comes_back(make):
    model = Net(augment=make())
    sandbox = Sandbox(model)
    first = sandbox.run(lambda m: m.augment())
    assert sandbox.run(lambda m: m.augment()) == first == model.augment()


@pytest.mark.parametrize(
    "iterator", [iter([1]), itertools.count(), (i for i in range(3))], ids=["list", "count", "own"]
)
def test_iterators_are_named(iterator):
    assert PythonState(Net(it=[iterator])).iterators == [type(iterator).__name__]
    assert PythonState(Net()).iterators == []


def test_a_batch_norm_with_children_runs_in_eval_mode():
    class NormAct(nn.BatchNorm2d):
        def __init__(self):
            super().__init__(2)
            self.act = nn.ReLU()

    model = nn.Sequential(NormAct())
    assert Sandbox(model).run(lambda m: m[0].training) is False
    assert model[0].training


def test_the_stand_ins_get_the_gradient_and_nothing_else_does():
    model = Net().eval()
    model(x()).sum().backward()
    grads = [p.grad for p in model.parameters()]
    before = [g.clone() for g in grads]
    fired = []
    for p in model.parameters():
        p.register_hook(lambda g: fired.append("gradient"))
        p.register_post_accumulate_grad_hook(lambda p: fired.append("accumulated"))
    given = stand_ins(model)
    images = x()
    Sandbox(model).run(lambda m: m(images).sum().backward(), given)
    assert all(t.grad.abs().sum() > 0 for name, t in given.items() if name != "body.0.bias")
    assert fired == []
    assert all(p.grad is g and torch.equal(g, b) for p, g, b in zip(model.parameters(), grads, before, strict=True))


def test_gradients_that_are_replaced_come_back():
    model = Net()
    model.head.weight.grad = grad = torch.ones(2, 2)
    weight, bias = model.head.weight, model.head.bias

    def replace(m):
        weight.grad = None
        bias.grad = torch.ones(2)
        m.zero_grad()

    Sandbox(model).run(replace)
    assert model.head.weight.grad is grad
    assert model.head.bias.grad is None


def test_gradients_that_are_written_to_come_back():
    """An optimizer zeroes and scales them in place, and it holds the real weights."""
    model = Net()
    model.head.weight.grad = torch.ones(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    Sandbox(model).run(lambda m: optimizer.zero_grad(set_to_none=False))
    assert (model.head.weight.grad == 1).all()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_an_optimizer_that_steps_inside_moves_nothing(kind):
    """As in training with manual optimization: the gradients of the last real batch must not be used again."""
    model = Net()
    optimizer = kind(model.parameters(), lr=0.1)
    model(x()).sum().backward()
    before, images, given = snapshot(model), x(), stand_ins(model)

    def step(m):
        m(images).sum().backward()
        optimizer.step()

    Sandbox(model).run(step, given)
    assert unchanged(model, before)
    assert len(optimizer.state) == 0
    optimizer.step()
    assert not unchanged(model, before)


def test_weights_that_are_frozen_by_their_optimizer_learn_again():
    """As training with several optimizers does, turn by turn."""
    model = Net()
    optimizer = torch.optim.SGD(model.head.parameters())

    def toggle(m):
        for p in optimizer.param_groups[0]["params"]:
            p.requires_grad_(False)

    Sandbox(model).run(toggle)
    assert all(p.requires_grad for p in model.parameters())


def test_weights_in_a_list_of_the_models_own_are_protected():
    """As in weight clipping: the list holds the real ones, and not their stand-ins."""
    model = Net()
    model.clipped = list(model.parameters())
    before = snapshot(model)

    def clip(m):
        for p in m.clipped:
            p.data.clamp_(-0.01, 0.01)

    Sandbox(model).run(clip, stand_ins(model))
    assert unchanged(model, before)


def test_other_weights_give_another_result():
    model = Net().eval()
    images = x()
    doubled = {name: p.detach() * (2 if name.startswith("head") else 1) for name, p in model.named_parameters()}
    out = Sandbox(model).run(lambda m: m(images), doubled)
    torch.testing.assert_close(out, 2 * model(images))


def test_tied_weights_stay_tied():
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    given = stand_ins(model)
    assert list(given) == ["a.weight", "a.bias", "b.bias"]

    def both(m):
        assert m["a"].weight is m["b"].weight is given["a.weight"]
        return m["b"](m["a"](torch.ones(1, 3)))

    Sandbox(model).run(both, given).sum().backward()
    assert given["a.weight"].grad is not None
    assert model["b"].weight is model["a"].weight
    assert isinstance(model["b"].weight, nn.Parameter)
    assert model["a"].weight.grad is None


def test_a_module_that_is_registered_twice_is_one():
    shared = nn.BatchNorm1d(3)
    model = nn.Sequential(shared, nn.Linear(3, 3), shared)
    given, before = stand_ins(model), snapshot(model)
    assert Sandbox(model).run(lambda m: m[0].weight is m[2].weight is given["0.weight"], given)
    Sandbox(model).run(lambda m: m.train()(torch.randn(5, 3)))
    assert unchanged(model, before)
    assert model[0] is model[2]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks_run_on_the_stand_ins(kind):
    model = nn.ModuleDict({"rnn": kind(3, 4, num_layers=2)})
    rnn, images = model["rnn"], torch.randn(5, 2, 3)
    flat = rnn._flat_weights
    given = {name: (p.detach() * 2).requires_grad_() for name, p in model.named_parameters()}
    out = Sandbox(model).run(lambda m: m["rnn"](images)[0], given)
    out.sum().backward()
    assert all(t.grad is not None and t.grad.abs().sum() > 0 for t in given.values())
    assert all(p.grad is None for p in model.parameters())
    twin = kind(3, 4, num_layers=2)
    twin.load_state_dict({name.removeprefix("rnn."): t for name, t in given.items()})
    torch.testing.assert_close(out, twin(images)[0])
    assert rnn._flat_weights is flat
    assert all(a is b for a, b in zip(flat, rnn.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    "reparametrised",
    [
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
    ],
    ids=["old weight norm", "old spectral norm", "weight norm", "spectral norm", "orthogonal"],
)
def test_reparametrised_weights_run_on_the_stand_ins_and_are_unchanged(reparametrised):
    torch.manual_seed(0)
    model = nn.Sequential(reparametrised(nn.Linear(3, 3)), nn.ReLU()).train()
    images = torch.randn(2, 3)
    model(images)
    before, weight, attributes = snapshot(model), model[0].weight.detach().clone(), set(vars(model[0]))
    given = stand_ins(model)
    Sandbox(model).run(lambda m: m(images).square().sum().backward(), given)
    assert all(t.grad is not None for t in given.values())
    assert unchanged(model, before)
    assert set(vars(model[0])) == attributes
    assert all(p.grad is None for p in model.parameters())
    if "spectral" not in str(reparametrised.__name__):  # in train mode, those move on with every look
        assert torch.equal(model[0].weight, weight)
    model(images).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# Buffers


def test_buffers_are_clones():
    model = Net().train()
    model.register_buffer("queue", torch.zeros(3, 2), persistent=False)
    model.register_buffer("empty", None)
    before, queue, calls = snapshot(model), model.queue, model.calls

    def write(m):
        m.calls += 1
        m.calls = m.calls + 1
        m.queue[0] = 1
        m.queue.data = torch.ones(5)
        m.empty = torch.ones(3)
        m.register_buffer("more", torch.ones(3))
        m.body[1].train()(torch.randn(4, 2, 3, 3))
        assert m.body[1].num_batches_tracked == before["body.1.num_batches_tracked"] + 1
        del m.body[1].running_mean
        m.body[1].register_buffer("running_var", None)
        return m.calls

    assert Sandbox(model).run(write) == 2
    assert unchanged(model, before)
    assert model.queue is queue
    assert model.calls is calls
    assert model.empty is None
    assert torch.equal(queue, torch.zeros(3, 2))
    assert not hasattr(model, "more")


def test_a_buffer_in_a_list_of_the_models_own_is_protected():
    model = Net()
    model.counters = [model.calls]
    Sandbox(model).run(lambda m: m.counters[0].add_(1))
    assert model.calls == 0


def test_every_run_starts_from_the_same_buffers():
    model = Net()
    sandbox = Sandbox(model)
    assert [sandbox.run(lambda m: m.calls.add_(1).item()) for _ in range(3)] == [1, 1, 1]


# ---------------------------------------------------------------------------------------------------------------------
# Python state


class Meter:
    def __init__(self):
        self.sum, self.history = 0.0, []

    def update(self, value):
        self.sum += value
        self.history.append(value)


class Slots:
    __slots__ = ("__secret", "later", "sum")

    def __init__(self):
        self.sum, self.__secret = 0, 0

    def update(self):
        self.sum += 1

    def update_secret(self):
        self.__secret += 1

    @property
    def secret(self):
        return self.__secret


class MoreSlots(Slots):
    __slots__ = "count"

    def __init__(self):
        super().__init__()
        self.count = 0


def test_numbers_and_new_and_deleted_attributes_come_back():
    model = Net(step=3, name="a", flag=None)

    def change(m):
        m.step += 1
        m.name, m.flag, m.new = "b", True, []
        del m.step
        m.body.note = 1

    Sandbox(model).run(change)
    assert (model.step, model.name, model.flag) == (3, "a", None)
    assert not hasattr(model, "new")
    assert not hasattr(model.body, "note")


CHANGES = {
    "list": ([1, 2], lambda v: v.append(3)),
    "list, other order": ([1, 2, 3], lambda v: v.reverse()),
    "list, as many": ([1, 2], lambda v: v.__setitem__(0, 5)),
    "dict": ({"a": 1}, lambda v: v.update(b=2)),
    "dict without": ({"a": 1, "b": 2}, lambda v: v.pop("a")),
    "dict, other order": ({"a": 1, "b": 2}, lambda v: v.update(a=v.pop("a"))),
    "dict, other key": ({"a": 1}, lambda v: v.update(b=v.pop("a"))),
    "ordered dict": (OrderedDict(a=1, b=2), lambda v: v.move_to_end("a")),
    "defaultdict": (defaultdict(list, a=[1]), lambda v: v["b"].append(1)),
    "counter": (Counter("aab"), lambda v: v.update("abc")),
    "user dict": (UserDict(a=1), lambda v: v.update(b=2)),
    "set": ({1, 2}, lambda v: v.add(3) or v.remove(1)),
    "deque": (deque([1, 2], maxlen=2), lambda v: v.append(3)),
    "bytearray": (bytearray(b"ab"), lambda v: v.extend(b"c")),
    "list in dict in list": ([{"a": [1]}], lambda v: v[0]["a"].append(2)),
    "list in tuple": (([1], "x"), lambda v: v[0].append(2)),
    "namespace": (SimpleNamespace(a=[1]), lambda v: v.a.append(2) or setattr(v, "b", 1)),
}


@pytest.mark.parametrize(("value", "change"), CHANGES.values(), ids=CHANGES)
def test_containers_come_back_in_place(value, change):
    before = repr(value)
    model = Net(kept=value)
    Sandbox(model).run(lambda m: change(m.kept))
    assert model.kept is value
    assert repr(value) == before
    change(value)
    assert repr(value) != before


def test_a_deque_keeps_its_length():
    model = Net(last=deque([1, 2], maxlen=2))
    Sandbox(model).run(lambda m: m.last.append(3))
    assert model.last.maxlen == 2


def test_what_a_container_holds_comes_back_as_the_very_same_objects():
    inner, meter = [1], Meter()
    model = Net(kept={"a": inner, "m": meter})

    def change(m):
        m.kept["a"].append(2)
        m.kept["a"] = [5]
        m.kept["m"].update(1.0)
        del m.kept["m"]

    Sandbox(model).run(change)
    assert model.kept["a"] is inner == [1]
    assert model.kept["m"] is meter
    assert (meter.sum, meter.history) == (0.0, [])


@pytest.mark.parametrize("holder", [lambda m: [m], lambda m: {"a": m}, lambda m: (m,), lambda m: {m}, lambda m: m])
def test_meters_come_back_wherever_they_are(holder):
    meter = Meter()
    model = Net(held=holder(meter))
    Sandbox(model).run(lambda m: meter.update(1.0))
    assert (meter.sum, meter.history) == (0.0, [])


def test_meters_with_slots_come_back():
    meter = MoreSlots()
    model = Net(meter=meter)

    def change(m):
        m.meter.update()
        m.meter.count = 5
        del m.meter.sum

    Sandbox(model).run(change)
    assert (meter.sum, meter.count) == (0, 0)


def test_meters_with_private_slots_come_back():
    model = Net(meter=Slots())
    Sandbox(model).run(lambda m: m.meter.update_secret())
    assert model.meter.secret == 0


def test_slots_that_were_empty_are_empty_again():
    model = Net(meter=Slots())
    Sandbox(model).run(lambda m: setattr(m.meter, "later", 1))
    assert not hasattr(model.meter, "later")


@pytest.mark.parametrize("kind", [list, dict, set, deque], ids=lambda kind: kind.__name__)
def test_containers_with_attributes_of_their_own_come_back(kind):
    log = type("Log", (kind,), {})()
    log.total = 0
    model = Net(log=log)
    Sandbox(model).run(lambda m: setattr(m.log, "total", 1))
    assert log.total == 0


def test_what_an_object_computes_is_not_looked_at():
    class Lazy:
        @property
        def expensive(self):
            raise AssertionError("computed")

        def __getattr__(self, name):
            raise AssertionError(f"asked for {name}")

    model = Net(lazy=Lazy())
    Sandbox(model).run(lambda m: None)


def test_modules_with_slots_and_properties_come_back():
    class Slotted(nn.Module):
        __slots__ = ("count",)

        def __init__(self):
            super().__init__()
            self._scale = 1.0
            object.__setattr__(self, "count", 0)

        @property
        def scale(self):
            return self._scale

        @scale.setter
        def scale(self, value):
            self._scale = value

    model = nn.Sequential(Slotted())

    def change(m):
        m[0].scale = 2.0
        object.__setattr__(m[0], "count", 1)

    Sandbox(model).run(change)
    assert model[0].scale == 1.0
    assert model[0].count == 0


def test_arrays_come_back_in_place():
    model = Net(seen=np.zeros((2, 3)), frozen=np.zeros(2))
    model.frozen.flags.writeable = False
    whole = model.seen
    view = model.seen[0]

    def change(m):
        view[:] += 1
        m.seen *= 5
        m.seen = None

    Sandbox(model).run(change)
    assert model.seen is whole
    assert whole.sum() == 0


def test_plain_tensors_come_back_in_place():
    model = Net(mean=torch.zeros(3), counts=[torch.zeros(()), torch.full((2,), torch.nan)])
    mean, counts = model.mean, list(model.counts)

    def change(m):
        m.mean.add_(1)
        m.mean.data[0] = 7
        m.counts[0] += 1
        m.counts[1] = m.counts[1].clone().fill_(1)
        m.mean = m.mean * 2

    Sandbox(model).run(change)
    assert model.mean is mean
    assert torch.equal(mean, torch.zeros(3))
    assert all(a is b for a, b in zip(model.counts, counts, strict=True))
    assert counts[0] == 0
    assert counts[1].isnan().all()


def test_plain_tensors_that_ask_for_gradients_come_back():
    model = Net(prompt=torch.zeros(3, requires_grad=True))
    prompt = model.prompt

    def change(m):
        (m.prompt * 2).sum().backward()
        with torch.no_grad():
            m.prompt.sub_(m.prompt.grad)

    Sandbox(model).run(change)
    assert model.prompt is prompt
    assert torch.equal(prompt, torch.zeros(3))
    assert prompt.grad is None


@pytest.mark.parametrize(
    "change",
    [lambda t: setattr(t, "data", torch.ones(3)), lambda t: t.resize_(5), lambda t: t.set_(torch.ones(3))],
    ids=["data", "resize", "set"],
)
def test_plain_tensors_that_got_other_memory_come_back(change):
    model = Net(mean=torch.zeros(3))
    mean = model.mean
    Sandbox(model).run(lambda m: change(m.mean))
    assert model.mean is mean
    assert mean.shape == (3,)
    assert mean.sum() == 0


def test_a_tensor_and_its_view_come_back_together():
    whole = torch.zeros(4)
    model = Net(whole=whole, view=whole[1:3])
    Sandbox(model).run(lambda m: m.view.fill_(1))
    assert torch.equal(whole, torch.zeros(4))


def test_a_list_that_others_hold_too_is_the_same_for_them():
    losses = []
    model = Net(losses=losses)
    model.head.register_forward_hook(lambda *_: losses.append(1))
    images = x()
    Sandbox(model).run(lambda m: m(images))
    assert losses == []
    model(images)
    assert losses == [1]
    assert model.losses is losses


def test_state_is_as_it_was_when_the_sandbox_was_made_after_every_run():
    model = Net(log=[1])
    sandbox = Sandbox(model)
    assert [sandbox.run(lambda m: m.log.append(2) or len(m.log)) for _ in range(3)] == [2, 2, 2]
    assert model.log == [1]


def test_cycles_end():
    model = Net(log=[])
    model.log.append(model.log)
    model.me = [model]
    model.meter = Meter()
    model.meter.history.append(model.meter)
    Sandbox(model).run(lambda m: m.log.append(1))
    assert len(model.log) == 1


def test_a_long_chain_of_objects_is_followed():
    model = Net()
    model.first = node = SimpleNamespace(value=0)
    for _ in range(400):
        node.next = SimpleNamespace(value=0)
        node = node.next
    Sandbox(model).run(lambda m: setattr(node, "value", 1))
    assert node.value == 0


def test_what_cannot_be_put_back_does_not_keep_the_rest_from_it():
    class Fixed(dict):
        def __setitem__(self, key, value):
            raise TypeError("read-only")

    first, last = [], []
    model = Net(first=first, fixed=Fixed(a=1), last=last)

    def change(m):
        dict.__setitem__(m.fixed, "b", 2)
        m.first.append(1), m.last.append(1)

    with suppress(TypeError):
        Sandbox(model).run(change)
    assert first == last == []
    assert model.training


def test_a_generator_without_a_state_is_no_obstacle():
    model = Net(system=random.SystemRandom())
    assert Sandbox(model).run(lambda m: 0 <= m.system.random() < 1)


def test_classes_and_code_are_left_alone():
    model = Net(kind=Meter, method=[].append, module=np)
    Sandbox(model).run(lambda m: setattr(m.kind, "calls", 1))
    assert Meter.calls == 1
    del Meter.calls
    assert model.kind is Meter


# ---------------------------------------------------------------------------------------------------------------------
# Metrics


def metrics():
    return {
        "accuracy": torchmetrics.classification.MulticlassAccuracy(2),
        "mean": torchmetrics.MeanMetric(),
        "auroc": torchmetrics.classification.BinaryAUROC(),
        "collection": torchmetrics.MetricCollection(
            [torchmetrics.classification.MulticlassPrecision(2), torchmetrics.classification.MulticlassRecall(2)]
        ),
    }


def feed(metric, name, call, seed):
    scores = torch.rand(8, 2, generator=torch.Generator().manual_seed(seed))
    targets = torch.arange(8) % 2
    method = getattr(metric, call)
    if call in ("compute", "reset"):
        return method()
    if name == "mean":
        return method(scores)
    return method(scores[:, 0] if name == "auroc" else scores, targets)


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
@pytest.mark.parametrize("inside", [["update"], ["forward"], ["reset"], ["forward", "compute", "reset", "update"]])
@pytest.mark.parametrize("before", [[], ["update"], ["forward", "forward"], ["update", "compute"]])
@pytest.mark.parametrize("name", metrics())
@pytest.mark.parametrize("hidden", [False, True], ids=["registered", "in a list"])
def test_metrics_go_on_as_if_nothing_had_happened(name, before, inside, hidden):
    metric, twin = metrics()[name], metrics()[name]
    model = Net(metric=[metric] if hidden else metric)
    for seed, call in enumerate(before):
        feed(metric, name, call, seed), feed(twin, name, call, seed)

    def use(m):
        for seed, call in enumerate(inside):
            feed(metric, name, call, seed + 100)

    Sandbox(model).run(use)
    for seed, call in enumerate(["forward", "update", "compute", "reset", "update", "compute"]):
        ours, theirs = feed(metric, name, call, seed + 10), feed(twin, name, call, seed + 10)
        assert str(ours) == str(theirs)
    updates = [m.update_count for m in (metric.values() if name == "collection" else [metric])]
    assert updates == [m.update_count for m in (twin.values() if name == "collection" else [twin])]


# ---------------------------------------------------------------------------------------------------------------------
# Modules


def test_modules_that_come_and_go_are_back():
    model = Net()
    before, modules, state = [name for name, _ in model.named_modules()], list(model.modules()), snapshot(model)

    def change(m):
        m.added = nn.Linear(2, 2)
        m.body.append(nn.ReLU())
        m.body[0] = nn.Conv2d(1, 2, 1)
        del m.body[1]
        m.head = nn.Identity()
        m.head.more = nn.BatchNorm1d(2)

    Sandbox(model).run(change)
    assert [name for name, _ in model.named_modules()] == before
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert unchanged(model, state)


def test_parameters_that_come_and_go_are_back():
    model = Net()
    before, names = list(model.parameters()), list(model.state_dict())

    def change(m):
        m.scale = nn.Parameter(torch.ones(()))
        m.head.register_parameter("bias", None)
        del m.head.weight
        del m.body[1].running_var

    Sandbox(model).run(change)
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert list(model.state_dict()) == names


def test_a_network_hidden_in_a_list_comes_back():
    """The teacher of a self-distilling model: not trained by it, but moved by it."""
    teacher = Net().train()
    model = Net(teacher=[teacher])
    before = snapshot(teacher)
    batch_norm, images = teacher.body[1], x()

    def step(m):
        modes = teacher.training, batch_norm.training, teacher.body[2].training
        out = m.teacher[0](images)
        batch_norm.train()(torch.randn(4, 2, 3, 3))
        with torch.no_grad():
            for ours, theirs in zip(teacher.parameters(), m.parameters(), strict=True):
                ours.mul_(0.9).add_(theirs, alpha=0.1)
                ours.data.lerp_(theirs, 0.1)
        teacher.calls = teacher.calls + 1
        return modes, out

    modes, _ = Sandbox(model).run(step)
    assert modes == (True, False, False)
    assert unchanged(teacher, before)
    assert teacher.training
    assert batch_norm.training


def test_a_network_hidden_in_a_list_keeps_its_gradients():
    teacher, images = Net(), x()
    model = Net(teacher=[teacher])
    teacher.head.weight.grad = torch.ones(2, 2)
    Sandbox(model).run(lambda m: m.teacher[0](images).sum().backward())
    assert teacher.head.bias.grad is None
    assert (teacher.head.weight.grad == 1).all()


def test_sandboxes_nest():
    model = Net(log=[])
    before = snapshot(model)

    def outer(m):
        m.log.append(1)
        Sandbox(m).run(lambda inner: inner.log.append(2) or inner.calls.add_(1))
        return list(m.log), m.calls.item()

    assert Sandbox(model).run(outer) == ([1], 0.0)
    assert model.log == []
    assert unchanged(model, before)


# ---------------------------------------------------------------------------------------------------------------------
# Modes


def test_leaves_run_in_eval_mode_and_containers_keep_theirs():
    attention = nn.MultiheadAttention(4, 2, dropout=0.5)
    model = nn.ModuleDict({"net": Net(), "attention": attention, "frozen": nn.Sequential(nn.Dropout()).eval()}).train()
    model["frozen"].eval()
    modes = [m.training for m in model.modules()]
    inside = Sandbox(model).run(lambda m: {name: part.training for name, part in m.named_modules()})
    assert {name for name, training in inside.items() if training} == {"", "net", "net.body"}
    assert [m.training for m in model.modules()] == modes


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, None])
def test_modes_come_back_whatever_happens(error):
    model = Net().train()
    model.body[2].eval()

    def function(m):
        m.eval()
        m.body[2].train()
        if error:
            raise error("boom")

    if error:
        with pytest.raises(error, match="boom"):
            Sandbox(model).run(function)
    else:
        Sandbox(model).run(function)
    modes = [m.training for m in model.modules()]
    assert modes == [True, True, True, True, False, True]


@pytest.mark.parametrize("place", range(6))
def test_an_error_at_any_place_leaves_no_trace(place):
    model = Net(log=[], meter=Meter(), mean=torch.zeros(3), generator=torch.Generator().manual_seed(1)).train()
    before, images = snapshot(model), x()
    real = list(model.parameters())

    def function(m):
        def reach(here):
            if here == place:
                raise RuntimeError("boom")

        reach(0)
        m.log.append(1), m.meter.update(1.0), m.mean.add_(1), m.calls.add_(1)
        reach(1)
        torch.rand(1, generator=m.generator), torch.rand(1), np.random.rand(), random.random()
        reach(2)
        m.head.register_forward_hook(lambda *_: reach(3))
        m(images)
        del m.head
        reach(4)
        m.new = nn.Linear(1, 1)
        reach(5)

    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    with pytest.raises(RuntimeError, match="boom"):
        Sandbox(model).run(function, stand_ins(model))
    assert (model.log, model.meter.sum, model.mean.sum().item()) == ([], 0.0, 0.0)
    assert unchanged(model, before)
    assert all(a is b for a, b in zip(real, model.parameters(), strict=True))
    assert all(m.training for m in model.modules())
    assert torch.equal(states[0], torch.get_rng_state())
    assert (states[1] == np.random.get_state()[1]).all()
    assert states[2] == random.getstate()
    assert torch.equal(model.generator.get_state(), torch.Generator().manual_seed(1).get_state())


# ---------------------------------------------------------------------------------------------------------------------
# Random numbers


def test_random_numbers_go_on_as_if_none_had_been_drawn():
    def draw(*_):
        return torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()

    def seed(*_):
        torch.manual_seed(0), np.random.seed(0), random.seed(0)

    model = Net()
    seed()
    expected = draw()
    seed()
    sandbox = Sandbox(model)
    assert sandbox.run(draw) == sandbox.run(draw) == expected
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    sandbox.run(lambda m: (torch.manual_seed(5), np.random.seed(5), random.seed(5)))
    assert draw() == expected


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: torch.Generator().manual_seed(0), lambda g: torch.rand(1, generator=g).item()),
        (lambda: random.Random(0), lambda g: g.random()),
        (lambda: random.Random(0), lambda g: g.gauss(0, 1)),
        (lambda: np.random.default_rng(0), lambda g: g.random()),
        (lambda: np.random.Generator(np.random.MT19937(0)), lambda g: g.random()),
        (lambda: np.random.RandomState(0), lambda g: g.randn()),
    ],
    ids=["torch", "python", "python gauss", "numpy", "numpy mt19937", "numpy random state"],
)
@pytest.mark.parametrize("wrap", [lambda g: g, lambda g: SimpleNamespace(noise=[g])], ids=["plain", "nested"])
def test_generators_that_the_model_holds_go_on_as_if_none_had_been_drawn(make, draw, wrap):
    generator, twin = make(), make()
    draw(generator), draw(twin)
    model = Net(rng=wrap(generator))
    sandbox = Sandbox(model)
    expected = draw(twin)
    assert sandbox.run(lambda m: draw(generator)) == sandbox.run(lambda m: draw(generator)) == expected
    assert draw(generator) == expected


# ---------------------------------------------------------------------------------------------------------------------
# Compiled code, autocast, processes, and whose pass it is


def test_a_compiled_module_is_not_compiled_for_a_pass():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    inner = nn.Linear(3, 3)
    model = nn.Sequential(torch.compile(inner, backend=backend))
    images = torch.randn(2, 3)
    given = {name: p.detach() * 2 for name, p in model.named_parameters()}
    out = Sandbox(model).run(lambda m: m(images), given)
    assert compiled == []
    torch.testing.assert_close(out, 2 * inner(images))
    torch.testing.assert_close(model(images), inner(images))
    assert len(compiled) == 1
    Sandbox(model).run(lambda m: m(torch.randn(5, 3)))
    torch.testing.assert_close(model(images), inner(images))
    assert len(compiled) == 1
    model(images).sum().backward()
    assert inner.weight.grad is not None


def test_a_module_that_compiles_itself_is_not_compiled_for_a_pass():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = Net(count=0).eval()
    model.compile(backend=backend)
    images = x()
    Sandbox(model).run(lambda m: m(images))
    assert compiled == []
    model(images)
    assert len(compiled) > 0


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning", "ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("kind", ["scripted", "traced"])
def test_scripted_parts_run_on_the_stand_ins_and_are_unchanged(kind):
    images, part = torch.randn(4, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    scripted = torch.jit.script(part) if kind == "scripted" else torch.jit.trace(part.eval(), images)
    model = nn.Sequential(scripted, nn.Linear(3, 2))
    before, modes = snapshot(model), [m.training for m in model.modules()]
    given = stand_ins(model)
    Sandbox(model).run(lambda m: m(images).square().sum().backward(), given)
    assert all(t.grad is not None for t in given.values())
    assert all(p.grad is None for p in model.parameters())
    assert unchanged(model, before)
    assert [m.training for m in model.modules()] == modes


def test_autocast_around_it_works_and_remembers_no_stand_ins():
    model, images = nn.Sequential(nn.Linear(8, 8)), torch.randn(4, 8)
    zeros = {name: torch.zeros_like(p, requires_grad=True) for name, p in model.named_parameters()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = model(images)
        inside = Sandbox(model).run(lambda m: m(images), zeros)
        again = model(images)
        assert torch.is_autocast_cache_enabled()
        again.float().sum().backward()
    assert inside.dtype == torch.bfloat16
    assert (inside == 0).all()
    assert torch.equal(before, again)
    assert model[0].weight.grad.abs().sum() > 0
    assert zeros["0.weight"].grad is None


def test_autocast_sees_stand_ins_that_have_moved():
    model, images = nn.Sequential(nn.Linear(8, 8)), torch.randn(4, 8)
    given, sandbox = stand_ins(model), Sandbox(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert sandbox.run(lambda m: m(images), given).abs().sum() > 0
        for t in given.values():
            t.data.zero_()
        assert sandbox.run(lambda m: m(images), given).abs().sum() == 0


def test_autocast_inside_remembers_no_stand_ins():
    model, images = nn.Sequential(nn.Linear(8, 8)), torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(images)
        Sandbox(model).run(lambda m: m(images))
        model(images).float().sum().backward()
        torch.testing.assert_close(model(images), expected)
    assert model[0].weight.grad is not None


def test_without_gradients_around_it_there_are_none_inside():
    model, images = Net(), x()
    given = stand_ins(model)
    with torch.no_grad():
        assert not Sandbox(model).run(lambda m: m(images), given).requires_grad
    assert Sandbox(model).run(lambda m: m(images), given).requires_grad


@pytest.fixture
def group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "collective",
    [
        lambda t: torch.distributed.all_reduce(t),
        lambda t: torch.distributed.broadcast(t, 0),
        lambda t: torch.distributed.all_gather([torch.empty_like(t)], t),
        lambda t: torch.distributed.barrier(),
        lambda t: torch.distributed.all_gather_object([None], "text"),
        lambda t: differentiable.all_reduce(t),
        lambda t: functional.wait_tensor(functional.all_reduce(t, "sum", torch.distributed.group.WORLD)),
    ],
    ids=["all_reduce", "broadcast", "all_gather", "barrier", "object", "differentiable", "functional"],
)
def test_talking_to_other_processes_is_an_error(collective):
    collective(torch.ones(3))
    with NoCollectives(), pytest.raises(RuntimeError, match="in a pass that only one process runs"):
        collective(torch.ones(3))
    collective(torch.ones(3))


def test_everything_but_talking_is_as_ever():
    model, images = Net().eval(), x()
    model(images).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with NoCollectives():
        out = Sandbox(model).run(lambda m: m(images))
        model(images).square().sum().backward()
    torch.testing.assert_close(out, model(images))
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)


def test_passes_have_names_of_their_own():
    assert current_pass() is None
    with own_pass():
        outer = current_pass()
        with own_pass():
            assert current_pass() not in (None, outer)
        assert current_pass() is outer
    assert current_pass() is None


def test_a_pass_ends_when_it_fails():
    with pytest.raises(RuntimeError, match="boom"), own_pass():
        raise RuntimeError("boom")
    assert current_pass() is None
