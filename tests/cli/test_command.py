"""The command `normgrad-lightning`, as users type it."""

import pickle
import re
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from networks import ResNet, ViT
from omegaconf import OmegaConf
from PIL import Image
from run_script import BIN, SCRIPTS, run, run_python
from torch import nn
from twice import tap

from normgrad_lightning import functional as NF
from normgrad_lightning import order0_maps, order1_maps, select_layers
from normgrad_lightning.cli.command import main
from normgrad_lightning.cli.layers import layer_rows
from normgrad_lightning.cli.loading import load_images, load_trained
from normgrad_lightning.kinds import EPSILON, KINDS
from normgrad_lightning.views.colours import SIGNED_COLORMAP
from normgrad_lightning.views.drawing import input_tiles, overlay
from normgrad_lightning.views.scales import scale_maps

COMMAND = str(BIN / "normgrad-lightning")
LIT = "classifier:LitClassifier"


def said(capsys):
    """What the command printed last on its way out."""
    return capsys.readouterr().err.strip().splitlines()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a user's script, the checkpoint that it leaves, and three pictures."""
    folder = tmp_path_factory.mktemp("trained")
    folder.joinpath("classifier.py").write_text((SCRIPTS / "classifier.py").read_text())
    run_python(folder, "classifier.py")
    sys.modules.pop("classifier", None)  # the examples have one of this name, too
    sys.path.insert(0, str(folder))
    try:
        from classifier import draw_digits
    finally:
        sys.path.remove(str(folder))
    for i, image in enumerate(draw_digits(3)[0]):
        Image.fromarray((image[0].numpy() * 255).astype(np.uint8)).save(folder / f"{i}.png")
    yield folder
    sys.modules.pop("classifier", None)


# ---------------------------------------------------------------- layers


def test_layers_as_typed(tmp_path):
    result = run(tmp_path, [COMMAND, "layers", "torchvision.models:resnet18", "--input", "3x64x96"])
    assert result.returncode == 0, result.stderr
    table, _, summary = result.stdout.rpartition("\n\n")
    lines = table.splitlines()
    assert lines[0].split() == ["layer", "type", "output", "grid", "parameters"]
    assert ["*", "layer2.1", "BasicBlock", "128x8x12", "8x12", "295,424"] in [line.split() for line in lines]
    assert ["fc", "Linear", "1000", "-", "513,000"] in [line.split() for line in lines]
    assert len({len(line) for line in lines}) == 1
    assert len(lines) == 68
    assert summary.strip() == "67 layers; auto takes relu, layer1.1, layer2.1, layer3.1, layer4.1"
    assert result.stderr == ""


def test_layers_of_a_model_of_ones_own_with_arguments(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    assert main(["layers", "networks:ResNet", "--input", "1x16x24", "--arg", "channels=1", "--arg", "classes=7"]) == 0
    out = capsys.readouterr().out
    assert ["fc", "Linear", "7", "-", "175"] in [line.split() for line in out.splitlines()]
    assert out.endswith("auto takes stage1, stage2, stage3\n")


def test_the_rows_tell_what_the_layers_do():
    torch.manual_seed(0)
    model, images = ResNet(), torch.rand(2, 3, 16, 24)
    model.spare = nn.Conv2d(1, 1, 1)
    rows = layer_rows(model, images)
    shapes = {}
    for name, layer in model.named_modules():
        layer.register_forward_hook(lambda _, args, output, name=name: shapes.update({name: tuple(output.shape[1:])}))
    model(images)
    assert {row.name: row.shape for row in rows} == {
        name: shapes.get(name) for name, _ in model.named_modules() if name
    }
    assert rows[-1].name == "spare"
    assert {row.name for row in rows if row.grid == (8, 12)} == {n for n, s in shapes.items() if s[1:] == (8, 12)}
    assert [row.name for row in rows if row.auto] == select_layers(model, "auto", images)
    assert all(row.parameters == sum(p.numel() for p in model.get_submodule(row.name).parameters()) for row in rows)


def test_auto_is_that_of_training():
    rows = layer_rows(ViT(), torch.rand(2, 3, 32, 48))
    auto = [row.name for row in rows if row.auto]
    assert "blocks.6" not in auto  # no gradient reaches the patches of its last block
    assert len(auto) >= 3


# ---------------------------------------------------------------- explain


def test_explain_as_typed(trained, tmp_path):
    files = ["0.png", "1.png", "2.png"]
    command = [COMMAND, "explain", "last.ckpt", *files, "--module", LIT, "--grey", "--label", "3", "1", "4"]
    result = run(
        trained, [*command, "--mean", "0.5", "--std", "0.25", "--out", f"{tmp_path}/maps/of", "--epsilon=5e-3"]
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [f"{tmp_path}/maps/of.png", f"{tmp_path}/maps/of.npz"]
    progress = ["[1/3] 0.png: label 3", "[2/3] 1.png: label 1", "[3/3] 2.png: label 4"]
    assert [line for line in result.stderr.splitlines() if line.startswith("[")] == progress

    images = load_images([trained / name for name in files], channels=1, mean=[0.5], std=[0.25])
    pixels = np.asarray(Image.open(trained / "2.png"), np.float32)
    np.testing.assert_allclose(images[2, 0], (pixels / 255 - 0.5) / 0.25, rtol=1e-5, atol=1e-6)
    sys.path.insert(0, str(trained))
    try:
        module = load_trained(trained / "last.ckpt", LIT, {})
    finally:
        sys.path.remove(str(trained))
    expected = maps_one_by_one(module, images, torch.tensor([3, 1, 4]))
    with np.load(tmp_path / "maps/of.npz") as numbers:
        assert set(numbers) == {"images", "labels", "files", *expected}
        assert numbers["labels"].tolist() == [3, 1, 4]
        assert numbers["files"].tolist() == files
        np.testing.assert_array_equal(numbers["images"], images)
        for name, m in expected.items():
            tolerance = 1e-4 * np.abs(m).max()
            np.testing.assert_allclose(numbers[name], m, atol=tolerance, err_msg=name)
            assert np.abs(m).max() > 0
    check_sheet(Image.open(tmp_path / "maps/of.png"), images, expected)


def maps_one_by_one(module, images, labels):
    """The maps that are expected, by `kind/layer`."""
    layers = ["features.2", "features.6"]

    def loss(module, batch):
        return F.cross_entropy(module(batch[0]), batch[1])

    rows = {}
    for i in range(len(images)):
        batch = images[i : i + 1], labels[i : i + 1]
        of_kinds = {
            "order0": order0_maps(module, loss, batch, layers),
            "order1": order1_maps(module, loss, batch, layers, epsilon=5e-3),
            "adversarial": order1_maps(module, loss, batch, layers, epsilon=5e-3, adversarial=True),
            "grad_cam": cams(module, batch, layers),
        }
        of_kinds["contrast"] = {n: NF.contrast(of_kinds["order1"][n], of_kinds["adversarial"][n]) for n in layers}
        for kind, of_layers in of_kinds.items():
            for name, m in of_layers.items():
                rows.setdefault(f"{kind}/{name}", []).append(m.numpy()[0])
    return {name: np.stack(maps) for name, maps in rows.items()}


def cams(module, batch, layers):
    """Grad-CAM by loops over what a real backward gives."""
    uses = {name: [] for name in layers}
    handles = [module.get_submodule(name).register_forward_hook(tap(uses[name])) for name in layers]
    module(batch[0])[0, batch[1][0]].backward()
    for handle in handles:
        handle.remove()
    return {name: reference.grad_cam(*uses[name][0]) for name in layers}


def check_sheet(sheet, images, maps):
    """Each map must be found in its colours, in the row of its kind and the column of its layer; first the combined."""
    pixels = np.asarray(sheet)
    of_layers = {
        kind: [torch.from_numpy(m) for name, m in maps.items() if name.startswith(f"{kind}/")]
        for kind, of in KINDS.items()
        if not of.signed
    }
    maps = {f"{kind}/combined": NF.combine(of, (64, 64)).numpy() for kind, of in of_layers.items()} | maps
    tiles = input_tiles(images.numpy(), mean=0.5, std=0.25, tile_size=128)
    places = {}
    for i, tile in enumerate(tiles):
        places["input", i] = place_of(tile[..., :3], pixels)
        for name, m in maps.items():
            signed = name.startswith("contrast")
            look = {"colormap": SIGNED_COLORMAP, "signed": True} if signed else {}
            picture = overlay(tile, scale_maps(m[i : i + 1], signed=signed)[0], **look)
            places[name, i] = place_of(picture[..., :3], pixels)
    assert len(set(places.values())) == len(places)
    for (name, i), (top, left) in places.items():
        if name != "input":
            kind, _, layer = name.partition("/")
            assert top == places[f"{kind}/features.2", i][0]
            assert left == places[f"order0/{layer}", 0][1]
            assert top >= places["input", i][0]
            assert places["input", i][1] < places["order0/combined", i][1] <= left
    tops = [places[f"{kind}/features.2", 0][0] for kind in KINDS]
    assert tops == sorted(tops)


def place_of(tile, pixels):
    """Where on a sheet the tile is, to a rounding error; nowhere else."""
    height, width = tile.shape[:2]
    windows = np.lib.stride_tricks.sliding_window_view(pixels, (height, width), (0, 1))
    corners = np.abs(windows[..., 0, 0].astype(int) - tile[0, 0]) + np.abs(
        windows[..., -1, 9].astype(int) - tile[-1, 9]
    )
    likely = map(tuple, np.argwhere(corners.max(-1) < 5).tolist())
    found = [at for at in likely if np.abs(windows[at].astype(int) - tile.transpose(2, 0, 1)).mean() < 0.5]
    assert len(found) == 1, found
    return found[0]


def test_without_a_label_it_takes_the_models_own_guess(trained, tmp_path):
    command = [COMMAND, "explain", "last.ckpt", "1.png", "--module", LIT, "--grey", "--maps", "order0"]
    result = run(trained, [*command, "--layers", "features.2", "--out", f"{tmp_path}/of"])
    assert result.returncode == 0, result.stderr
    sys.path.insert(0, str(trained))
    try:
        module = load_trained(trained / "last.ckpt", LIT, {})
    finally:
        sys.path.remove(str(trained))
    sure, label = module(load_images([trained / "1.png"], channels=1)).softmax(1).max(1)
    assert f"[1/1] 1.png: label {int(label)} (the model's own guess, {float(sure):.0%})" in result.stderr
    with np.load(tmp_path / "of.npz") as numbers:
        assert set(numbers) == {"images", "labels", "files", "order0/features.2"}
        assert numbers["labels"].tolist() == label.tolist()


def test_the_help_names_what_there_is(tmp_path):
    for arguments in (["--help"], ["layers", "--help"], ["explain", "--help"]):
        result = run(tmp_path, [sys.executable, "-X", "importtime", COMMAND, *arguments])
        assert result.returncode == 0
        assert "usage: normgrad-lightning" in result.stdout
        assert not any(f" {name}\n" in result.stderr for name in ("torch", "numpy", "PIL", "pytorch_lightning"))
    assert f"({EPSILON}, the paper's)" in re.sub(r"\s+", " ", result.stdout)
    assert result.stdout.isascii()


# ---------------------------------------------------------------- checkpoints


class Evil:
    """What a checkpoint can do to those who load it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_checkpoint_runs_no_code_unless_the_user_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    torch.save({"state_dict": ResNet().state_dict(), "extra": Evil(tmp_path / "gotcha")}, tmp_path / "evil.ckpt")
    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    command = [
        "explain",
        f"{tmp_path}/evil.ckpt",
        f"{tmp_path}/a.png",
        "--module",
        "networks:ResNet",
        "--maps",
        "order0",
    ]
    command += ["--out", f"{tmp_path}/maps"]
    assert main(command) == 1
    assert not (tmp_path / "gotcha").exists()
    assert "it holds more than tensors and plain values: io.open. " in said(capsys)[-1]
    assert main([*command, "--unsafe"]) == 0
    assert (tmp_path / "gotcha").exists()


def test_hyperparameters_cannot_name_what_is_called(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    saved = {"classes": 7, "_instantiator": "os.system", "unknown": 1, "channels": 3}
    contents = {"state_dict": ResNet(classes=7).state_dict(), "hyper_parameters": saved, "hparams_name": "kwargs"}
    torch.save(contents, tmp_path / "a.ckpt")
    module = load_trained(tmp_path / "a.ckpt", "networks:ResNet", {})
    assert module.fc.out_features == 7
    assert not module.training


class TakesAll(nn.Module):
    def __init__(self, hparams=None, **others):
        super().__init__()
        self.given = hparams, others
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen = []

    def on_load_checkpoint(self, checkpoint):
        self.seen.append(sorted(checkpoint))


@pytest.mark.parametrize(
    ("name", "given"), [("hparams", ({"a": 1, "_b": 2}, {})), ("kwargs", (None, {"a": 1})), (None, (None, {"a": 1}))]
)
def test_hyperparameters_as_lightning_saves_them(name, given, tmp_path):
    contents = {"state_dict": {"weight": torch.ones(1)}, "hyper_parameters": {"a": 1, "_b": 2}, "hparams_name": name}
    torch.save(contents, tmp_path / "a.ckpt")
    module = load_trained(tmp_path / "a.ckpt", f"{__name__}:TakesAll", {})
    assert module.given == given
    assert module.weight == 1
    assert module.seen == [sorted(contents)]


def test_arguments_go_before_hyperparameters(tmp_path, monkeypatch):
    torch.save({"state_dict": {"weight": torch.ones(1)}, "hyper_parameters": {"a": 1}}, tmp_path / "a.ckpt")
    assert load_trained(tmp_path / "a.ckpt", f"{__name__}:TakesAll", {"a": 2}).given == (None, {"a": 2})


@pytest.mark.parametrize("saved", [OmegaConf.create({"a": 1}), Namespace(a=1)], ids=["OmegaConf", "Namespace"])
def test_hyperparameters_that_are_no_plain_dict(saved, tmp_path):
    weights = {"weight": torch.ones(1)}
    torch.save({"state_dict": weights, "hyper_parameters": saved, "hparams_name": "hparams"}, tmp_path / "a.ckpt")
    module = load_trained(tmp_path / "a.ckpt", f"{__name__}:TakesAll", {}, trusted=True)
    assert module.given[0].a == 1
    torch.save({"state_dict": weights, "hyper_parameters": saved}, tmp_path / "b.ckpt")
    assert load_trained(tmp_path / "b.ckpt", f"{__name__}:TakesAll", {}, trusted=True).given == (None, {"a": 1})


def test_what_a_trusted_checkpoint_holds_may_be_in_this_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("of_mine.py").write_text(
        "import torch\nclass Settings: pass\n"
        "class Net(torch.nn.Module):\n    def __init__(self, settings):\n        super().__init__()\n"
        "        self.settings = settings\n        self.weight = torch.nn.Parameter(torch.zeros(1))\n"
    )
    save = (
        "import torch, of_mine\nhparams = {'settings': of_mine.Settings()}\n"
        "torch.save({'state_dict': {'weight': torch.ones(1)}, 'hyper_parameters': hparams}, 'a.ckpt')"
    )
    run_python(tmp_path, "-c", save)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    module = load_trained(Path("a.ckpt"), "of_mine:Net", {}, trusted=True)
    assert type(module.settings).__name__ == "Settings"


@pytest.mark.parametrize(
    "contents",
    [
        {"model": {"weight": torch.ones(1)}, "epoch": 3},
        {"_orig_mod.weight": torch.ones(1)},
        {"state_dict": {"weight": torch.ones(1)}, "ema": {"weight": torch.zeros(1)}},
        {"weight": torch.ones(1).half()},
    ],
)
def test_weights_wherever_people_keep_them(contents, tmp_path):
    torch.save(contents, tmp_path / "a.ckpt")
    module = load_trained(tmp_path / "a.ckpt", f"{__name__}:TakesAll", {})
    assert module.weight == 1
    assert module.weight.dtype == torch.float32


MADE = TakesAll()


def test_a_module_that_is_made_already_takes_the_weights_alone(tmp_path):
    torch.save({"state_dict": {"weight": torch.ones(1)}, "hyper_parameters": {"a": 1}}, tmp_path / "a.ckpt")
    module = load_trained(tmp_path / "a.ckpt", f"{__name__}:MADE", {})
    assert module.given == (None, {})
    assert module.weight == 1


class Lenient(TakesAll):
    strict_loading = False


def test_a_module_that_is_not_strict(tmp_path):
    torch.save({"state_dict": {"other": torch.ones(1)}}, tmp_path / "a.ckpt")
    assert load_trained(tmp_path / "a.ckpt", f"{__name__}:Lenient", {}).weight == 0


# ---------------------------------------------------------------- pictures


def test_pictures_of_16_bits_are_those_of_8_bits(tmp_path):
    values = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
    Image.fromarray(values).save(tmp_path / "8.png")
    Image.fromarray(values.astype(np.uint16) * 257).save(tmp_path / "16.png")
    for channels in (1, 3):
        eight, sixteen = (load_images([tmp_path / name], channels=channels) for name in ("8.png", "16.png"))
        assert torch.equal(eight, sixteen)
        assert torch.equal(eight[0, 0] * 255, torch.tensor(values).float())


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "CMYK", "1"])
def test_pictures_of_every_kind(mode, tmp_path):
    Image.new("RGB", (6, 4), (255, 255, 255)).convert(mode).save(tmp_path / "a.tif")
    for channels in (1, 3):
        images = load_images([tmp_path / "a.tif"], channels=channels, size=[8, 10])
        assert images.shape == (1, channels, 8, 10)
        assert images.min() == images.max() == 1


# ---------------------------------------------------------------- models of every kind


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
    assert main(["layers", f"{__name__}:{name}", "--input", "3x16x24", "--traceback"]) == 0
    assert "auto takes stage1, stage2, stage3" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["frozen", "half"])
def test_explain_with_every_kind_of_model(name, tmp_path, capsys):
    torch.save(globals()[name]().state_dict(), tmp_path / "a.pt")
    Image.new("RGB", (16, 24), (9, 99, 199)).save(tmp_path / "a.png")
    command = ["explain", f"{tmp_path}/a.pt", f"{tmp_path}/a.png", "--module", f"{__name__}:{name}"]
    assert main([*command, "--out", f"{tmp_path}/maps.png", "--traceback"]) == 0
    with np.load(tmp_path / "maps.npz") as numbers:
        assert all(np.isfinite(numbers[f"{kind}/stage2"]).all() for kind in KINDS)


def test_the_channels_are_those_of_the_first_convolution(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    torch.save(ResNet(channels=1).state_dict(), tmp_path / "a.pt")
    Image.new("RGB", (16, 16), (9, 99, 199)).save(tmp_path / "a.png")
    command = ["explain", f"{tmp_path}/a.pt", f"{tmp_path}/a.png", "--module", "networks:ResNet", "--arg", "channels=1"]
    assert main([*command, "--out", f"{tmp_path}/maps", "--maps", "order0", "--layers", "stage1,stage2"]) == 0
    with np.load(tmp_path / "maps.npz") as numbers:
        assert numbers["images"].shape == (1, 1, 16, 16)
        assert {"order0/stage1", "order0/stage2"} < set(numbers)


# ---------------------------------------------------------------- errors (their texts are in test_messages.py)


def test_what_is_asked_in_a_wrong_way_is_2(capsys):
    for command in ([], ["layers"], ["layers", "a:b", "--input", "3x-1"], ["explain", "a.ckpt"]):
        with pytest.raises(SystemExit) as stopped:
            main(command)
        assert stopped.value.code == 2
        assert "usage: normgrad-lightning" in capsys.readouterr().err


def test_what_cannot_be_done_is_1_and_a_sentence(capsys):
    assert main(["layers", "torchvision.models:resnet81"]) == 1
    told = (
        "normgrad-lightning layers: `torchvision.models:resnet81`: torchvision.models has no 'resnet81'. Did you mean "
    )
    assert said(capsys)[0].startswith(told)


def broken():
    raise RuntimeError("the user's own")


def test_an_error_of_the_users_code_is_told_with_its_kind(capsys):
    assert main(["layers", f"{__name__}:broken"]) == 1
    assert said(capsys) == ["normgrad-lightning layers: RuntimeError: the user's own", "--traceback shows where."]
    with pytest.raises(RuntimeError, match="the user's own"):
        main(["layers", f"{__name__}:broken", "--traceback"])


def ended():
    raise SystemExit(3)


def test_a_script_that_runs_when_it_is_imported_is_told(capsys):
    assert main(["layers", f"{__name__}:ended"]) == 1
    assert said(capsys) == [
        "normgrad-lightning layers: the module ended the program. What a script does belongs under "
        '`if __name__ == "__main__":`.'
    ]


def test_a_pipe_that_closes_is_no_error(tmp_path):
    result = run(tmp_path, f"{COMMAND} layers torchvision.models:resnet18 --input 3x32x32 | head -n 1", shell=True)
    assert result.stdout.split()[0] == "layer"
    assert result.stderr == ""


def interrupted():
    raise KeyboardInterrupt


def test_ctrl_c_is_130(capsys):
    assert main(["layers", f"{__name__}:interrupted"]) == 130
    assert said(capsys) == ["Stopped."]


def test_pickles_that_are_no_checkpoint(tmp_path):
    (tmp_path / "a.ckpt").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ValueError, match="torch cannot read this file as a checkpoint"):
        load_trained(tmp_path / "a.ckpt", f"{__name__}:TakesAll", {})
