"""The command `normgrad-lightning explain`: its maps, its sheet, what it is told and what it says."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import pytorch_lightning as pl
import reference
import torch
import torch.nn.functional as F
from networks import ResNet
from PIL import Image
from run_script import BIN, SCRIPTS, run, run_python
from torch import nn
from twice import tap

from normgrad_lightning import functional as NF
from normgrad_lightning import order0_maps, order1_maps
from normgrad_lightning.cli.checkpoint import load_trained
from normgrad_lightning.cli.command import main
from normgrad_lightning.cli.explain import RAW
from normgrad_lightning.cli.images import load_images, pictures_of
from normgrad_lightning.maps import KINDS
from normgrad_lightning.views.drawing import input_tiles, overlay
from normgrad_lightning.views.scales import scale_maps
from normgrad_lightning.views.style import SIGNED_COLORMAP

# ---------------------------------------------------------------- a user's script, checkpoint and pictures


def test_explain_as_typed(tmp_path):
    (tmp_path / "classifier.py").write_text((SCRIPTS / "classifier.py").read_text())
    train = "import runpy; script = runpy.run_path('classifier.py', run_name='__main__')"
    draw = "import torch; torch.save(script['draw_digits'](3)[0], 'digits.pt')"
    run_python(tmp_path, "-c", f"{train}; {draw}")
    files = ["0.png", "1.png", "2.png"]
    for name, image in zip(files, torch.load(tmp_path / "digits.pt"), strict=True):
        Image.fromarray((image[0].numpy() * 255).astype(np.uint8)).save(tmp_path / name)
    command = "explain last.ckpt 0.png 1.png 2.png --module classifier.py:LitClassifier --label 3 1 4"
    more = "--mean 0.5 --std 0.25 --out maps/of"
    result = run(tmp_path, [str(BIN / "normgrad-lightning"), *command.split(), *more.split()])
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["maps/of.png", "maps/of.npz"]
    progress = ["[1/3] 0.png: label 3", "[2/3] 1.png: label 1", "[3/3] 2.png: label 4"]
    assert [line for line in result.stderr.splitlines() if line.startswith("[")] == progress

    pixels = np.stack([np.asarray(Image.open(tmp_path / name), np.float32)[None] for name in files])
    module = load_trained(tmp_path / "last.ckpt", f"{tmp_path}/classifier.py:LitClassifier", {})
    with np.load(tmp_path / "maps/of.npz") as numbers:
        images = torch.from_numpy(numbers["images"])
        np.testing.assert_allclose(images, (pixels / 255 - 0.5) / 0.25, rtol=1e-5, atol=1e-6)
        expected = maps_one_by_one(module, images, torch.tensor([3, 1, 4]))
        assert set(numbers) == {"images", "labels", "files", *expected}
        assert numbers["labels"].tolist() == [3, 1, 4]
        assert numbers["files"].tolist() == files
        for name, m in expected.items():
            np.testing.assert_allclose(numbers[name], m, atol=1e-4 * np.abs(m).max(), err_msg=name)
            assert np.abs(m).max() > 0
    check_sheet(Image.open(tmp_path / "maps/of.png"), images, expected)
    forget("classifier")


def forget(module):
    for name in [name for name in sys.modules if Path(name).stem == module]:  # the examples have one of this name, too
        del sys.modules[name]


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
            "order1": order1_maps(module, loss, batch, layers),
            "adversarial": order1_maps(module, loss, batch, layers, adversarial=True),
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
            style = {"colormap": SIGNED_COLORMAP, "signed": True} if signed else {}
            picture = overlay(tile, scale_maps(m[i : i + 1], signed=signed)[0], **style)
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


# ---------------------------------------------------------------- small models in this process

COLOURS = ((250, 20, 30), (20, 200, 40), (30, 60, 240), (240, 240, 20))


class ByColour(nn.Module):
    """Guesses class 0, 1 or 2 for red, green and blue."""

    def __init__(self, mean=None, std=None):
        super().__init__()
        self.hparams = {"mean": mean, "std": std}
        self.conv = nn.Conv2d(3, 3, 1, bias=False)
        nn.init.dirac_(self.conv.weight)

    def forward(self, x):
        return self.conv(x).mean((2, 3))


class Biased(ByColour):
    """Guesses class 2 for every image."""

    def forward(self, x):
        return super().forward(x) + torch.tensor([0.0, 0.0, 100.0])


class OwnLoss(ByColour):
    """Has no scores for classes."""

    def forward(self, x):
        return self.conv(x)

    def normgrad_loss(self, batch):
        return self(batch[0]).square().mean()


class OnlyTrains(pl.LightningModule):
    """Does all in its `training_step`, as many modules do."""

    def __init__(self):
        super().__init__()
        self.net, self.loss = ByColour(), nn.CrossEntropyLoss()


class OnlyTrainsTwo(OnlyTrains):
    def __init__(self):
        super().__init__()
        self.teacher = ByColour()


def frozen():
    return ResNet().requires_grad_(False)


def half():
    return ResNet().half()


@pytest.fixture
def explain(tmp_path, capsys):
    """Runs `explain` on pictures of one colour each."""

    def run(maker, *options, images=4, maps="order0", hyperparameters=None):
        weights = globals()[maker]().state_dict()
        torch.save({"state_dict": weights, "hyper_parameters": hyperparameters or {}}, tmp_path / "a.ckpt")
        for i in range(images):
            Image.new("RGB", (12, 16), COLOURS[i]).save(tmp_path / f"{i}.png")
        files = [f"{tmp_path}/{i}.png" for i in range(images)]
        command = ["explain", f"{tmp_path}/a.ckpt", *files, "--module", f"{__name__}:{maker}", "--maps", *maps.split()]
        code = main([*command, "--out", f"{tmp_path}/maps", *options])
        told = capsys.readouterr().err.splitlines()
        numbers = dict(np.load(tmp_path / "maps.npz")) if code == 0 else {}
        return SimpleNamespace(code=code, told=told, numbers=numbers, sheet=tmp_path / "maps.png")

    return run


def test_without_a_label_it_takes_the_models_own_guess(explain):
    result = explain("ByColour", images=3)
    sure = torch.tensor(COLOURS[:3]).div(255).softmax(1).amax(1)
    expected = [
        f"[{i + 1}/3] {i}.png: label {i} (the model's own guess, {float(share):.0%})" for i, share in enumerate(sure)
    ]
    assert result.told == [RAW, *expected]
    assert result.numbers["labels"].tolist() == [0, 1, 2]
    assert explain("ByColour", "--label", "1", images=3).numbers["labels"].tolist() == [1, 1, 1]


def test_one_guess_for_all_images_is_doubted(explain):
    result = explain("Biased", images=3)
    doubt = "All images get one guess, 2: is the normalisation right? --mean and --std set it."
    assert result.told[-1] == doubt
    doubted = Image.open(result.sheet).copy()
    plain = Image.open(explain("Biased", "--label", "2", images=3).sheet)
    band = doubted.height - plain.height
    assert band > 20
    assert np.asarray(doubted.crop((0, 0, doubted.width, band))).min() < 60  # it is written there
    below = np.asarray(doubted.crop((0, band, plain.width, doubted.height))).astype(int)
    assert (np.abs(below - np.asarray(plain)).max(-1) > 0).mean() < 0.05  # and the rest is the same, but for captions
    for maker, options, images in (("Biased", ("--label", "2"), 4), ("Biased", (), 2), ("ByColour", (), 3)):
        assert "normalisation" not in " ".join(explain(maker, *options, images=images).told)


def test_the_mean_and_std_of_the_hyperparameters_are_used_and_told(explain):
    mean, std = [0.5, 0.25, 0.125], [0.5, 0.25, 0.2]
    result = explain("ByColour", hyperparameters={"mean": mean, "std": std})
    assert result.told[:2] == [
        "--mean 0.5,0.25,0.125 is taken from the hyperparameters.",
        "--std 0.5,0.25,0.2 is taken from the hyperparameters.",
    ]
    colours, mean, std = (torch.tensor(values)[..., None, None] for values in (COLOURS, mean, std))
    expected = ((colours / 255 - mean) / std).expand(-1, -1, 16, 12)
    np.testing.assert_allclose(result.numbers["images"], expected, rtol=1e-5, atol=1e-6)
    sheet = np.asarray(Image.open(result.sheet)).reshape(-1, 3).tolist()
    assert all(list(colour) in sheet for colour in COLOURS)  # drawn as the files have them


@pytest.mark.parametrize(
    ("options", "saved", "is_raw"),
    [
        ([], {}, True),
        ([], {"mean": [123.7, 116.3, 103.5]}, True),  # not of pixels from 0 to 1
        (["--label", "1"], {}, True),
        (["--mean", "0"], {}, False),
        (["--std", "1"], {}, False),
        ([], {"mean": 0.5, "std": 0.5}, False),
    ],
)
def test_where_nothing_is_normalised_it_says_so(options, saved, is_raw, explain):
    assert explain("ByColour", *options, images=1, hyperparameters=saved).told.count(RAW) == is_raw


def test_what_is_given_counts_before_the_hyperparameters(explain):
    result = explain("ByColour", "--mean", "0.25", hyperparameters={"mean": [0.1, 0.2, 0.3], "std": 0.5})
    assert result.told[0] == "--std 0.5 is taken from the hyperparameters."
    expected = explain("ByColour", "--mean", "0.25,0.25,0.25", "--std", "0.5").numbers["images"]
    np.testing.assert_array_equal(result.numbers["images"], expected)


@pytest.mark.parametrize("mean", ["imagenet", [[0.5]], float("nan"), {"red": 0.5}, [123.7, 116.3, 103.5]])
def test_what_cannot_be_a_mean_is_left_alone(mean, explain):
    result = explain("ByColour", hyperparameters={"mean": mean})
    np.testing.assert_array_equal(result.numbers["images"], explain("ByColour").numbers["images"])


@pytest.mark.parametrize("name", ["frozen", "half"])
def test_every_kind_of_model(name, explain):
    numbers = explain(name, maps=" ".join(KINDS)).numbers
    assert all(np.isfinite(numbers[f"{kind}/stage2"]).all() for kind in KINDS)


def test_a_loss_of_ones_own(explain):
    numbers = explain("OwnLoss", "--label", "7", maps="order0 order1").numbers
    assert numbers["order0/conv"].min() > 0
    assert numbers["order1/conv"].shape == (4, 16, 12)


def test_a_module_without_forward_is_called_as_its_one_network_is(explain):
    with_forward, without = explain("ByColour", images=3), explain("OnlyTrains", images=3)
    np.testing.assert_array_equal(without.numbers["labels"], [0, 1, 2])
    np.testing.assert_array_equal(without.numbers["order0/net.conv"], with_forward.numbers["order0/conv"])


def test_names_of_layers_with_commas_or_without(explain):
    for names in (["stage1", "stage2"], ["stage1,stage2"], ["stage[12]"]):
        numbers = explain("frozen", "--layers", *names).numbers
        assert set(numbers) == {"images", "labels", "files", "order0/stage1", "order0/stage2"}


def test_a_layer_without_a_map_is_one_warning(explain):
    result = explain("frozen", "--layers", "stage1", "fc")
    assert "order0/stage1" in result.numbers
    assert len([line for line in result.told if line.startswith("Warning: ") and "'fc'" in line]) == 1


# ---------------------------------------------------------------- pictures


def test_pictures_of_16_bits_are_those_of_8_bits(tmp_path):
    values = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
    Image.fromarray(values).save(tmp_path / "8.png")
    Image.fromarray(values.astype(np.uint16) * 257).save(tmp_path / "16.png")
    for channels in (1, 3):
        eight, sixteen = (load_images([tmp_path / name], channels) for name in ("8.png", "16.png"))
        assert torch.equal(eight, sixteen)
        assert torch.equal(eight[0, 0] * 255, torch.tensor(values).float())


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "CMYK", "1"])
def test_pictures_of_every_kind(mode, tmp_path):
    Image.new("RGB", (6, 4), (255, 255, 255)).convert(mode).save(tmp_path / "a.tif")
    for channels in (1, 3):
        images = load_images([tmp_path / "a.tif"], channels, (8, 10))
        assert images.shape == (1, channels, 8, 10)
        assert images.min() == images.max() == 1


def test_a_folder_is_its_pictures_by_name(tmp_path):
    (tmp_path / "deeper").mkdir()
    for name in ("b.png", "a.JPG", "deeper/c.png"):
        Image.new("RGB", (6, 4)).save(tmp_path / name)
    (tmp_path / "labels.txt").write_text("1 2")
    single = tmp_path / "labels.txt"  # a file that is named is taken, whatever it is
    assert pictures_of([single, tmp_path]) == [single, tmp_path / "a.JPG", tmp_path / "b.png"]


# ---------------------------------------------------------------- what cannot be done


@pytest.mark.parametrize(
    ("maker", "options", "said"),
    [
        ("ByColour", ("--label", "3"), "`--label`: expected numbers of classes, from 0 to 2, but got [3]."),
        ("ByColour", ("--label", "-1"), "`--label`: expected numbers of classes, from 0 to 2, but got [-1]."),
        ("ByColour", ("--label", "1", "2"), "`--label`: expected one, or 4 for as many images, but got 2."),
        ("ByColour", ("--mean", "0.5,0.5"), "`--mean`: expected one number or 3, but got 2."),
        ("ByColour", ("--mean", "nan"), "`mean`: expected "),
        ("ByColour", ("--std", "0.5,0,0.5"), "`std`: expected positive numbers"),
        ("ByColour", ("--layers", "convv"), "conv"),
        ("frozen", ("--layers", "fc"), "'fc'"),
        ("OnlyTrainsTwo", (), "`--module`: OnlyTrainsTwo has no `forward(self, images)`."),
        ("OwnLoss", (), "`--module`: expected one that gives a score for each class, (N, classes)"),
    ],
)
def test_what_is_told_of_wrong_options(maker, options, said, explain):
    result = explain(maker, *options)
    assert result.code == 1
    assert result.told[-1].startswith("normgrad-lightning explain: ")
    assert said in result.told[-1]


def test_what_is_told_of_pictures(tmp_path, capsys):
    torch.save(ByColour().state_dict(), tmp_path / "a.pt")
    (tmp_path / "text.png").write_text("abc")
    (tmp_path / "empty").mkdir()
    Image.new("F", (4, 4)).save(tmp_path / "float.tif")
    for name, size in (("wide.png", (6, 4)), ("high.png", (4, 6))):
        Image.new("RGB", size).save(tmp_path / name)
    for files, said in (
        (["none.png"], "none.png`: cannot be read as an image: [Errno 2] No such file"),
        (["text.png"], "text.png`: cannot be read as an image: cannot identify"),
        (["float.tif"], "float.tif`: cannot be read as an image: floating-point pixels"),
        (["empty"], "empty`: the folder has no images."),
        (["wide.png", "high.png"], "`--size`: expected HEIGHTxWIDTH, as the images differ in size (4x6, 6x4)"),
    ):
        paths = [f"{tmp_path}/{name}" for name in files]
        command = ["explain", f"{tmp_path}/a.pt", *paths, "--module", f"{__name__}:ByColour"]
        assert main([*command, "--out", f"{tmp_path}/maps"]) == 1
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("out", "told"), [("dir", "dir.npz"), ("a.txt/maps", "a.txt"), ("/proc/maps", "/proc/maps"), (".", "'.'")]
)
def test_an_out_that_cannot_be_written_fails_first(out, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("dir.npz").mkdir()
    Path("a.txt").write_text("")
    assert main(["explain", "none.ckpt", "none.png", "--module", "none:None", "--out", out]) == 1
    err = capsys.readouterr().err
    assert told in err
    assert "none" not in err
    assert sorted(path.name for path in Path().iterdir()) == ["a.txt", "dir.npz"]
