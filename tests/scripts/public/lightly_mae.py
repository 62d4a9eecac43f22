"""A masked autoencoder with lightly: the encoder sees a quarter of the tokens. It knows nothing of NormGrad."""

import pytorch_lightning as pl
import torch
import torchvision
from lightly.models import utils
from lightly.models.modules import MaskedVisionTransformerDecoderTIMM, MaskedVisionTransformerTIMM
from lightly.transforms import MAETransform
from timm.models.vision_transformer import VisionTransformer
from torch import nn


class MAE(pl.LightningModule):
    def __init__(self):
        super().__init__()
        vit = VisionTransformer(img_size=64, patch_size=8, embed_dim=96, depth=3, num_heads=4, num_classes=0)
        self.mask_ratio = 0.75
        self.patch_size = vit.patch_embed.patch_size[0]
        self.backbone = MaskedVisionTransformerTIMM(vit=vit)
        self.sequence_length = self.backbone.sequence_length
        self.decoder_embed = nn.Linear(96, 64)
        self.decoder = MaskedVisionTransformerDecoderTIMM(
            num_patches=vit.patch_embed.num_patches, embed_dim=64, depth=2, num_heads=4
        )
        self.prediction_head = nn.Linear(64, self.patch_size**2 * 3)
        self.criterion = nn.MSELoss()

    def forward_decoder(self, x_encoded, idx_keep, idx_mask):
        x_masked = utils.repeat_token(self.decoder.mask_token, (len(x_encoded), self.sequence_length))
        x_masked = utils.set_at_index(x_masked, idx_keep, self.decoder_embed(x_encoded).type_as(x_masked))
        x_decoded = self.decoder(x_masked)
        return self.prediction_head(utils.get_at_index(x_decoded, idx_mask))

    def training_step(self, batch, batch_idx):
        (images,), _ = batch
        idx_keep, idx_mask = utils.random_token_mask(
            size=(len(images), self.sequence_length), mask_ratio=self.mask_ratio, device=images.device
        )
        x_encoded = self.backbone.encode(images=images, idx_keep=idx_keep)
        x_pred = self.forward_decoder(x_encoded, idx_keep, idx_mask)
        patches = utils.patchify(images, self.patch_size)
        target = utils.get_at_index(patches, idx_mask - 1)  # patches have no class token
        loss = self.criterion(x_pred, target)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1.5e-4)


pl.seed_everything(4)
transform = MAETransform(input_size=64)
dataset = torchvision.datasets.FakeData(size=12, image_size=(3, 72, 72), num_classes=4, transform=transform)
loader = torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True, drop_last=True)
trainer = pl.Trainer(max_epochs=1, accelerator="cpu", devices=1, enable_progress_bar=False, log_every_n_steps=1)
trainer.fit(MAE(), loader)
trainer.save_checkpoint("last.ckpt")
