"""The card says what was measured, and where; it can be read in a card of TensorBoard."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from normgrad_lightning.check import card
from normgrad_lightning.check.results import ClassCheck, Example
from normgrad_lightning.views.style import Style
from normgrad_lightning.views.tag_namer import TagNamer


def example(size=(40, 60), channels=3):
    generator = torch.Generator().manual_seed(0)
    image, donor = (torch.rand(channels, *size, generator=generator) for _ in range(2))
    region = torch.zeros(size, dtype=torch.bool)
    region[tuple(slice(side // 4, side // 2) for side in size)] = True
    return Example(image, region, donor.where(region, image), image.where(region, donor), torch.tensor(3.0))


def dog(**known):
    values = {
        "name": "dog", "step": 100, "n": 24, "plain": 0.0, "covered": 5.57, "covered_control": 0.01,
        "covered_error": 0.2, "pasted": 6.55, "pasted_control": 0.02, "pasted_error": 0.3, "called": 0.84,
        "called_control": 0.0, "form": "square", "area": 0.04, "example": example(),
    }  # fmt: skip
    return ClassCheck(**(values | known))


@pytest.mark.parametrize("size", [(40, 60), (64,), (8, 32, 32), (300, 20)])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_it_draws_images_of_any_kind(size, channels):
    picture = card.check_card([dog(example=example(size, channels))], Style())
    assert picture.shape[1:] == (700, 4)
    assert (picture[..., :3] == card._OUTLINE).all(2).sum() > 100


def test_the_outline_is_around_the_region_and_hides_nothing_of_it():
    one = example((40, 40))
    (tile, covered, pasted) = card.example_tiles(one, Style(mean=0, std=1))
    side = len(tile)
    inside = slice(side // 4 + 1, side // 2 - 1)
    plain = card.example_tiles(replace(one, region=torch.zeros_like(one.region)), Style(mean=0, std=1))[0]
    assert np.array_equal(tile[inside, inside], plain[inside, inside])
    on_line = (tile[..., :3] == card._OUTLINE).all(2)
    assert on_line[side // 4 - 2, side // 3]
    assert on_line[side // 3, side // 2 + 1]
    for other in (covered, pasted):
        assert not (other[..., :3] == card._OUTLINE).all(2).any()


def test_bars_are_as_long_as_losses():
    lengths = {}
    for bar in card._bars(dog()):
        row = card._drawn(bar, 6.55)
        has_colour = (row[len(row) // 2, card._BAR_LEFT :, :3] == bar.colour).all(1)
        lengths[bar.text.strip()] = int(has_colour.argmin())  # the first pixel that has another
    assert lengths["of others, place pasted"] == 310
    assert lengths["place covered"] == round(310 * 5.57 / 6.55)
    assert lengths["another place covered"] == 2
    assert len(list(card._bars(dog(pasted=None)))) == 3


def test_all_classes_have_one_scale():
    alone = {"covered_error": 4.0, "pasted": None, "pasted_control": None, "pasted_error": None, "example": None}
    picture = card.check_card([dog(covered=4.0, **alone), dog(covered=2.0, **alone)], Style())
    lengths = (picture[:, card._BAR_LEFT : card._BAR_RIGHT, :3] == card._OF_DOUBT).all(2).sum(1)
    bars = list(np.unique(lengths[lengths > 100]))
    assert bars == [155, 310]


def test_only_a_class_that_rests_on_the_place_has_red_bars_and_it_comes_first():
    cat = dog(name="cat", pasted=9.9, covered=9.9, covered_error=4.0)  # larger, but not sure
    reds = [bar.text.strip() for bar in card._bars(dog()) if bar.colour == card._OF_REGION]
    assert reds == ["place covered", "of others, place pasted"]
    assert not any(bar.colour == card._OF_REGION for bar in card._bars(cat))
    both, alone = (card.check_card(of, Style(mean=0, std=1)) for of in ([cat, dog()], [dog()]))
    head = len(alone) // 2  # the sentence and the pictures
    assert np.array_equal(both[:head], alone[:head])


def test_the_page_has_the_card_and_the_curves():
    checks = {0: dog(name="cat", pasted=None, pasted_control=None, pasted_error=None), 7: dog()}
    page = card.check_page(checks, Style(), TagNamer(100, "normgrad", ["cat", *"bcdefg", "dog"]))
    (picture,) = page.pictures
    assert Image.open(io.BytesIO(picture.jpeg)).size == (picture.width, picture.height)
    assert page.scalars == {
        "normgrad/check/covered/cat": pytest.approx(5.56),
        "normgrad/check/covered/dog": pytest.approx(5.56),
        "normgrad/check/pasted/dog": pytest.approx(6.53),
    }
    assert card.check_page({}, Style(), TagNamer(100, "normgrad", None)) is None


def test_of_many_classes_those_with_the_largest_differences_are_drawn():
    few = card.check_card([dog(), *(dog(name=f"class {n}", covered=0.1) for n in range(3))], Style())
    many = card.check_card([dog(), *(dog(name=f"class {n}", covered=0.1) for n in range(30))], Style())
    assert len(many) - len(few) == pytest.approx(card.line_height(22), abs=1)
    without_pictures = card.check_card([dog(example=None)], Style())
    assert len(without_pictures) < len(card.check_card([dog()], Style()))


def test_text_is_broken_where_the_card_ends_and_none_is_lost():
    text = "covering 4 % of its images raises their loss from 0.01 to 6.27 (0.01 if another place is covered) " * 4
    lines = card._wrapped(text)
    assert " ".join(lines) == text.strip()
    widths = [card.length_of(line, 22) for line in lines]
    assert max(widths) <= 696
    assert min(widths[:-1]) > 560
