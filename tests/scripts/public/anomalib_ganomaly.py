"""Scratches on plates, by anomalib's GANomaly, logged to TensorBoard. It knows nothing of NormGrad."""

from anomalib.data import Folder
from anomalib.engine import Engine
from anomalib.loggers import AnomalibTensorBoardLogger
from anomalib.models import Ganomaly
from lightning.pytorch import seed_everything
from plates import draw_plates

seed_everything(9)
draw_plates("plates")
datamodule = Folder(
    name="plates",
    root="plates",
    normal_dir="good",
    abnormal_dir="scratched",
    train_batch_size=4,
    eval_batch_size=4,
    num_workers=0,
)
pre_processor = Ganomaly.configure_pre_processor(image_size=(64, 64))
model = Ganomaly(batch_size=4, n_features=16, latent_vec_size=32, pre_processor=pre_processor)
logger = AnomalibTensorBoardLogger("logs")
engine = Engine(max_epochs=1, accelerator="cpu", devices=1, enable_progress_bar=False, logger=logger)
engine.fit(model=model, datamodule=datamodule)
engine.trainer.save_checkpoint("last.ckpt")
