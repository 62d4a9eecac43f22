"""The command `normgrad-lightning layers`, and what all commands have in common."""

import re
import sys

import pytest
import torch
from networks import ResNet, ViT
from run_script import BIN, run
from torch import nn

from normgrad_lightning import select_layers
from normgrad_lightning.cli.arguments import COMMANDS
from normgrad_lightning.cli.command import main
from normgrad_lightning.cli.layers import layer_rows

COMMAND = str(BIN / "normgrad-lightning")


def test_layers_as_typed_into_a_pipe_that_closes(tmp_path):
    result = run(tmp_path, f"{COMMAND} layers torchvision.models:resnet18 --input 3x32x32 | head -n 1", shell=True)
    assert result.stderr == ""
    assert result.stdout.split() == ["layer", "type", "output", "grid", "parameters"]


def test_the_table_of_a_resnet(capsys):
    assert main(["layers", "torchvision.models:resnet18", "--input", "3x64x96"]) == 0
    *lines, empty, summary = capsys.readouterr().out.splitlines()
    assert ["*", "layer2.1", "BasicBlock", "128x8x12", "8x12", "295,424"] in [line.split() for line in lines]
    assert ["fc", "Linear", "1000", "-", "513,000"] in [line.split() for line in lines]
    assert len({len(line) for line in lines}) == 1
    assert len(lines) == 68
    assert (empty, summary) == ("", "67 layers; auto takes relu, layer1.1, layer2.1, layer3.1, layer4.1")


def test_layers_of_a_model_with_arguments(capsys):
    assert main(["layers", "networks:ResNet", "--input", "1x16x24", "--arg", "channels=1", "--arg", "classes=7"]) == 0
    out = capsys.readouterr().out
    assert ["fc", "Linear", "7", "-", "175"] in [line.split() for line in out.splitlines()]
    assert out.endswith("auto takes stage1, stage2, stage3\n")


def test_the_rows_tell_what_the_layers_do():
    torch.manual_seed(0)
    model, images = ResNet(), torch.rand(2, 3, 16, 24)
    model.spare = nn.Conv2d(1, 1, 1)
    rows, auto = layer_rows(model, images)
    shapes = dict.fromkeys((name for name, _ in model.named_modules() if name), "uncalled")
    for name, layer in model.named_modules():
        layer.register_forward_hook(
            lambda _, args, output, name=name: shapes.update({name: "x".join(map(str, output.shape[1:]))})
        )
    model(images)
    del shapes[""]
    heading, *rows = rows
    assert heading == ("", "layer", "type", "output", "grid", "parameters")
    assert {name: output for _, name, _, output, _, _ in rows} == shapes
    assert rows[-1][1] == "spare"
    assert {row[1] for row in rows if row[4] == "8x12"} == {n for n, text in shapes.items() if text.endswith("x8x12")}
    assert auto == [row[1] for row in rows if row[0] == "*"] == select_layers(model, "auto", images)
    for _, name, kind, _, _, parameters in rows:
        layer = model.get_submodule(name)
        assert (kind, parameters) == (type(layer).__name__, f"{sum(p.numel() for p in layer.parameters()):,}")


def test_auto_is_that_of_training():
    _, auto = layer_rows(ViT(), torch.rand(2, 3, 32, 48))
    assert "blocks.6" not in auto  # no gradient reaches the patches of its last block
    assert len(auto) >= 3
    model = ResNet()
    model.stem.requires_grad_(False)
    model.stage1.requires_grad_(False)
    assert layer_rows(model, torch.rand(2, 3, 16, 24))[1] == ["stage2", "stage3"]


def frozen():
    return ResNet().requires_grad_(False)


def half():
    return ResNet().half()


class Detector(ResNet):
    """Needs targets in train mode, and gives no floating-point tensor."""

    def forward(self, x):
        assert not self.training
        return super().forward(x).argmax(1)


@pytest.mark.parametrize("name", ["frozen", "half", "Detector"])
def test_layers_of_every_kind_of_model(name, capsys):
    assert main(["layers", f"{__name__}:{name}", "--input", "3x16x24"]) == 0
    assert "auto takes stage1, stage2, stage3" in capsys.readouterr().out


# ---------------------------------------------------------------- all commands


def test_the_help_is_fast_and_names_every_command(tmp_path):
    for arguments in ([], *([name] for name in COMMANDS)):
        result = run(tmp_path, [sys.executable, "-X", "importtime", COMMAND, *arguments, "--help"])
        assert result.returncode == 0
        assert f"usage: {' '.join(['normgrad-lightning', *arguments])}" in result.stdout
        assert not re.search(r" (torch|numpy|PIL|pytorch_lightning)\n", result.stderr)
        assert result.stdout.isascii()
        assert arguments or all(f"    {name} " in result.stdout for name in COMMANDS)


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["layers"],
        ["layers", "a:b", "--input", "3x-1"],
        ["layers", "a:b", "--arg", "a"],
        ["explain", "a.ckpt", "--module", "a:b"],
        ["explain", "a.ckpt", "a.png"],
        ["explain", "a.ckpt", "a.png", "--module", "a:b", "--size", "3x4x5"],
        ["explain", "a.ckpt", "a.png", "--module", "a:b", "--mean", "a,b"],
    ],
)
def test_wrong_arguments_are_2_and_the_usage(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(command)
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert "usage: normgrad-lightning" in err
    assert not command or command[-1] in err or "required" in err


def broken():
    raise RuntimeError("the user's own")


def ended():
    raise SystemExit(3)


def interrupted():
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("broken", 1, ["normgrad-lightning layers: RuntimeError: the user's own", "--traceback shows where."]),
        ("ended", 1, ["The module ended the program. Put what a script does under `if __name__ == '__main__':`."]),
        ("interrupted", 130, ["Stopped."]),
    ],
)
def test_what_becomes_of_errors(name, code, said, capsys):
    assert main(["layers", f"{__name__}:{name}"]) == code
    assert capsys.readouterr().err.splitlines() == said


def test_a_traceback_shows_where(capsys):
    assert main(["layers", f"{__name__}:broken", "--traceback"]) == 1
    err = capsys.readouterr().err
    assert "in broken" in err
    assert err.endswith("RuntimeError: the user's own\n")
