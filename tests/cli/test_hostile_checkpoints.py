"""Checkpoints that want to do harm: nothing of them runs, and nothing raw of them comes to the terminal."""

import builtins
import os
import pickle
import tarfile
import zipfile

import pytest
import torch
from PIL import Image
from torch import nn

from normgrad_lightning.cli.command import main
from normgrad_lightning.cli.terminal import printable

ESCAPE = "\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202e\nnormgrad-lightning: run `rm -rf ~`"
"""Sets a window's title, clears a screen, hides a line, turns the direction of writing, begins a line."""


class Net(nn.Module):
    """Takes whatever it is given, and gives what it is given to `instantiate`, as users of Hydra do."""

    def __init__(self, encoder=None, **others):
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)
        if encoder is not None:
            instantiate(encoder)

    def forward(self, x):
        return self.conv(x).mean((2, 3))


def instantiate(config):
    """Like `hydra.utils.instantiate`."""
    module, _, name = config["_target_"].rpartition(".")
    return getattr(__import__(module), name)(config["command"])


def make(encoder=None, **others):
    """Gets nothing of a file: it is no class of modules."""
    assert not others
    return Net(encoder)


class Calls:
    """Pickles as a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def nested(depth=64):
    """A list that is small in memory and endless when printed."""
    value = ["ha"]
    for _ in range(depth):
        value = [value, value]
    return value


def ring():
    value = {"a": 1}
    value["b"] = [value]
    return value


def saved(path, **contents):
    torch.save({"state_dict": Net().state_dict(), **contents}, path)


def as_pickle(path):
    path.write_bytes(pickle.dumps(Calls(os.system, f"touch {path.parent}/ran")))


def as_tar(path):
    saved(path.with_suffix(".inner"))
    with tarfile.open(path, "w") as archive:
        archive.add(path.with_suffix(".inner"), "pickle")


def rewritten(path, change, compression=zipfile.ZIP_STORED):
    """A checkpoint whose entries are changed."""
    saved(path)
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in entries.items():
            archive.writestr(name, change(name, content))


def bomb(path):
    """A file of 10 kB that unpacks to 1 MB, and could to any number."""

    def more(name, content):
        return content[:2] + b"N" * 1_000_000 + content[2:] if name.endswith(".pkl") else content

    rewritten(path, more, zipfile.ZIP_DEFLATED)


def huge_header(path):
    """The directory of the archive says that an entry has nearly 4 GiB."""
    rewritten(path, lambda name, b: b)
    content = bytearray(path.read_bytes())
    entry = content.index(b"PK\x01\x02")
    content[entry + 24 : entry + 28] = b"\xff\xff\xff\xfe"[::-1]
    path.write_bytes(content)


def huge_storage(path):
    """The pickle says that a storage of 6 numbers has 2 billion."""
    rewritten(path, lambda name, b: b.replace(b"K\x06t", b"J\xff\xff\xff\x7ft") if name.endswith(".pkl") else b)


def huge_old_storage(path):
    """The same in the format of old versions of torch."""
    torch.save(Net().state_dict(), path, _use_new_zipfile_serialization=False)
    content = path.read_bytes()
    size = content.rindex((6).to_bytes(8, "little"))
    path.write_bytes(content[:size] + (2**60).to_bytes(8, "little") + content[size + 8 :])


SYSTEM = {"_target_": "os.system", "command": "touch ran"}

HOSTILE = {
    "a target": lambda p: saved(p, hyper_parameters=SYSTEM),
    "a class path": lambda p: saved(
        p, hyper_parameters={"_class_path": "torch.hub.load", "_instantiator": "os.system"}
    ),
    "a target in an argument": lambda p: saved(p, hyper_parameters={"encoder": SYSTEM}),
    "a target far inside": lambda p: saved(p, hyper_parameters={"x": [nested(), ({"y": [SYSTEM]},)]}),
    "a name that escapes": lambda p: saved(p, hyper_parameters={ESCAPE: ESCAPE}),
    "a hparams_name that escapes": lambda p: saved(p, hyper_parameters={ESCAPE: 1}, hparams_name=ESCAPE),
    "weights that escape": lambda p: torch.save({"state_dict": {ESCAPE * 5000: torch.ones(1)}}, p),
    "a pickle": as_pickle,
    "a call in a checkpoint": lambda p: saved(p, extra=Calls(os.system, f"touch {p.parent}/ran")),
    "a file that is opened": lambda p: saved(p, extra=Calls(builtins.open, f"{p.parent}/ran", "w")),
    "an import": lambda p: saved(p, extra=Calls(torch.hub.load, "owner/repository", "model")),
    "a tar": as_tar,
    "a bomb": bomb,
    "a huge header": huge_header,
    "a huge storage": huge_storage,
    "a huge storage of old": huge_old_storage,
    "an absurd shape": lambda p: torch.save({"conv.weight": torch.zeros(1).expand(2**40)}, p),
    "an absurd mean": lambda p: saved(p, hyper_parameters={"mean": torch.zeros(1).expand(2**40), "std": nested()}),
    "endless values": lambda p: saved(p, hyper_parameters={"mean": nested(), "a": nested()}),
    "values that hold themselves": lambda p: saved(p, hyper_parameters=ring()),
    "a function for a key": lambda p: torch.save({"state_dict": nested(), "hyper_parameters": nested()}, p),
}
HARMLESS = (
    "a target", "a class path", "a name that escapes", "a hparams_name that escapes", "an absurd mean",
    "endless values", "values that hold themselves",
)  # fmt: skip
"""Those whose harm has no effect: the names are not used, and the weights are good."""


@pytest.mark.parametrize("maker", ["Net", "make"])
@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_runs_and_nothing_raw_is_printed(name, maker, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    HOSTILE[name](tmp_path / "a.ckpt")
    Image.new("RGB", (8, 8)).save("a.png")
    command = ["explain", "a.ckpt", "a.png", "--module", f"{__name__}:{maker}", "--maps", "order0"]
    for options in ([], ["--traceback"]):
        code = main([*command, *options])
        out, err = capfd.readouterr()
        assert not (tmp_path / "ran").exists()
        assert (code == 0) == (name in HARMLESS or (maker == "make" and "target" in name)), err
        lines = (out + err).split("\n")
        assert all(line.isprintable() and len(line) < 1100 for line in lines)
        assert not any(line.startswith("normgrad-lightning: run") for line in lines)
        assert not {"os:system", "hub:load"} & set((out + err).replace("`", " ").split())


def test_they_would_run_if_they_were_trusted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (8, 8)).save("a.png")
    command = ["explain", "a.ckpt", "a.png", "--module", f"{__name__}:Net", "--maps", "order0", "--unsafe"]
    for name in ("a call in a checkpoint", "a file that is opened", "a target in an argument"):
        HOSTILE[name](tmp_path / "a.ckpt")
        main(command)
        assert (tmp_path / "ran").exists()
        (tmp_path / "ran").unlink()


def test_without_a_module_nothing_of_the_file_says_which(tmp_path, capsys):
    HOSTILE["a target"](tmp_path / "a.ckpt")
    with pytest.raises(SystemExit):
        main(["explain", f"{tmp_path}/a.ckpt", "a.png"])
    assert main(["layers", f"{tmp_path}/a.ckpt"]) == 1
    err = capsys.readouterr().err
    assert "--module" in err
    assert "system" not in err


def test_a_refusal_names_the_code_and_the_remedy(tmp_path, capsys):
    HOSTILE["a call in a checkpoint"](tmp_path / "a.ckpt")
    assert main(["layers", f"{tmp_path}/a.ckpt", "--module", f"{__name__}:Net"]) == 1
    assert f"loading it would run {os.system.__module__}.system. If you trust it, add `--unsafe`." in (
        capsys.readouterr().err
    )
    HOSTILE["a target in an argument"](tmp_path / "a.ckpt")
    assert main(["layers", f"{tmp_path}/a.ckpt", "--module", f"{__name__}:Net"]) == 1
    assert "`--unsafe`" in capsys.readouterr().err


def test_what_is_printable():
    assert printable("é 1×2 日本") == "é 1×2 日本"
    assert printable("a\x1b[2Jb\n\t\u202e\x9b\ud800") == r"a\x1b[2Jb\n\t\u202e\x9b\ud800"
    assert printable("x" * 50, 10) == "xxxxxxxxxx..."
