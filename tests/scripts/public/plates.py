"""Draws what the anomaly detectors look at: grey plates, some of them scratched."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw


def draw_plates(folder):
    """Write 15 good and 8 scratched plates, as PNG files."""
    random = np.random.default_rng(0)
    for kind, count in {"good": 15, "scratched": 8}.items():
        Path(folder, kind).mkdir(parents=True)
        for i in range(count):
            noise = random.integers(110, 150, (72, 72, 1)).repeat(3, axis=2).astype(np.uint8)
            plate = Image.fromarray(noise)
            draw = ImageDraw.ViewFlags(plate)
            draw.ellipse([12, 12, 60, 60], outline=(60, 60, 90), width=3)
            if kind == "scratched":
                draw.line([*random.integers(0, 72, 4).tolist()], fill=(230, 40, 40), width=3)
            plate.save(Path(folder, kind, f"{i:02d}.png"))
