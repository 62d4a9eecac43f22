"""What the command advises where it fails, typed: then it ends well."""

import pytest
import torch
from PIL import Image
from torch import nn

from normgrad_lightning.cli.command import main


class Net(nn.Module):
    """Needs to know how many classes there are, and may be given an encoder."""

    def __init__(self, classes, encoder=None):
        super().__init__()
        self.conv = nn.Conv2d(3, classes, 1)

    def forward(self, x):
        return self.conv(x).mean((2, 3))


MODULE = ("--module", f"{__name__}:Net")
EXPLAIN = ("explain", "a.ckpt", "a.png", *MODULE, "--maps", "order0", "--layers", "conv")
NAMES_CODE = {"classes": 4, "encoder": {"_target_": "os.system"}}
FAILS = {
    "code in hyperparameters": (EXPLAIN, NAMES_CODE, "`--arg name=value`", ("--arg", "encoder=None")),
    "code that is trusted": (EXPLAIN, NAMES_CODE, "`--unsafe`", ("--unsafe",)),
    "other weights": (EXPLAIN, {"classes": 5}, "`--arg name=value`", ("--arg", "classes=4")),
    "an argument that is missing": (EXPLAIN, {}, "`--arg name=value`", ("--arg", "classes=4")),
    "no module": (("layers", "a.ckpt"), {"classes": 4}, "`--module`", (*MODULE, "--input", "3x8x8")),
    "images of two sizes": ((*EXPLAIN, "--label", "0"), {"classes": 4}, "`--size`", ("--size", "8x8")),
    "labels": ((*EXPLAIN, "--size", "8x8", "--label", "7"), {"classes": 4}, "`--label`", ("--label", "3")),
    "labels of images": (
        (*EXPLAIN, "--size", "8x8", "--label", "0", "1", "2"),
        {"classes": 4},
        "`--label`",
        ("--label", "0", "1"),
    ),
    "a mean": ((*EXPLAIN, "--size", "8x8", "--mean", "0.1,0.2"), {"classes": 4}, "`--mean`", ("--mean", "0.1")),
}
"""A command that fails, the checkpoint's hyperparameters, what the error names, and what to add to the command."""


@pytest.mark.parametrize("name", FAILS)
def test_what_the_command_advises_works(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command, saved, said, remedy = FAILS[name]
    torch.save({"state_dict": Net(4).state_dict(), "hyper_parameters": saved}, "a.ckpt")
    Image.new("RGB", (8, 8)).save("a.png")
    if "--size" in {*command, *remedy}:
        Image.new("RGB", (6, 8)).save("b.png")
        command = (*command[:3], "b.png", *command[3:])
    assert main([*command]) == 1
    error = capsys.readouterr().err
    assert said in error, error
    assert main([*command, *remedy]) == 0, capsys.readouterr().err
