"""DINO with lightly: a student, a teacher, large and small crops, a small ViT. It knows nothing of NormGrad."""

import copy

import pytorch_lightning as pl
import torch
import torchvision
from lightly.loss import DINOLoss
from lightly.models.modules import DINOProjectionHead, MaskedVisionTransformerTIMM
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.transforms import DINOTransform
from lightly.utils.scheduler import cosine_schedule
from timm.models.vision_transformer import VisionTransformer


class DINO(pl.LightningModule):
    def __init__(self):
        super().__init__()
        vit = VisionTransformer(
            img_size=64, patch_size=8, embed_dim=96, depth=3, num_heads=4, num_classes=0, dynamic_img_size=True
        )
        self.student_backbone = MaskedVisionTransformerTIMM(vit=vit)
        self.student_head = DINOProjectionHead(96, 128, 64, 256, freeze_last_layer=1)
        self.teacher_backbone = copy.deepcopy(self.student_backbone)
        self.teacher_head = DINOProjectionHead(96, 128, 64, 256)
        deactivate_requires_grad(self.teacher_backbone)
        deactivate_requires_grad(self.teacher_head)
        self.criterion = DINOLoss(output_dim=256, warmup_teacher_temp_epochs=5)

    def forward(self, x):
        return self.student_head(self.student_backbone(x).flatten(start_dim=1))

    def forward_teacher(self, x):
        return self.teacher_head(self.teacher_backbone(x).flatten(start_dim=1))

    def training_step(self, batch, batch_idx):
        momentum = cosine_schedule(self.current_epoch, 10, 0.996, 1)
        update_momentum(self.student_backbone, self.teacher_backbone, m=momentum)
        update_momentum(self.student_head, self.teacher_head, m=momentum)
        views, _ = batch
        with torch.no_grad():
            teacher_out = [self.forward_teacher(view) for view in views[:2]]
        student_out = [self(view) for view in views]
        loss = self.criterion(teacher_out, student_out, epoch=self.current_epoch)
        self.log("train_loss", loss)
        return loss

    def on_after_backward(self):
        self.student_head.cancel_last_layer_gradients(current_epoch=self.current_epoch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.001)


pl.seed_everything(3)
transform = DINOTransform(global_crop_size=64, local_crop_size=32, n_local_views=3, gaussian_blur=(0.0, 0.0, 0.0))
dataset = torchvision.datasets.FakeData(size=12, image_size=(3, 72, 72), num_classes=4, transform=transform)
loader = torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True, drop_last=True)
trainer = pl.Trainer(max_epochs=1, accelerator="cpu", devices=1, enable_progress_bar=False, log_every_n_steps=1)
trainer.fit(DINO(), loader)
trainer.save_checkpoint("last.ckpt")
