"""The film of a probe: what it keeps, and what a person sees in it."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, features

from normgrad_lightning.maps import KINDS, MapSet
from normgrad_lightning.views import film as module
from normgrad_lightning.views.film import MOST_FRAMES, Film
from normgrad_lightning.views.style import Style

pytestmark = pytest.mark.skipif(not features.check("webp"), reason="this Pillow has no WebP")
SIZES = {"net.fine": 32, "net.middle": 16, "net.coarse": 4}


def spot(size: int, row: float, column: float) -> torch.Tensor:
    """A map with one bright place, given as parts of its sides."""
    at = (torch.arange(size) + 0.5) / size
    away = (at[:, None] - row) ** 2 + (at[None] - column) ** 2
    return torch.exp(-away / 0.02)


def probed(step: int, place: float, count: int = 2, sizes: dict[str, int] = SIZES, **more: Any) -> MapSet:
    """Maps with a bright spot at `place` of the way from the left to the right, on grey images."""
    maps = {layer: torch.stack([spot(size, 0.5, place)] * count) for layer, size in sizes.items()}
    images = torch.full((count, 3, 32, 32), 0.5)
    about = {"source": "probe", **more}
    return MapSet(KINDS["order0"], step, maps, images, dict.fromkeys(maps, images), list(maps), **about)


def frames_of(film: Film, style: Style | None = None) -> tuple[list[Any], list[int]]:
    """The pictures of a film, and how long each is shown."""
    page = film.last_page(style or Style(mean=0.0, std=1.0))
    assert page is not None
    (data,) = page.films.values()
    with Image.open(io.BytesIO(data)) as animated:
        assert animated.format == "WEBP"
        assert animated.info["loop"] == 0
        pictures, durations = [], []
        for i in range(animated.n_frames):
            animated.seek(i)
            pictures.append(np.asarray(animated.convert("RGB"), float))
            durations.append(animated.info["duration"])
    return pictures, durations


def moving(steps: int = 5, **more: Any) -> Film:
    film = Film()
    for i in range(steps):
        film.add_event([probed(10 * i, 0.1 + 0.8 * i / (steps - 1), **more)])
    return film


def test_the_bright_place_moves_and_the_bar_grows():
    pictures, durations = frames_of(moving())
    assert len(pictures) == 5
    assert durations[-1] > 3 * durations[0]
    assert len(set(durations[:-1])) == 1
    tile, gap, wide_gap = 96, 2, 6
    assert pictures[0].shape[1] == 5 * tile + 3 * gap + wide_gap
    lit = np.ptp(pictures[0][:, :tile], axis=(1, 2)) < 12  # rows of the first image, which is grey, and of the paper
    grey = lit & (pictures[0][:, 0, 0] < 200)
    top = int(np.flatnonzero(grey)[0])
    for column in range(1, 5):  # combined, and three layers
        x = column * (tile + gap) + (wide_gap - gap) * (column >= 2)
        rows = [p[top : top + tile, x : x + tile] for p in pictures]
        warmth = [(row[..., 0] - row[..., 2]).clip(0) for row in rows]
        centres = [float((w.sum(0) * np.arange(tile)).sum() / w.sum()) / tile for w in warmth]
        assert centres == sorted(centres)
        assert centres[0] < 0.35
        assert centres[-1] > 0.65
    bars = [int((p[-15, :, 0] - p[-15, :, 2] > 120).sum()) for p in pictures]
    assert bars[0] == 0
    assert np.allclose(np.diff(bars), bars[-1] / 4, atol=3)
    image = pictures[-1][top + 5 : top + tile - 5, 5 : tile - 5]
    assert np.abs(image - 127).mean() < 3  # as it is, without a map


def test_a_long_training_keeps_few_frames_with_the_first_and_the_last():
    film = Film()
    for i in range(1000):
        film.add_event([probed(i, 0.5, sizes={"a": 4})])
        steps = [frame.step for frame in film.frames]
        assert steps[0] == 0
        assert steps[-1] == i
        assert len(steps) <= MOST_FRAMES + 1
    gaps = set(np.diff(steps[:-1]))
    assert len(gaps) == 1
    assert len(steps) > MOST_FRAMES // 2


def test_frames_are_small_whatever_the_size_of_the_maps():
    film = Film()
    film.add_event([probed(0, 0.5, count=1, sizes={"a": 448})])
    (frame,) = film.frames
    assert frame.maps["a"].shape == (1, 64, 64)
    assert frame.maps["a"].dtype == np.float16
    assert float(np.abs(frame.maps["a"][0].astype(np.float32) - spot(64, 0.5, 0.5).numpy()).max()) < 0.02


def test_small_values_are_kept():
    film = Film()
    one = probed(0, 0.2, count=1, sizes={"a": 16})
    tiny = {layer: 1e-12 * m for layer, m in one.maps.items()}
    film.add_event([MapSet(one.kind, 0, tiny, one.images, one.images_of, one.layers, source="probe")])
    (frame,) = film.frames
    assert float(frame.maps["a"].max()) == 1.0


def test_there_is_no_film_without_movement_without_a_probe_or_without_news():
    film = Film()
    assert film.last_page(Style()) is None
    film.add_event([probed(0, 0.5)])
    film.add_event([probed(1, 0.5, source="batch")])
    assert film.last_page(Style()) is None
    film.add_event([probed(2, 0.6)])
    page = film.last_page(Style())
    assert page is not None
    assert page.step == 2
    assert list(page.films) == ["normgrad/film"]
    assert film.last_page(Style()) is None
    film.add_event([probed(3, 0.7)])
    assert film.last_page(Style()) is not None


def test_without_a_layer_that_all_frames_have_there_is_no_film():
    film = Film()
    film.add_event([probed(0, 0.5, sizes={"a": 4})])
    film.add_event([probed(1, 0.5, sizes={"b": 4})])
    assert film.last_page(Style()) is None


def test_every_class_has_a_row_as_long_as_there_is_room():
    film = Film()
    one = probed(0, 0.5, count=8, labels=[0, 0, 0, 1, 1, 2, 3, 3])
    images = torch.arange(8).float()[:, None, None, None].expand(8, 3, 32, 32)
    film.add_event(
        [MapSet(one.kind, 0, one.maps, images, one.images_of, one.layers, source="probe", labels=one.labels)]
    )
    assert film._of is not None
    assert film._of.labels == [0, 0, 1, 1, 2, 3]
    assert film._of.images is not None
    assert film._of.images[:, 0, 0, 0].tolist() == [0, 1, 3, 4, 5, 6]
    high = Film()
    for step in (0, 10):
        tall = torch.rand(8, 3, 64, 20)
        about = {"source": "probe", "labels": one.labels, "classes": ["a", "b", "c", "d"]}
        high.add_event([MapSet(one.kind, step, one.maps, tall, one.images_of, one.layers, **about)])
    assert len(frames_of(high)[0]) == 2


def test_only_order_0_is_filmed():
    film = Film()
    one = probed(0, 0.5)
    film.add_event([MapSet(KINDS["grad_cam"], 0, one.maps, one.images, one.images_of, one.layers, source="probe")])
    assert film.frames == []


# ---------------------------------------------------------------- in a checkpoint


def resumed(film: Film, folder: Any) -> Film:
    """A film that goes on with what a checkpoint has of another."""
    torch.save(film.state_dict(), folder / "state.pt")
    again = Film()
    again.load_state_dict(torch.load(folder / "state.pt", weights_only=True))
    return again


@pytest.mark.parametrize("events", [1, 2, 5, 61, 130, 131, 200])
def test_a_resumed_film_has_the_frames_of_one_that_was_never_broken_off(tmp_path, events):
    whole = Film()
    for step in range(events):
        whole.add_event([probed(step, 0.3, sizes={"a": 4})])
    again = resumed(whole, tmp_path)
    assert [frame.step for frame in again.frames] == [frame.step for frame in whole.frames]
    for step in range(events, events + 90):
        whole.add_event([probed(step, 0.6, sizes={"a": 4})])
        again.add_event([probed(step, 0.6, sizes={"a": 4})])
        assert [frame.step for frame in again.frames] == [frame.step for frame in whole.frames]
    for one, other in zip(again.frames, whole.frames, strict=True):
        assert np.array_equal(one.maps["a"], other.maps["a"])


def test_a_film_is_written_again_only_if_a_resumed_run_adds_to_it(tmp_path):
    again = resumed(moving(), tmp_path)
    assert again.last_page(Style()) is None
    again.add_event([probed(90, 0.9)])
    pictures, _ = frames_of(again)
    assert len(pictures) == 6


def test_frames_of_other_images_are_forgotten(tmp_path):
    again = resumed(moving(), tmp_path)
    one = probed(90, 0.9)
    other = torch.full_like(one.images, 0.6)
    again.add_event([MapSet(one.kind, 90, one.maps, other, one.images_of, one.layers, source="probe")])
    assert [frame.step for frame in again.frames] == [90]
    again.add_event([probed(99, 0.9, labels=[1, 2])])
    assert [frame.step for frame in again.frames] == [99]


def test_a_checkpoint_stays_small(tmp_path):
    film = Film()
    for step in range(60):
        film.add_event([probed(step, 0.5, count=8, sizes={f"layer{i}": 64 for i in range(7)})])
    again = resumed(film, tmp_path)
    assert (tmp_path / "state.pt").stat().st_size < 1.1 * module.MOST_BYTES
    steps = [frame.step for frame in again.frames]
    assert steps[0] == 0
    assert steps[-1] == 59
    assert 8 <= len(steps) <= 30
    for step in range(60, 300):
        again.add_event([probed(step, 0.5, count=8, sizes={f"layer{i}": 64 for i in range(7)})])
    assert len(set(np.diff([frame.step for frame in again.frames][:-1]))) <= 2
    assert len(frames_of(again)[0]) > 8


def test_a_checkpoint_without_a_film_has_nothing_of_it_and_loads(tmp_path):
    assert Film().state_dict() == {}
    film = moving()
    film.load_state_dict({})
    assert film.frames == []


def test_images_that_are_not_known_go_on_too(tmp_path):
    def unseen(step: int) -> MapSet:
        one = probed(step, 0.5)
        return MapSet(one.kind, step, one.maps, None, dict.fromkeys(one.maps), one.layers, source="probe")

    film = Film()
    film.add_event([unseen(0)])
    again = resumed(film, tmp_path)
    again.add_event([unseen(5)])
    assert [frame.step for frame in again.frames] == [0, 5]


def test_other_images_begin_another_film():
    film = Film()
    film.add_event([probed(0, 0.5, count=2)])
    film.add_event([probed(1, 0.5, count=3)])
    assert [frame.step for frame in film.frames] == [1]


@pytest.mark.parametrize(
    ("count", "sizes", "shape"),
    [
        (1, {"a": 7}, (32, 32)),
        (9, {f"layer{i}": 4 for i in range(12)}, (32, 32)),
        (3, {"a": 7, "b": 3}, (20, 64)),
        (3, {"a": 7, "b": 3}, (64, 20)),
    ],
    ids=["one layer", "many layers and images", "wide", "high"],
)
def test_films_of_all_shapes_are_of_a_size_to_look_at(count, sizes, shape):
    film = Film()
    for step in (0, 10):
        one = probed(step, 0.5, count=count, sizes=sizes, labels=list(range(count)), classes=["a long name of it"] * 9)
        images = torch.rand(count, 3, *shape)
        film.add_event([MapSet(one.kind, step, one.maps, images, one.images_of, one.layers, source="probe")])
    pictures, _ = frames_of(film)
    height, width, _ = pictures[0].shape
    assert 300 < width <= 600
    assert height < 850


def test_sounds_volumes_and_missing_images_have_films_too():
    for images, shape in ((torch.rand(2, 1, 64), (16,)), (torch.rand(2, 1, 8, 16, 16), (4, 8, 8)), (None, (8, 8))):
        film = Film()
        for step in (0, 10):
            maps = {"a": torch.rand(2, *shape), "b": torch.rand(2, *shape)}
            film.add_event(
                [MapSet(KINDS["order0"], step, maps, images, dict.fromkeys(maps), list(maps), source="probe")]
            )
        assert len(frames_of(film)[0]) == 2


def test_a_map_that_is_zero_everywhere_is_no_reason_to_fail():
    film = Film()
    for step in (0, 10):
        one = probed(step, 0.5)
        maps = {**one.maps, "net.coarse": torch.zeros(2, 4, 4)}
        film.add_event([MapSet(one.kind, step, maps, one.images, one.images_of, one.layers, source="probe")])
    pictures, _ = frames_of(film)
    assert np.isfinite(pictures[0]).all()


def test_order_1_is_not_filmed():
    film = Film()
    one = probed(0, 0.5)
    film.add_event([MapSet(KINDS["order1"], 0, one.maps, one.images, one.images_of, one.layers, source="probe")])
    assert film.frames == []


def test_without_webp_the_reason_is_given(monkeypatch):
    monkeypatch.setattr(module.features, "check", lambda _: False)
    with pytest.raises(RuntimeError, match="Pillow cannot write WebP"):
        moving().last_page(Style())
