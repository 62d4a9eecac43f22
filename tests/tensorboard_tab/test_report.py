"""The report: one file with the data inside, of event files or of files of other loggers, never too large."""

import base64
import json
import re
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from known_log import EVIL, RUNS, STEPS, TAG, event, page, write_known
from tab_demo import write_run
from tab_server import ROOT
from torch.utils.tensorboard import SummaryWriter

from normgrad_lightning.page import Page
from normgrad_lightning.tensorboard_tab.event import Images, Layer, Maps, encode_event
from normgrad_lightning.tensorboard_tab.logs import runs_in
from normgrad_lightning.tensorboard_tab.report import show_report, write_report
from normgrad_lightning.writers.files import FilesWriter


def content_of(path):
    text = re.search(r'<script type="application/json" id="normgrad-data">(.*?)</script>', path.read_text(), re.DOTALL)
    return json.loads(text[1])


def steps_of(content, run):
    return [step for one in content["index"]["runs"] if one["run"] == run for step, _ in one["events"]]


def test_a_report_has_all_events_and_curves(tmp_path):
    write_known(tmp_path / "log")
    write_report([tmp_path / "log"], tmp_path / "out" / "report.html")
    content = content_of(tmp_path / "out" / "report.html")
    for run in RUNS:
        assert steps_of(content, run) == list(STEPS)
        assert base64.b64decode(content["blobs"][run][TAG]["10"]) == event(10)
        assert content["curves"][run][TAG]["val_acc"] == [[step, step / 128] for step in STEPS]
        assert content["index"]["metrics"][run] == {"val_acc": 100 / 128}


def test_files_of_other_loggers_give_the_same(tmp_path):
    write_known(tmp_path / "log")
    for step in STEPS:
        FilesWriter(tmp_path / "csv" / "normgrad").write(page(step))
    write_report([tmp_path / "log" / "first"], tmp_path / "one.html")
    write_report([tmp_path / "csv"], tmp_path / "two.html")
    one, two = content_of(tmp_path / "one.html"), content_of(tmp_path / "two.html")
    assert one["blobs"]["first"] == two["blobs"]["csv"]
    assert one["curves"]["first"] == two["curves"]["csv"]


def test_nothing_of_a_log_ends_the_data(tmp_path):
    write_known(tmp_path / "log")
    write_report([tmp_path / "log"], tmp_path / "report.html")
    assert EVIL not in (tmp_path / "report.html").read_text()
    assert EVIL in content_of(tmp_path / "report.html")["blobs"]
    assert "<img" not in show_report(tmp_path / "log")._repr_html_()


def test_a_report_asks_nobody(tmp_path):
    write_known(tmp_path / "log")
    write_report([tmp_path / "log"], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "default-src 'none'" in text
    assert not re.search(r'(src|href)="', text)


def test_a_large_report_is_thinned_evenly_with_first_last_and_images(tmp_path):
    noise = np.random.default_rng(0)
    images = noise.integers(0, 255, (2, 64, 64, 3), dtype=np.uint8)

    def blob(step):
        new = step in (0, 37)  # the images change here
        shown = Images(
            "probe", "true", str(step >= 37), list(images) if new else None, None if new else 37 * (step >= 37)
        )
        layer = Layer("a", noise.random((2, 70, 70)))
        return encode_event(step, [shown], [Maps("probe_order0", "order0", "", False, "probe", [layer])])

    write_run(tmp_path / "run", (Page(step, blobs={TAG: blob(step)}) for step in range(60)))
    write_report([tmp_path / "run"], tmp_path / "whole.html")
    assert steps_of(content_of(tmp_path / "whole.html"), "run") == list(range(60))
    write_report([tmp_path / "run"], tmp_path / "report.html", largest=500_000)
    assert (tmp_path / "report.html").stat().st_size <= 500_000
    steps = steps_of(content_of(tmp_path / "report.html"), "run")
    assert {0, 37, 59} <= set(steps)
    gaps = [b - a for a, b in pairwise(steps) if 37 not in (a, b)]
    assert len(steps) > 8
    assert max(gaps) - min(gaps) <= 1
    with pytest.raises(ValueError, match=r"`largest`: expected at least \d+ MB"):
        write_report([tmp_path / "run"], tmp_path / "report.html", largest=60_000)


def test_a_log_that_is_cut_off_gives_what_is_whole(tmp_path):
    write_known(tmp_path / "log")
    [file] = (tmp_path / "log" / "first").iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[: 3 * len(whole) // 4])
    write_run(tmp_path / "log" / "first", [])
    (tmp_path / "log" / "first" / "events.out.tfevents.2.noise").write_bytes(b"\0" * 1000)
    write_report([tmp_path / "log" / "first"], tmp_path / "report.html")
    steps = steps_of(content_of(tmp_path / "report.html"), "first")
    assert steps
    assert set(steps) < set(STEPS)


@pytest.mark.parametrize("is_new", [True, False])
def test_curves_of_both_forms_of_scalars_are_read(tmp_path, is_new):
    write_run(tmp_path / "run", [page(0)])
    with SummaryWriter(tmp_path / "run") as writer:
        for step in (0, 5):
            writer.add_scalar("val_loss", 0.5 + step, step, new_style=is_new)
            writer.add_text("val_note", "of no use here", step)
    [run] = runs_in([tmp_path])
    assert run.curves(TAG)["val_loss"] == [[0, 0.5], [5, 5.5]]
    assert "val_note" not in run.curves(TAG)


def test_what_is_not_ours_is_left_out(tmp_path):
    write_run(tmp_path / "log", [page(0), Page(5, blobs={TAG: b"not ours"}), Page(6, blobs={TAG: event(10)[:300]})])
    write_report([tmp_path / "log"], tmp_path / "report.html")
    assert steps_of(content_of(tmp_path / "report.html"), "log") == [0]


def test_without_data_the_error_says_what_to_give(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"`runs`: expected folders of runs, but '.*nowhere' does not exist"):
        write_report([tmp_path / "nowhere"], tmp_path / "report.html")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="Give the folder with TensorBoard's event file, or the one that has the `nor"):
        write_report([tmp_path / "empty"], tmp_path / "report.html")
    write_run(tmp_path / "log", [Page(5, blobs={TAG: b"not ours"})])
    with pytest.raises(ValueError, match="cannot be read"):
        write_report([tmp_path / "log"], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_runs_are_called_by_what_tells_them_apart(tmp_path):
    for name in ("a/version_0", "b/version_0"):
        write_run(tmp_path / "logs" / name, [page(0)])
    assert [run.name for run in runs_in([tmp_path / "logs"])] == ["a/version_0", "b/version_0"]
    assert [run.name for run in runs_in([tmp_path / "logs" / "a"])] == ["version_0"]
    files = list((tmp_path / "logs").rglob("events*"))
    assert len(runs_in(files)) == 2


def test_a_report_needs_neither_torch_nor_lightning(tmp_path):
    write_known(tmp_path / "log")
    code = (
        "import sys; from pathlib import Path; from normgrad_lightning.tensorboard_tab.report import write_report\n"
        f"write_report([Path({str(tmp_path / 'log')!r})], Path({str(tmp_path / 'report.html')!r})); print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert {"torch", "pytorch_lightning", "lightning"}.isdisjoint(loaded.split())
