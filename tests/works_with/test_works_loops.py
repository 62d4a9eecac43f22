"""However the loop runs: the same bits with the callback and without, the right maps, at the right steps."""

import copy

import torch
import torch.nn.functional as F
from networks import ResNet, batch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from twice import Lit, loader, panels, row, same, train, twice, watching


@row("Loops", "`accumulate_grad_batches=3`", "an event is an optimizer step's first batch; raw values undo the 1/3")
def test_accumulated_gradients(tmp_path):
    twice(tmp_path, accumulate_grad_batches=3, max_epochs=2, steps=[0, 1, 2, 3], order1_steps=[0, 3])


@row("Loops", "`gradient_clip_val`, by norm", "maps show the gradient before it is clipped")
def test_clipping_by_norm(tmp_path):
    twice(tmp_path, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


@row("Loops", "`gradient_clip_val`, by value")
def test_clipping_by_value(tmp_path):
    twice(tmp_path, gradient_clip_val=0.01, gradient_clip_algorithm="value")


class Gan(Lit):
    """Two networks and two optimizers under manual optimisation; the discriminator is what sees images."""

    def __init__(self):
        super().__init__(lambda: nn.Sequential(*discriminator()))
        self.generator = nn.Sequential(nn.ConvTranspose2d(4, 8, 4, 4), nn.Softplus(), nn.Conv2d(8, 3, 3, 1, 1))
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        images, _ = batch
        fake = self.generator(torch.randn(len(images), 4, 4, 6))
        first, second = self.optimizers()
        for optimizer, loss in ((first, self.deceive), (second, self.discern)):
            optimizer.zero_grad()
            value = loss(fake, images)
            self.manual_backward(value)
            optimizer.step()
            self.keep(value)

    def deceive(self, fake, images):
        return F.softplus(-self.net(fake)).mean()

    def discern(self, fake, images):
        return F.softplus(-self.net(images)).mean() + F.softplus(self.net(fake.detach())).mean()

    def loss(self, batch):
        """That of the discriminator on real images alone: what the maps of the last backward belong to."""
        return F.softplus(-self.net(batch[0])).mean()

    normgrad_loss = loss

    def configure_optimizers(self):
        return [torch.optim.Adam(part.parameters(), 1e-3) for part in (self.generator, self.net)], []


def discriminator():
    yield from (nn.Conv2d(3, 6, 3, 1, 1), nn.Softplus(), nn.Conv2d(6, 8, 3, 2, 1), nn.Softplus())
    yield from (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1))


@row(
    "Loops",
    "manual optimisation with several optimizers (a GAN)",
    "the maps are those of the last backward that reached the layer, of the images that entered first; order 1 needs a "
    "`normgrad_loss` and says so",
)
def test_a_gan(tmp_path):
    plain, watched = twice(
        tmp_path,
        Gan,
        flags={"layers": ["net.1", "net.3"]},
        layers=["net.1", "net.3"],
        steps=[0, 2, 4, 6, 8, 10],  # two optimizers, two steps for each batch
        order1_steps=[0, 4, 6, 10],
    )
    images, _ = plain.moments[10].batch
    assert torch.equal(watched.callback.inputs, images[:2])


class ByLbfgs(Lit):
    """An optimizer that runs its closure, and so a backward, several times on each batch."""

    def __init__(self):
        super().__init__(lambda: ResNet(smooth=True))

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), 0.1, max_iter=3)


@row("Loops", "`LBFGS`, which runs its closure several times", "the maps are those of the last closure")
def test_lbfgs(tmp_path):
    plain, _ = twice(tmp_path, ByLbfgs, last_backward=True)
    assert len(plain.module.losses) == 18  # three closures for each batch
    before = [plain.moments[0].weights, plain.backwards[0].weights]
    assert not same(*before)


@row("Loops", "a last batch that is smaller, `drop_last=False`", "as many maps as there are images")
def test_an_odd_last_batch(tmp_path):
    _, watched = twice(tmp_path, data=lambda: loader(21, 4, shuffle=False))
    assert len(watched.history.maps[5]["net.stage3"]) == 1


class Skips(Lit):
    """Gives no loss for some batches."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx in (0, 1, 4) else super().training_step(batch, batch_idx)


@row("Loops", "`training_step` that returns None", "the event waits for the next batch")
def test_skipped_batches(tmp_path):
    _, watched = twice(tmp_path, Skips, steps=[2, 3, 5], order1_steps=[2, 3, 5])
    assert watched.warned == []


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(*batch(24), strict=True)


@row("Loops", "an `IterableDataset`")
def test_iterable_data(tmp_path):
    twice(tmp_path, data=lambda: DataLoader(Stream(), batch_size=4))


class FromDict(Lit):
    """Takes its images out of a dict of batches of two loaders."""

    def loss(self, batch):
        images, labels, others = flat(batch)
        return F.cross_entropy(self.net(images), labels) + 0.1 * self.net(others).square().mean()


class FirstCallAlone(FromDict):
    """The reference: the second call is of a twin that shares the weights, but has no taps."""

    def loss(self, batch):
        images, labels, others = flat(batch)
        twin = copy.deepcopy(self.net)
        for m in twin.modules():
            m._forward_hooks.clear()
            m._forward_pre_hooks.clear()
        scores = self.net(images)
        second = torch.func.functional_call(twin, dict(self.net.named_parameters()), (others,))
        return F.cross_entropy(scores, labels) + 0.1 * second.square().mean()


def flat(batch):
    return (*batch["labelled"], batch["unlabelled"][0]) if isinstance(batch, dict) else batch


@row("Loops", "a `CombinedLoader`, dict batches", "of several calls of the network, the first one's images are shown")
def test_combined_loaders(tmp_path):
    def data():
        return CombinedLoader({"labelled": loader(24, 4), "unlabelled": loader(24, 4)}, "min_size")

    twice(tmp_path, FromDict, data=data, singles=flat, eager=FirstCallAlone)


@row("Loops", "`max_steps`")
def test_max_steps(tmp_path):
    twice(tmp_path, max_steps=4, max_epochs=None, steps=[0, 1, 2, 3], order1_steps=[0, 3])


@row("Loops", "`overfit_batches`")
def test_overfit_batches(tmp_path):
    twice(tmp_path, overfit_batches=2, max_epochs=3)


@row("Loops", "`fast_dev_run`", "maps in `callback.maps`, no files")
def test_fast_dev_run(tmp_path):
    twice(tmp_path, fast_dev_run=3, steps=[0, 1, 2], order1_steps=[0, 2])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


class Validates(Lit):
    """Runs the network in eval mode, and logs, between the steps of an epoch."""

    def validation_step(self, batch, batch_idx):
        assert not self.net.training
        self.log("val", self.loss(batch))


@row("Loops", "validation in the middle of an epoch, sanity checks", "only training is recorded")
def test_validation_in_the_middle(tmp_path):
    def run(trainer, module, data):
        trainer.fit(module, data, loader(8, 4, shuffle=False))

    twice(tmp_path, Validates, run=run, val_check_interval=2, num_sanity_val_steps=2)


@row("Loops", "`trainer.fit` called twice, with the same callback", "the schedule goes on")
def test_fit_twice(tmp_path):
    def run(trainer, module, data):
        trainer.fit(module, data)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, data)

    twice(tmp_path, run=run, steps=range(12), order1_steps=[0, 3, 5, 6, 9, 11])


class Resumes(Lit):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


@row("Loops", "resuming from a checkpoint in mid-epoch", "the schedule goes on where it was")
def test_resuming_in_mid_epoch(tmp_path):
    flags = {"every_n_steps": 2, "order1_every_n_steps": 4}
    checkpoints = []
    for callback in (None, watching(**flags)):
        folder = tmp_path / f"first{bool(callback)}"
        saves = ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=1)
        run = train(
            Resumes, folder, callback, callbacks=lambda saves=saves: [saves], enable_checkpointing=True, max_steps=3
        )
        checkpoints.append(saves.best_model_path)
        assert run.trainer.global_step == 3
    assert panels(run.trainer)["normgrad_order0/00_net.stage1"] == [0, 2]

    def resume(trainer, module, data):
        trainer.fit(module, data, ckpt_path=checkpoints[1])

    _, watched = twice(
        tmp_path,
        Resumes,
        flags=flags,
        run=resume,
        data=lambda: loader(shuffle=False),
        max_epochs=2,
        steps=None,
        order1_steps=None,
    )
    end = watched.trainer.global_step
    assert end >= 12
    assert list(watched.history.maps) == sorted({*range(4, end, 2), end - 1})
    assert panels(watched.trainer)["normgrad_order1/00_net.stage1"] == sorted({*range(4, end, 4), end - 1})
