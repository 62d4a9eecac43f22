"""From maps of any range to [0, 1]: how bright a value is in a picture."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from normgrad_lightning.checks import check_choice
from normgrad_lightning.views.resampling import Floats, smoothed
from normgrad_lightning.views.style import Scale, Style

_PERCENTILE = 99.5


def wide(values: npt.NDArray[Any]) -> Floats:
    """Return the values as float32, or as float64 where they need it."""
    values = np.asarray(values)
    return values.astype(np.result_type(values, np.float32), copy=False)


def scale_maps(maps: Floats, scale: str = Style.scale, *, signed: bool = False) -> npt.NDArray[np.float32]:
    """Return the maps brought to [0, 1], `(N, *S)` as given: from minimum to maximum, or signed with zero at 0.5.

    Args:
        maps: `(N, *S)`, of any range. Values that are not finite are ignored and come out as 0 (signed: as 0.5).
        scale: `"robust"` for each map on its own, `smoothed`, and with the 99.5th percentile of the smoothed map as its
            maximum: what is above comes out as 1. `"image"` for each map on its own as it is, `"shared"` for one
            range over all of them, which makes their strengths comparable. Without a range (a constant map; signed: a
            zero map) the result is 0 (signed: 0.5).
        signed: keep zero in the middle: the largest value (robust: the 99.5th percentile of absolute values), of either
            sign, comes out as 0 or 1.
    """
    check_choice("scale", scale, get_args(Scale))
    maps = wide(maps)
    if scale == "robust":
        return _robust(maps, signed)
    groups = [maps] if scale == "shared" else maps
    scaled = [_centred(group) if signed else unit(group, constant=0.0) for group in groups]
    return np.asarray(scaled, dtype=np.float32).reshape(maps.shape)


def unit(values: Floats, *, constant: float) -> Floats:
    """Return the values brought to [0, 1] by min–max: `constant` without a range, 0 where a value is not finite."""
    low, high, are_finite = finite_range(values)
    if high - low > 1e38:
        values = values.astype(np.float64)  # the differences overflow float32
    scaled = (values - low) / (high - low) if low < high else np.full_like(values, constant)
    return scaled if are_finite else np.where(np.isfinite(values), scaled, np.zeros_like(scaled))


def _centred(values: Floats) -> Floats:
    """Return the values divided by the largest of them, whatever its sign, and brought from [-1, 1] to [0, 1]."""
    low, high, are_finite = finite_range(values)
    largest = max(-low, high)
    values = values if are_finite else np.where(np.isfinite(values), values, np.zeros_like(values))
    return values / largest / 2 + 0.5 if largest > 0 else np.full_like(values, 0.5)


def finite_range(values: Floats) -> tuple[float, float, bool]:
    """Return the minimum and maximum of the finite values, (0, 0) if there are none, and whether all are finite."""
    low, high = float(values.min(initial=np.inf)), float(values.max(initial=-np.inf))
    if math.isfinite(low) and math.isfinite(high):
        return low, high, True
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max()), False) if finite.size else (0.0, 0.0, False)


def _robust(maps: Floats, signed: bool) -> npt.NDArray[np.float32]:
    finite = np.isfinite(maps)
    are_finite = bool(finite.all())
    values = _divided_by_largest(maps if are_finite else np.where(finite, maps, np.zeros_like(maps)))
    smooth = smoothed(values)
    if not are_finite:
        smooth = smooth / np.maximum(smoothed(finite.astype(np.float32)), np.float32(1e-6))
    scaled = np.zeros(maps.shape, np.float32)
    for i, inside in enumerate(finite):
        before, after = (values[i], smooth[i]) if are_finite else (values[i][inside], smooth[i][inside])
        low, high = (0.0, _limit(np.abs(after), 0.0)) if signed else _drawn_range(before, after)
        if low < high:
            scaled[i] = ((smooth[i] - low) / (high - low)).clip(-1.0, 1.0)
    if not are_finite:
        scaled[~finite] = 0.0
    if signed:
        scaled *= 0.5
        scaled += 0.5
    return scaled


def _divided_by_largest(values: Floats) -> npt.NDArray[np.float32]:
    """Return each map with a largest absolute value of 1, so that sums neither vanish nor overflow; zeros as zeros."""
    largest = np.abs(values).max(axis=tuple(range(1, values.ndim)), keepdims=True, initial=0.0)
    divided: Floats = values / np.where(largest > 0, largest, np.ones_like(largest))
    return divided.astype(np.float32, copy=False)


def _drawn_range(before: Floats, after: Floats) -> tuple[float, float]:
    """Return what is dark and what is bright; (0, 0) for a constant map, of which smoothing leaves rounding errors."""
    if not before.size or before.min() == before.max():
        return 0.0, 0.0
    low = float(after.min())
    return low, _limit(after, low)


def _limit(values: Floats, low: float) -> float:
    """Return the 99.5th percentile, or the maximum if that is no more than `low`.

    It is one of the values, not interpolated: nothing is cut off on grids of up to 200 cells.
    """
    if not values.size:
        return low
    index = math.ceil(_PERCENTILE / 100 * (values.size - 1))
    limit = float(np.partition(values, index, axis=None)[index])
    return limit if limit > low else float(values.max())
