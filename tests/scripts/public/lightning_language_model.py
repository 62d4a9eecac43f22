"""Lightning's language model: no images at all. It knows nothing of NormGrad."""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.demos import Transformer
from torch.utils.data import DataLoader, TensorDataset


class LanguageModel(L.LightningModule):
    def __init__(self, vocab_size):
        super().__init__()
        self.model = Transformer(vocab_size=vocab_size, ninp=32, nhead=2, nhid=32)

    def training_step(self, batch, batch_idx):
        input, target = batch
        loss = F.nll_loss(self.model(input, target), target.view(-1))
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


L.seed_everything(42)
text = torch.randint(50, (32, 36))
loader = DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=8, shuffle=True)
trainer = L.Trainer(gradient_clip_val=0.25, max_epochs=1, accelerator="cpu", enable_progress_bar=False)
trainer.fit(LanguageModel(vocab_size=50), loader)
trainer.save_checkpoint("last.ckpt")
