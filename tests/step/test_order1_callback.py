"""Order-1 passes inside real training runs: they change nothing, come when they should, and fail without harm."""

import argparse
import queue
import random
import warnings
from collections import Counter, OrderedDict
from dataclasses import dataclass

import numpy as np
import pytest
import pytorch_lightning
import torch
import torch.nn.functional as F
from networks import ResNet, batch
from pytorch_lightning.callbacks import StochasticWeightAveraging
from test_callback import Metrics, data, fit, lit, panels, same, scalars
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset
from torch.utils.hooks import RemovableHandle
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC
from twice import ALL_VIEWS, History

from normgrad_lightning import NormGradCallback, order1_maps
from normgrad_lightning.step import quiet

try:
    from pytorch_lightning.callbacks import EMAWeightAveraging
except ImportError:  # before Lightning 2.6
    EMAWeightAveraging = None

KINDS = ["order1", "adversarial", "contrast"]
AVERAGING = (
    (StochasticWeightAveraging,) if EMAWeightAveraging is None else (StochasticWeightAveraging, EMAWeightAveraging)
)


class Busy(pytorch_lightning.LightningModule):
    """A module whose `training_step` leaves traces wherever a step can."""

    def __init__(self, optimizer="sgd"):
        super().__init__()
        torch.manual_seed(0)
        self.net = ResNet(dropout=0.3)
        self.optimizer = optimizer
        self.accuracy = MulticlassAccuracy(5)
        self.metrics = MetricCollection({"auroc": MulticlassAUROC(5), "mean": MeanMetric()})
        self.register_buffer("queue", torch.zeros(8, 5))
        self.losses, self.counts, self.steps = [], Counter(), 0
        self.moving = torch.zeros(5)
        self.teacher = [ResNet().train()]
        self.features = {}
        self.net.stage3.register_forward_hook(lambda _, args, output: self.features.update(last=output.mean().item()))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        images += 0.1 * torch.randn_like(images) + 0.01 * random.random() + 0.01 * np.random.rand()
        scores = self.net(images)
        loss = F.cross_entropy(scores, labels)
        self.accuracy(scores, labels)
        self.metrics["auroc"].update(scores.softmax(1), labels)
        self.metrics["mean"].update(loss)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"twice": 2 * loss, "last": self.features["last"]}, on_epoch=True)
        self.log_dict({"auroc": self.metrics["auroc"], "mean": self.metrics["mean"]}, on_step=False, on_epoch=True)
        self.logger.experiment.add_scalar("by_hand", loss, self.steps)
        self.losses.append(loss.detach())
        self.counts.update(labels.tolist())
        self.steps += 1
        self.queue[self.steps % 8] = scores.detach().mean(0)
        self.moving.mul_(0.9).add_(scores.detach().mean(0))
        self.teacher[0](images)
        for mine, theirs in zip(self.net.parameters(), self.teacher[0].parameters(), strict=True):
            theirs.data.lerp_(mine.data, 0.1)
        batch.append("used")
        return {"loss": loss, "scores": scores.detach()}

    def configure_optimizers(self):
        if self.optimizer == "adam":
            optimizer = torch.optim.Adam(self.parameters(), 1e-3)
        else:
            optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class StatefulSampler(Sampler):
    """Goes on where it was, and draws from a generator of its own."""

    def __init__(self, size):
        self.size, self.drawn, self.random = size, 0, random.Random(3)

    def __len__(self):
        return self.size

    def __iter__(self):
        for _ in range(self.size):
            self.drawn += 1
            yield self.random.randrange(self.size)


def everything(module, metrics, sampler, trainer):
    """All that two runs may be told apart by."""
    optimizer = trainer.optimizers[0].state_dict()
    average = [c for c in trainer.callbacks if isinstance(c, AVERAGING)]
    models = [getattr(c, "_average_model", None) for c in average]
    return {
        "weights and buffers": list(module.state_dict().values()),
        "averaged": [list(m.state_dict().values()) for m in models if m is not None],
        "optimizer": [value for state in optimizer["state"].values() for value in state.values()],
        "groups": optimizer["param_groups"],
        "gradients": [p.grad for p in module.parameters()],
        "random": [torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()],
        "attributes": sorted(vars(module)),
        "counter": module.steps,
        "list": module.losses,
        "dicts": [module.counts, module.features],
        "tensor": [module.moving, module.queue],
        "hidden": list(module.teacher[0].state_dict().values()),
        "metric": [module.accuracy.tp, module.metrics["auroc"].preds, module.metrics["mean"].mean_value],
        "modes": [m.training for m in [*module.modules(), *module.teacher[0].modules()]],
        "sampler": [sampler.drawn, sampler.random.getstate()],
        "shown": metrics.log_of_steps,
        "logged": scalars(trainer),
        "steps": trainer.global_step,
    }


def train(folder, callbacks, optimizer="sgd", average="ema", kind=Busy, **options):
    pytorch_lightning.seed_everything(7, verbose=False)
    module, metrics, sampler = kind(optimizer), Metrics(), StatefulSampler(24)
    ema = average == "ema" and EMAWeightAveraging is not None
    averaging = EMAWeightAveraging(decay=0.9) if ema else StochasticWeightAveraging(0.01, 1)
    loader = DataLoader(TensorDataset(*batch(24)), batch_size=4, sampler=sampler)
    trainer = fit(
        module,
        [metrics, averaging, *callbacks],
        folder,
        loader=loader,
        **{"max_epochs": 2, "accumulate_grad_batches": 3, "gradient_clip_val": 0.5, **options},
    )
    return everything(module, metrics, sampler, trainer)


def assert_same(plain, watched):
    for what in plain:
        assert same(plain[what], watched[what]), what


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Runs without the callback, made once."""
    runs = {}

    def of(**options):
        key = repr(sorted(options.items()))
        if key not in runs:
            runs[key] = train(tmp_path_factory.mktemp("plain"), [], **options)
        return runs[key]

    return of


def watching(**flags):
    return NormGradCallback(
        **{
            "every_n_steps": 1,
            "order1_every_n_steps": 1,
            "order1_maps": KINDS,
            "num_images": 2,
            "views": ALL_VIEWS,
            **flags,
        }
    )


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({}, {}),
        ({"optimizer": "adam", "average": "swa", "max_epochs": 3}, {"per_image": False}),
        ({}, {"images": "random", "target": "weight"}),
        ({}, {"images": "hardest"}),
        ({"precision": "bf16-mixed"}, {"per_image": False}),
        ({"precision": "bf16-mixed"}, {}),
    ],
)
def test_training_keeps_every_bit(tmp_path, plain, options, flags):
    callback = watching(on_error="raise", **flags)
    watched = train(tmp_path, [callback], **options)
    assert_same(plain(**options), watched)
    assert list(callback.order1) == KINDS
    assert all(m.isfinite().all() for maps in callback.order1.values() for m in maps.values())
    assert watched["steps"] >= 4
    assert watched["counter"] >= 12


CALLS = []  # of passes, where these put nothing back


class Breaks(Busy):
    """Raises in the n-th pass of ours, after having done everything a step does."""

    broken_pass = 1

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        if isinstance(self._trainer, quiet._QuietTrainer):
            CALLS.append(batch_idx)
            if len(CALLS) % 7 == self.broken_pass % 7:
                raise RuntimeError("the cat stepped on the keyboard")
        return output


@pytest.mark.parametrize(
    "broken_pass", [1, 4, 7, *(pytest.param(number, marks=pytest.mark.slow) for number in (2, 3, 5, 6))]
)
def test_training_keeps_every_bit_when_a_pass_raises(tmp_path, plain, broken_pass):
    Breaks.broken_pass = broken_pass
    CALLS.clear()
    callback = watching(per_image=False, layers="net.stage*")
    with pytest.warns(
        UserWarning, match="NormGrad failed while running the order-1 passes; training continues. RuntimeError: th"
    ):
        watched = train(tmp_path, [callback], kind=Breaks)
    assert len(CALLS) >= 4
    assert_same(plain(), watched)
    assert callback.maps  # order 0 is not touched by that


class Inputs(pytorch_lightning.Callback):
    """Keeps the images that a callback shows, by the step."""

    def __init__(self, callback):
        self.callback, self.order0, self.order1 = callback, {}, {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.order0[batch_idx], self.order1[batch_idx] = self.callback.inputs, self.callback.order1_inputs


def test_the_maps_are_those_of_the_paper_on_the_weights_before_the_update(tmp_path):
    class Plain(type(lit())):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch[0]), batch[1])

    loader, loss = data(shuffle=False), lambda net, batch: F.cross_entropy(net(batch[0]), batch[1])
    module = Plain()
    images, labels = next(iter(loader))
    flags = {"epsilon": 1e-3}
    callback = watching(
        on_error="raise", every_n_steps=50, order1_every_n_steps=100, num_images=3, images="first", **flags
    )
    history, inputs = History(callback), Inputs(callback)
    expected = order1_maps(module.net, loss, (images[:3], labels[:3]), "stage*", **flags)
    adversarial = order1_maps(module.net, loss, (images[:3], labels[:3]), "stage*", adversarial=True, **flags)
    trainer = fit(module, [callback, history, inputs], tmp_path, loader=loader)
    order1 = history.order1[0]
    for name, m in expected.items():
        torch.testing.assert_close(order1["order1"][f"net.{name}"], m, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(order1["adversarial"][f"net.{name}"], adversarial[name], rtol=1e-4, atol=1e-7)
        contrast = order1["contrast"][f"net.{name}"]
        assert contrast.min() < 0 < contrast.max()
        torch.testing.assert_close(contrast.sum((1, 2)), torch.zeros(3), atol=1e-5, rtol=0)
    first_and_last = [images[:3], batch(24)[0][20:23]]
    assert same([inputs.order1[step] for step in (0, 5)], first_and_last)
    assert same([inputs.order0[step] for step in (0, 5)], first_and_last)
    assert panels(trainer) == {
        f"normgrad_{kind}/0{i}_net.stage{i + 1}": [0, 5] for kind in ["order0", *KINDS] for i in range(3)
    }


def test_the_batchs_own_step_is_taken_by_all_of_its_images_together(tmp_path):
    module, loader = lit(), data(shuffle=False)
    module.training_step = lambda batch, batch_idx: F.cross_entropy(module.net(batch[0]), batch[1])
    images, labels = next(iter(loader))
    expected = order1_maps(
        module.net, lambda net, b: F.cross_entropy(net(b[0]), b[1]), (images, labels), "stage*", per_image=False
    )
    flags = {"per_image": False, "images": "first"}
    callback = watching(on_error="raise", every_n_steps=100, order1_every_n_steps=100, **flags)
    history = History(callback)
    trainer = fit(module, [callback, history], tmp_path, loader=loader)
    for name, m in expected.items():
        torch.testing.assert_close(history.order1[0]["order1"][f"net.{name}"], m[:2], rtol=1e-4, atol=1e-7)
    assert "normgrad_order1_batch/00_net.stage1" in panels(trainer)


@pytest.mark.parametrize("images", ["balanced", "first", "random", "hardest"])
@pytest.mark.parametrize("per_image", [True, False])
def test_both_orders_show_the_same_images_side_by_side(tmp_path, images, per_image):
    class Plain(type(lit())):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch[0]), batch[1])

    callback = watching(on_error="raise", images=images, per_image=per_image, num_images=3)
    fit(Plain(), [callback], tmp_path, loader=data(24, 8))
    assert torch.equal(callback.inputs, callback.order1_inputs)
    assert len(callback.inputs) == 3
    assert callback.maps.keys() == callback.order1["order1"].keys()
    assert all(callback.maps[n].shape == m.shape for n, m in callback.order1["contrast"].items())


@pytest.mark.parametrize(
    ("every", "order1_every", "order0", "order1"),
    [
        (1, 2, [0, 1, 2, 3, 4, 5], [0, 2, 4, 5]),
        (2, 3, [0, 2, 3, 4, 5], [0, 3, 5]),
        (100, 4, [0, 4, 5], [0, 4, 5]),
        (3, 100, [0, 3, 5], [0, 5]),
    ],
)
def test_order1_comes_on_its_own_schedule_and_always_with_order0(tmp_path, every, order1_every, order0, order1):
    callback = watching(
        on_error="raise", every_n_steps=every, order1_every_n_steps=order1_every, order1_maps=["order1"]
    )
    shown = panels(fit(lit(), [callback], tmp_path))
    assert shown["normgrad_order0/00_net.stage1"] == order0
    assert shown["normgrad_order1/00_net.stage1"] == order1


def test_accumulated_batches_are_one_step(tmp_path):
    callback = watching(on_error="raise", order1_maps=["contrast"])
    shown = panels(fit(lit(), [callback], tmp_path, accumulate_grad_batches=3))
    assert set(map(tuple, shown.values())) == {(0, 1)}


def test_the_schedule_goes_on_after_a_resume(tmp_path):
    first = watching(on_error="raise", every_n_steps=100, order1_every_n_steps=4)
    trainer = fit(lit(), [first], tmp_path, max_steps=6)
    trainer.save_checkpoint(tmp_path / "middle.ckpt")
    again = watching(on_error="raise", every_n_steps=100, order1_every_n_steps=4)
    module = lit()
    second = pytorch_lightning.Trainer(
        max_steps=12, callbacks=[again], default_root_dir=tmp_path / "again", accelerator="cpu", devices=1,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        second.fit(module, data(), ckpt_path=tmp_path / "middle.ckpt")
    assert panels(second)["normgrad_order1/00_net.stage1"] == [8, 11]


def test_auto_takes_the_layers_that_training_reaches(tmp_path):
    module = lit()
    module.net.stem.requires_grad_(False)
    module.net.stage1.requires_grad_(False)
    callback = watching(on_error="raise", order1_maps=["order1"])
    trainer = fit(module, [callback], tmp_path, limit_train_batches=2)
    assert list(callback.maps) == list(callback.order1["order1"]) == ["net.stage2", "net.stage3"]
    assert set(panels(trainer)) == {
        f"normgrad_{o}/0{i}_net.stage{i + 2}" for o in ("order0", "order1") for i in range(2)
    }


def test_the_modules_own_normgrad_loss_comes_first(tmp_path):
    CALLS.clear()

    class Own(type(lit())):
        def normgrad_loss(self, batch):
            CALLS.append(len(batch[0]))
            return F.cross_entropy(self.net(batch[0]), batch[1], reduction="sum")

        def training_step(self, batch, batch_idx):
            assert self.training
            return super().training_step(batch, batch_idx)

    module = Own()
    callback = watching(on_error="raise", order1_every_n_steps=100, order1_maps=["order1"])
    fit(module, [callback], tmp_path)
    # Two images are tried twice; auto takes one pass; at the first and the last step, two images take four each.
    assert CALLS == [2, 2] + [1] * (1 + 8 + 8)
    assert module.seen == 24


class Manual(type(lit())):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
        optimizer.step()


def test_manual_optimisation_is_told_what_to_write(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"(?s)`training_step` gives none. Add a method to Manual.*def normgrad_loss\(self, batch\):",
    ):
        fit(Manual(), [watching()], tmp_path)


def test_manual_optimisation_with_normgrad_loss_works(tmp_path):
    class Told(Manual):
        def normgrad_loss(self, batch):
            return F.cross_entropy(self.net(batch[0]), batch[1])

    weights = []
    for callbacks in ([], [watching(on_error="raise")]):
        pytorch_lightning.seed_everything(1, verbose=False)
        module = Told()
        fit(module, callbacks, tmp_path)
        weights.append(list(module.state_dict().values()))
    assert same(*weights)
    assert callbacks[0].order1["contrast"]


def returns(value):
    class Returns(type(lit())):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return value(loss) if isinstance(self._trainer, quiet._QuietTrainer) else loss

    return Returns


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (lambda loss: None, '`training_step`: expected a scalar tensor, or a dict with one under "loss", but got None'),
        (lambda loss: {"los": loss}, r"but got a dict with \['los'\]. Write a method `normgrad_loss\(self, batch\)`"),
        (lambda loss: torch.stack([loss, loss]), r"but got a tensor of shape \(2,\)"),
        (lambda loss: 3.0, "but got 3.0"),
        (lambda loss: loss.detach(), "expected a loss that depends on the model's parameters"),
    ],
)
def test_a_loss_that_cannot_be_used_is_told_once_and_training_goes_on(tmp_path, value, told):
    module = returns(value)()
    callback = watching()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(module, [callback], tmp_path)
    assert module.seen == 24
    assert not callback.order1
    ours = [str(w.message) for w in caught if "NormGrad" in str(w.message)]
    assert len(ours) == 1
    with pytest.raises(Exception, match=told):
        fit(returns(value)(), [watching(on_error="raise")], tmp_path)


def only_batch(self, batch):
    return F.cross_entropy(self.net(batch[0]), batch[1])


def named_otherwise(self, things, number):
    assert number in range(6)
    return only_batch(self, things)


def with_rest(self, batch, *rest, **more):
    assert rest or more
    return only_batch(self, batch)


@pytest.mark.parametrize("step", [only_batch, named_otherwise, with_rest])
def test_a_step_is_called_as_lightning_calls_it(tmp_path, step):
    callback = watching(on_error="raise")
    fit(type("Lit", (type(lit()),), {"training_step": step})(), [callback], tmp_path)
    assert callback.order1


def test_a_dict_with_a_loss_is_one(tmp_path):
    callback = watching(on_error="raise")
    fit(returns(lambda loss: {"loss": loss})(), [callback], tmp_path)
    assert callback.order1


def test_a_step_that_is_not_finite_is_skipped_and_counted(tmp_path):
    callback = watching()
    with pytest.warns(UserWarning, match="skips steps whose gradients are not finite"):
        fit(returns(lambda loss: loss * float("nan"))(), [callback], tmp_path, limit_train_batches=3)
    assert callback.skipped == 3
    assert not callback.order1
    assert callback.maps


def test_a_batch_that_cannot_be_cut_is_told(tmp_path):
    class Odd(type(lit())):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch[:2], batch_idx)

    def with_boxes(items):
        images, labels = map(torch.stack, zip(*items, strict=True))
        return images, labels, torch.zeros(9, 6)

    loader = DataLoader(TensorDataset(*batch(24)), batch_size=4, collate_fn=with_boxes)
    with pytest.warns(UserWarning, match=r"`2` has shape \(9, 6\), which does not begin with 4. Set `per_image=False`"):
        fit(Odd(), [watching()], tmp_path, loader=loader)
    callback = watching(per_image=False, on_error="raise")
    fit(Odd(), [callback], tmp_path, loader=loader)
    assert callback.order1


class Momentum(type(lit())):
    """The step moves a teacher's weights, its learning rate and its batch; asks its logger; and hooks a layer once."""

    def __init__(self):
        super().__init__()
        self.teacher = ResNet()
        self.hooked = False

    def training_step(self, batch, batch_idx):
        for mine, theirs in zip(self.net.parameters(), self.teacher.parameters(), strict=True):
            theirs.data.mul_(0.9).add_(mine.data, alpha=0.1)
        for group in self.optimizers().param_groups:
            group["lr"] *= 0.9
        self.lr_schedulers().step()
        if not self.hooked:
            self.net.stem.register_forward_hook(lambda _, args, output: output * 1.1)
            self.hooked = True
        assert "lr" not in self.logger.hparams
        assert list(self.logger.hparams) == []
        assert str(self.logger.log_dir)
        batch.images.mul_(1.1)
        batch.labels = batch.labels.flip(0)
        return F.mse_loss(self.net(batch.images), self.teacher(batch.images)) + self.net(batch.images)[:, 0].mean()


class Own:
    """A batch of a class of one's own."""

    def __init__(self, items):
        self.images, self.labels = map(torch.stack, zip(*items, strict=True))

    def to(self, device):
        return self


@pytest.mark.parametrize("images", ["first", "hardest"])
def test_steps_that_move_more_than_the_weights_keep_every_bit(tmp_path, images):
    runs = []
    for callbacks in ([], [watching(per_image=False, images=images, on_error="raise")]):
        pytorch_lightning.seed_everything(1, verbose=False)
        module = Momentum()
        loader = DataLoader(TensorDataset(*batch(24)), batch_size=4, collate_fn=Own)
        trainer = fit(module, callbacks, tmp_path, loader=loader)
        hooks = [len(m._forward_hooks) for m in module.modules()]
        runs.append([list(module.state_dict().values()), trainer.optimizers[0].state_dict()["param_groups"], hooks])
    assert same(*runs)
    assert callbacks[0].order1["contrast"]


def test_a_module_that_holds_an_iterator_is_told(tmp_path):
    class Draws(type(lit())):
        def __init__(self):
            super().__init__()
            self.unlabelled = iter(data())

    with pytest.warns(UserWarning, match="the module holds an iterator .*Write a method `normgrad_loss"):
        fit(Draws(), [watching()], tmp_path)
    Draws.normgrad_loss = lambda self, batch: F.cross_entropy(self.net(batch[0]), batch[1])
    callback = watching(on_error="raise")
    fit(Draws(), [callback], tmp_path)
    assert callback.order1


def test_two_callbacks_that_differ_in_an_order1_flag_run_side_by_side(tmp_path):
    callbacks = [watching(on_error="raise", epsilon=epsilon) for epsilon in (1e-3, 1e-1)]
    fit(lit(), callbacks, tmp_path, limit_train_batches=2)
    first, second = (callback.order1["order1"]["net.stage3"] for callback in callbacks)
    assert not torch.equal(first, second)


@dataclass
class Sample:
    image: torch.Tensor
    label: torch.Tensor


@pytest.mark.parametrize("make", [lambda x, y: {"image": x, "label": y}, Sample, lambda x, y: (Sample(x, y), {"n": 3})])
def test_batches_of_any_make_are_cut_into_images(tmp_path, make):
    class Any(type(lit())):
        def training_step(self, batch, batch_idx):
            batch = batch[0] if isinstance(batch, tuple) else batch
            image, label = (batch["image"], batch["label"]) if isinstance(batch, dict) else (batch.image, batch.label)
            return F.cross_entropy(self.net(image), label)

    def collate(items):
        return make(*map(torch.stack, zip(*items, strict=True)))

    images, labels = batch(24)
    flags = {"every_n_steps": 100, "order1_every_n_steps": 100, "images": "first"}
    callback = watching(on_error="raise", order1_maps=["order1"], **flags)
    module, history = Any(), History(callback)
    expected = order1_maps(
        module.net, lambda net, b: F.cross_entropy(net(b[0]), b[1]), (images[:2], labels[:2]), "stage*"
    )
    loader = DataLoader(TensorDataset(images, labels), batch_size=4, collate_fn=collate)
    fit(module, [callback, history], tmp_path, loader=loader)
    for name, m in expected.items():
        torch.testing.assert_close(history.order1[0]["order1"][f"net.{name}"], m, rtol=1e-4, atol=1e-7)


class Detector(nn.Module):
    """Takes a list of images of any size and a list of targets; gives losses in train mode only, as detectors do."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3, 2, 1))

    def forward(self, images, targets=None):
        height, width = (max(image.shape[axis] for image in images) for axis in (1, 2))
        padded = [F.pad(i, (0, width - i.shape[2], 0, height - i.shape[1])) for i in images]
        features = self.body(torch.stack(padded))
        if not self.training:
            return [{"boxes": feature} for feature in features]
        losses = [
            F.mse_loss(f.mean((1, 2)), t["boxes"].mean(0).repeat(2)[:6]) for f, t in zip(features, targets, strict=True)
        ]
        return {"boxes": torch.stack(losses).mean()}


def test_a_detectors_lists_of_images_and_targets_are_cut(tmp_path):
    class Detects(type(lit())):
        def __init__(self):
            super().__init__()
            self.net = Detector()

        def training_step(self, batch, batch_idx):
            return sum(self.net(*batch).values())

    items = [
        (
            torch.randn(3, 32 + 4 * (i % 3), 48 - 4 * (i % 2)),
            {"boxes": torch.rand(1 + i % 3, 4), "labels": torch.ones(1 + i % 3)},
        )
        for i in range(12)
    ]
    loader = DataLoader(items, batch_size=3, collate_fn=lambda items: tuple(zip(*items, strict=True)))
    callback = watching(on_error="raise", num_images=3, layers="net.body.*")
    fit(Detects(), [callback], tmp_path, loader=loader)
    assert callback.order1["order1"]["net.body.3"].shape == callback.maps["net.body.3"].shape
    assert callback.order1_inputs.shape == callback.inputs.shape


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"order1_every_n_steps": 0}, "`order1_every_n_steps`: expected a whole number of at least 1, but got 0. None"),
        ({"order1_maps": "order2"}, "expected some of 'order1', 'adversarial', 'contrast'.*, but got 'order2'"),
        ({"order1_maps": []}, "`order1_maps`: expected a list of"),
        (
            {"order1_maps": ["order1", "order2"]},
            "expected some of 'order1', 'adversarial', 'contrast'.*, but got 'order2'",
        ),
        ({"order1_maps": ["order1", "order1"]}, "`order1_maps`: expected a list of"),
        ({"epsilon": 0}, "`epsilon`: expected a number above 0, but got 0"),
        ({"epsilon": -1e-3}, "`epsilon`: expected a number above 0"),
        ({"epsilon": float("nan")}, "`epsilon`: expected a number above 0"),
        ({"per_image": "yes"}, "`per_image`: expected True or False, but got 'yes'"),
    ],
)
def test_a_wrong_flag_is_told_at_once(flags, told):
    with pytest.raises(ValueError, match=told):
        NormGradCallback(**flags)


def test_a_step_that_takes_its_own_batches_is_refused_at_the_start(tmp_path):
    class Takes(type(lit())):
        def training_step(self, dataloader_iter):
            return None

    with pytest.raises(ValueError, match="`training_step` of Takes takes its own from a `dataloader_iter`"):
        fit(Takes(), [watching()], tmp_path)


def test_the_zero_gradient_of_a_learned_image_is_a_zero_map(tmp_path):
    module = returns(lambda loss: loss * 0)()
    callback = watching(on_error="raise")
    with pytest.warns(UserWarning, match="order-1 maps of some images are zero"):
        fit(module, [callback], tmp_path, limit_train_batches=1)
    assert all(not m.any() for maps in callback.order1.values() for m in maps.values())


class Keeps(type(lit())):
    """Keeps things in places where few look for them, and changes them in each step."""

    shared = []  # noqa: RUF012
    arguments = None

    def __init__(self):
        super().__init__()
        self.options = argparse.Namespace(seen=0)
        self.waiting = queue.Queue()
        self.sobol = torch.quasirandom.SobolEngine(2, scramble=True, seed=3)
        self.kept_log = self.log
        self.calls = 0
        self.handle = self.net.stage1.register_forward_hook(self.once, with_kwargs=True)
        self.net.stem.register_forward_hook(self.counting())
        self.frozen = np.zeros(4)
        self.frozen.flags.writeable = False

    def once(self, layer, args, kwargs, output):
        self.handle.remove()

    def counting(self):
        counts = {"calls": 0}
        self.__dict__["read"] = lambda: counts["calls"]

        def count(*_):
            counts["calls"] += 1

        return count

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.shared.append(float(loss.detach()))
        self.options.seen += 1
        self.waiting.put(self.options.seen)
        self.kept_log("kept", loss.detach() + self.sobol.draw(1).sum(), on_epoch=True, on_step=True)
        self.lr_schedulers().step()
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.05)
        inner = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for _ in range(2)]
        return [optimizer], [torch.optim.lr_scheduler.SequentialLR(optimizer, inner, [3])]


def test_what_is_kept_in_odd_places_comes_back(tmp_path):
    runs = []
    for callbacks in ([], [watching(on_error="raise")]):
        pytorch_lightning.seed_everything(1, verbose=False)
        Keeps.shared.clear()
        module, metrics = Keeps(), Metrics()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = fit(module, [metrics, *callbacks], tmp_path)
        (config,) = trainer.lr_scheduler_configs
        runs.append(
            {
                "weights": list(module.state_dict().values()),
                "class": list(module.shared),
                "namespace": vars(module.options),
                "queue": list(module.waiting.queue),
                "sobol": module.sobol.num_generated,
                "logged": [metrics.log_of_steps, scalars(trainer)],
                "schedulers": [s.last_epoch for s in (config.scheduler, *config.scheduler._schedulers)],
                "rates": [group["lr"] for group in trainer.optimizers[0].param_groups],
                "hooks": [[len(m._forward_hooks), len(m._forward_hooks_with_kwargs)] for m in module.modules()],
                "closure": module.read(),
            }
        )
    assert_same(*runs)
    assert callbacks[0].order1["contrast"]


def test_optimisation_that_turns_manual_late_is_told(tmp_path):
    class Late(Manual):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = True

        def on_train_start(self):
            self.automatic_optimization = False

    with pytest.warns(UserWarning, match="with manual optimisation `training_step` gives none. Add a method to Late"):
        fit(Late(), [watching()], tmp_path)


def test_groups_that_a_step_gives_to_the_optimizer_are_given_once(tmp_path):
    class Grows(type(lit())):
        def training_step(self, batch, batch_idx):
            self.optimizers().add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": 0.1 * batch_idx})
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.05)

    callback = watching(on_error="raise")
    trainer = fit(Grows(), [callback], tmp_path)
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [0.05, *(0.1 * i for i in range(6))]
    assert callback.order1


# ---------------------------------------------------------------- what attackers found


class Renames(pytorch_lightning.Callback):
    """Gives the layers other names at the third batch."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 2:
            parts = pl_module.net.named_children()
            pl_module.net = nn.Sequential(OrderedDict((f"new_{name}", part) for name, part in parts))


def test_layers_with_other_names_have_order_1_maps_at_once(tmp_path):
    """The passes run before the step, and must know the new layers."""
    module = lit()
    layers = {"a": nn.Conv2d(3, 4, 3), "b": nn.AdaptiveAvgPool2d(1), "c": nn.Flatten(), "d": nn.Linear(4, 5)}
    module.net = nn.Sequential(OrderedDict(layers))
    callback = NormGradCallback(every_n_steps=1, order1_every_n_steps=1, num_images=2, on_error="raise")
    fit(module, [Renames(), callback], tmp_path, limit_train_batches=3)
    assert callback.order1["contrast"].keys() == {"net.new_a"}


def test_a_layer_keeps_its_number_when_another_is_skipped(tmp_path):
    """LayerDrop: a block is left out of some steps."""

    class Drops(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 5, 3)
            self.calls = 0

        def forward(self, x):
            self.calls += self.training
            x = self.a(x)
            return self.c(x if self.calls % 2 else self.b(x)).mean((2, 3))

    module = lit()
    module.net = Drops()
    flags = {"every_n_steps": 1, "order1_every_n_steps": 1, "num_images": 2, "per_image": False, "views": "panels"}
    callback = NormGradCallback(layers=["net.a", "net.b", "net.c"], **flags)
    trainer = fit(module, [callback], tmp_path)
    numbers = {tag.partition("/")[2] for tag in panels(trainer)}
    assert sorted(number.partition("_")[2] for number in numbers) == ["net.a", "net.b", "net.c"]


def test_ctrl_c_while_hooks_are_taken_off_leaves_none(tmp_path, monkeypatch):
    removed = RemovableHandle.remove

    def remove(handle):
        calls.append(handle)
        if len(calls) == 3:
            raise KeyboardInterrupt
        removed(handle)

    calls = []
    monkeypatch.setattr(RemovableHandle, "remove", remove)
    module = lit()
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        fit(module, [NormGradCallback(every_n_steps=1)], tmp_path)
    assert len(calls) > 10
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def test_a_state_that_makes_no_sense_is_a_warning_and_the_schedule_starts_anew(tmp_path):
    callback = NormGradCallback(views="panels")
    with pytest.warns(UserWarning, match="loading the schedule .* of a checkpoint"):
        callback.load_state_dict({**callback.state_dict(), "last_event": "x"})
    trainer = fit(lit(), [callback], tmp_path)
    assert panels(trainer)["normgrad_order0/00_net.stage1"] == [0, 5]
    assert callback.state_dict()["last_event"] == 5
