"""Pages as files."""

import numpy as np
import pytest
from stand_in import MAPS, PICTURES, assert_has, read_folder, view

from normgrad_lightning.page import Page, Picture
from normgrad_lightning.writers.files import FilesWriter

TAG = PICTURES[0]


def test_a_folder_keeps_whole_pages_under_their_tags_and_steps(tmp_path):
    writer = FilesWriter(tmp_path / "a")
    assert writer.where == str(tmp_path / "a")
    assert not list(tmp_path.iterdir())
    pages = [view(0), view(250), view(100)]
    for page in pages:
        writer.write(page)
    assert_has(read_folder(tmp_path / "a"), pages)
    assert (tmp_path / "a" / MAPS[0] / "step_00000250.npz").exists()
    assert not list(tmp_path.rglob("*.partial"))


def test_a_file_is_replaced_whole_and_steps_sort_by_name(tmp_path):
    writer = FilesWriter(tmp_path)
    for step in (1000, 20, 20):
        writer.write(view(step))
    writer.write(Page(3, [Picture(TAG, b"old, and longer than the new", 1, 1)]))
    writer.write(Page(3, [Picture(TAG, b"new", 1, 1)]))
    names = sorted(p.name for p in (tmp_path / TAG).iterdir())
    assert names == ["step_00000003.jpg", "step_00000020.jpg", "step_00001000.jpg"]
    assert (tmp_path / TAG / names[0]).read_bytes() == b"new"


def test_a_picture_and_maps_may_share_a_folder(tmp_path):
    FilesWriter(tmp_path).write(Page(3, [Picture("a", b"jpeg", 1, 1)], maps={"a/b": np.ones((1, 2, 2), np.float32)}))
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.*")) == [
        "a/b/step_00000003.npz",
        "a/step_00000003.jpg",
    ]


def test_scalars_are_rows_of_a_table_that_a_later_run_goes_on_with(tmp_path):
    FilesWriter(tmp_path).write(Page(0, scalars={"share/a, b": 0.1, 'share/"c"': np.float64(1e-30)}))
    FilesWriter(tmp_path).write(Page(10, scalars={"share/größe": -2.0}))
    assert (tmp_path / "scalars.csv").read_text("utf-8").splitlines() == [
        "step,tag,value",
        '0,"share/a, b",0.1',
        '0,"share/""c""",1e-30',
        "10,share/größe,-2.0",
    ]


def test_any_number_is_a_scalar(tmp_path):
    values = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf"), "float32": np.float32(0.5)}
    FilesWriter(tmp_path).write(Page(3, scalars=values))
    scalars = read_folder(tmp_path).scalars
    assert list(scalars) == [(tag, 3) for tag in values]
    assert np.array_equal(list(scalars.values()), list(values.values()), equal_nan=True)


def test_a_page_that_cannot_be_written_whole_is_not_written_at_all(tmp_path):
    writer = FilesWriter(tmp_path)
    writer.write(view(1))
    (tmp_path / MAPS[1]).rename(tmp_path / "away")
    (tmp_path / MAPS[1]).write_text("in the way")
    with pytest.raises(OSError, match=r"(Not a directory|File exists)"):
        writer.write(view(2))
    assert not list(tmp_path.rglob("step_00000002*"))
    assert {step for _, step in read_folder(tmp_path).scalars} == {1}


def test_scalars_for_which_there_is_half_the_room_are_taken_back(tmp_path, monkeypatch):
    writer = FilesWriter(tmp_path)
    writer.write(view(1))

    class Full:
        def __init__(self, path, *how, **options):
            self.file = REAL(path, *how, **options)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, data):
            return self.file.write(data[: len(data) // 2])

    REAL = open
    monkeypatch.setattr("normgrad_lightning.writers.files.open", Full, raising=False)
    with pytest.raises(OSError, match=r"No space left on device: '.*scalars\.csv'"):
        writer.write(view(2))
    assert_has(read_folder(tmp_path), [view(1)])
    assert not list(tmp_path.rglob("*.partial"))


def test_the_film_of_a_run_is_one_file(tmp_path):
    writer = FilesWriter(tmp_path / "normgrad")
    writer.write(Page(5, films={"normgrad/film": b"short"}))
    writer.write(Page(9, films={"normgrad/film": b"longer", "teacher/film": b"another"}))
    assert (tmp_path / "normgrad/film.webp").read_bytes() == b"longer"
    assert (tmp_path / "normgrad/teacher/film.webp").read_bytes() == b"another"
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 2
