"""Lightning's GAN, of linear layers: the generator's output is its only grid. It knows nothing of NormGrad."""

import math

import torch
import torchvision
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision.datasets import FakeData
from torchvision.transforms import Compose, Normalize, ToTensor


class Generator(nn.Module):
    def __init__(self, latent_dim, img_shape):
        super().__init__()
        self.img_shape = img_shape

        def block(n_in, n_out, normalize=True):
            norm = [nn.BatchNorm1d(n_out, 0.8)] if normalize else []
            return [nn.Linear(n_in, n_out), *norm, nn.LeakyReLU(0.2, inplace=True)]

        self.model = nn.Sequential(
            *block(latent_dim, 64, normalize=False), *block(64, 128), nn.Linear(128, math.prod(img_shape)), nn.Tanh()
        )

    def forward(self, z):
        return self.model(z).view(z.size(0), *self.img_shape)


class Discriminator(nn.Module):
    def __init__(self, img_shape):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(math.prod(img_shape), 128),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(128, 64),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(64, 1),
        )

    def forward(self, img):
        return self.model(img.view(img.size(0), -1))


class GAN(LightningModule):
    def __init__(self, img_shape: tuple = (1, 28, 28), lr: float = 0.0002, latent_dim: int = 32):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = Generator(latent_dim, img_shape)
        self.discriminator = Discriminator(img_shape)
        self.validation_z = torch.randn(8, latent_dim)
        self.example_input_array = torch.zeros(2, latent_dim)

    def forward(self, z):
        return self.generator(z)

    def training_step(self, batch):
        imgs, _ = batch
        opt_g, opt_d = self.optimizers()
        z = torch.randn(imgs.shape[0], self.hparams.latent_dim).type_as(imgs)
        valid = torch.ones(imgs.size(0), 1).type_as(imgs)
        fake = torch.zeros(imgs.size(0), 1).type_as(imgs)

        self.toggle_optimizer(opt_g)
        g_loss = F.binary_cross_entropy_with_logits(self.discriminator(self(z)), valid)
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        opt_g.step()
        self.untoggle_optimizer(opt_g)

        self.toggle_optimizer(opt_d)
        real_loss = F.binary_cross_entropy_with_logits(self.discriminator(imgs), valid)
        fake_loss = F.binary_cross_entropy_with_logits(self.discriminator(self(z).detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()
        self.untoggle_optimizer(opt_d)
        self.log_dict({"d_loss": d_loss, "g_loss": g_loss})

    def configure_optimizers(self):
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999))
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999))
        return opt_g, opt_d

    def on_train_epoch_end(self):
        grid = torchvision.utils.make_grid(self(self.validation_z.type_as(self.generator.model[0].weight)))
        for logger in self.loggers:
            logger.experiment.add_image("generated_images", grid, self.current_epoch)


if __name__ == "__main__":
    seed_everything(11)
    transform = Compose([ToTensor(), Normalize((0.5,), (0.5,))])
    loader = DataLoader(FakeData(32, (1, 28, 28), 10, transform=transform), batch_size=8, shuffle=True)
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, log_every_n_steps=1, enable_progress_bar=False)
    trainer.fit(GAN(), loader)
    trainer.save_checkpoint("last.ckpt")
