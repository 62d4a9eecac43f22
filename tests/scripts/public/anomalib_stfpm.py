"""Scratches on plates, by anomalib's student and teacher, without a logger. It knows nothing of NormGrad."""

import timm
from anomalib.data import Folder
from anomalib.engine import Engine
from anomalib.models import Stfpm
from lightning.pytorch import seed_everything
from plates import draw_plates

create_model = timm.create_model
timm.create_model = lambda name, **options: create_model(name, **{**options, "pretrained": False})  # no download

seed_everything(8)
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
pre_processor = Stfpm.configure_pre_processor(image_size=(64, 64))
model = Stfpm(backbone="resnet18", layers=["layer1", "layer2", "layer3"], pre_processor=pre_processor)
engine = Engine(max_epochs=1, accelerator="cpu", devices=1, enable_progress_bar=False)
engine.fit(model=model, datamodule=datamodule)
engine.trainer.save_checkpoint("last.ckpt")
