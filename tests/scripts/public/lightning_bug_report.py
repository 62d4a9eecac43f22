"""Lightning's template for bug reports: a linear layer on vectors. It knows nothing of NormGrad."""

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.demos.boring_classes import BoringModel

if __name__ == "__main__":
    seed_everything(13)
    model = BoringModel()
    trainer = Trainer(
        default_root_dir=".",
        limit_train_batches=2,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        max_epochs=1,
        accelerator="cpu",
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(model)
    trainer.save_checkpoint("last.ckpt")
    assert torch.isfinite(model.layer.weight).all()
