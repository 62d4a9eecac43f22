"""Switching NormGrad on without code: `NORMGRAD=1 python train.py`."""
