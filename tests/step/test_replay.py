"""A replay, for compiled models: the maps of the training step, for as little as possible."""

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from networks import ResNet, batch
from torch.utils.data import DataLoader

from normgrad_lightning import NormGradCallback
from normgrad_lightning.layers.own_passes import current_pass

NOTES = []
"""Not in the module, where a replay leaves no trace."""


class Lit(pl.LightningModule):
    """Notes for each convolution in the backward pass of a replay whether its weight gets a gradient."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        if current_pass() is not None:
            NOTES.append([])
            self._spy(loss.grad_fn, NOTES[-1])
        return loss

    def _spy(self, node, note, seen=None):
        seen = set() if seen is None else seen
        if node is None or node in seen:
            return
        seen.add(node)
        if node.name() == "ConvolutionBackward0":
            node.register_hook(lambda inputs, _: note.append(inputs[1] is not None))
        for parent, _ in node.next_functions:
            self._spy(parent, note, seen)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(net, callback):
    torch.manual_seed(0)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = pl.Trainer(max_steps=3, logger=False, accelerator="cpu", callbacks=[callback], **quiet)
    module = Lit(net)
    trainer.fit(module, DataLoader([batch()] * 3, batch_size=None))
    return [p.detach() for p in module.parameters()]


class Record(NormGradCallback):
    """Keeps the maps of each event."""

    def __init__(self, **flags):
        super().__init__(every_n_steps=1, on_error="raise", **flags)
        self.history = []

    def on_train_batch_end(self, *args):
        super().on_train_batch_end(*args)
        self.history.append({name: m.clone() for name, m in self.maps.items()})


@pytest.mark.parametrize(
    ("layers", "asked"),
    [
        (["net.stage2", "net.stage3"], [[False] * 3] * 3),
        ("auto", [[True] * 9, [False] * 6, [False] * 6]),
    ],
)
def test_a_replay_asks_for_its_layers_only(layers, asked):
    torch._dynamo.reset()
    NOTES.clear()
    torch.manual_seed(0)
    net = ResNet()
    state = {name: t.clone() for name, t in net.state_dict().items()}
    live, replayed = Record(layers=layers), Record(layers=layers)
    expected = fit(net, live)
    assert NOTES == []
    net.load_state_dict(state)
    weights = fit(torch.compile(net, backend="eager"), replayed)
    assert [[], [], *asked] == NOTES  # first, the loss of two images is tried twice
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))
    assert len(live.history) == len(replayed.history) == 3
    for ours, theirs in zip(replayed.history, live.history, strict=True):
        torch.testing.assert_close(ours, theirs)
        assert all(m.sum() > 0 for m in ours.values())
