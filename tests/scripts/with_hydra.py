"""Hydra as most templates have it: everything in the config, callbacks by their `_target_`."""

import hydra
import lightning as L
from classifier import DigitsDataModule, LitClassifier
from hydra.utils import instantiate
from omegaconf import DictConfig


@hydra.main(version_base=None, config_path=None, config_name="config")
def main(cfg: DictConfig) -> None:
    L.seed_everything(0)
    callbacks = [instantiate(callback) for callback in cfg.callbacks.values()]
    trainer = instantiate(cfg.trainer, callbacks=callbacks)
    trainer.fit(LitClassifier(), datamodule=DigitsDataModule())


if __name__ == "__main__":
    main()
