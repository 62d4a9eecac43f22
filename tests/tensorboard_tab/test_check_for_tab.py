"""The check's results as the tab has them."""

import torch

from normgrad_lightning.check.for_tab import check_for_tab
from normgrad_lightning.check.results import ClassCheck, Example
from normgrad_lightning.tensorboard_tab.event import encode_event
from normgrad_lightning.tensorboard_tab.stored import decode
from normgrad_lightning.views.style import Style


def class_check(name, covered, pasted, **more):
    region = torch.zeros(24, 24, dtype=torch.bool)
    region[4:10, 4:10] = True
    example = Example(
        *(torch.rand(3, 24, 24) for _ in range(1)),
        region,
        torch.rand(3, 24, 24),
        torch.rand(3, 24, 24),
        torch.tensor(9.0),
    )
    numbers = {
        "plain": 0.01,
        "covered_control": 0.02,
        "covered_error": 0.2,
        "pasted_control": 0.03,
        "pasted_error": 0.3,
    }
    return ClassCheck(
        name, 50, 32, covered=covered, pasted=pasted, called=0.84, called_control=0.0, form="square", area=0.04,
        example=example, **{**numbers, **more},
    )  # fmt: skip


def test_numbers_sentence_and_pictures_arrive():
    found = check_for_tab({0: class_check("cat", 0.1, 0.1), 1: class_check("dog", 5.5, 6.5)}, Style())
    stored = decode(encode_event(60, check=found)).header["check"]
    assert stored["step"] == 50
    assert stored["sentence"].startswith("dog rests on one small place: covering 4 % of its images")
    assert stored["sentence"].endswith(
        "A class may rightly rest on one place: look whether it is a part of the object."
    )
    cat, dog = stored["classes"]
    assert (cat["sure"], cat["sentence"]) == (False, None)
    assert (dog["sure"], dog["sentence"]) == (True, stored["sentence"])
    assert (dog["covered"], dog["pasted"], dog["share"]) == ([5.5, 0.2], [6.5, 0.3], 0.84)
    assert (cat["verdict"], dog["verdict"]) == ("not found to rest on one small place", "rests on one small place")
    assert cat["asked"] == dog["asked"] == 1.2
    assert f"dog rests on {dog['region']}:" in stored["sentence"]
    assert [one["label"] for one in dog["pictures"]] == ["the place, 4 %", "covered by another", "pasted into another"]


def test_a_class_alone_has_nothing_pasted():
    alone = class_check("all", 0.3, None, pasted_control=None, pasted_error=None)
    found = decode(encode_event(60, check=check_for_tab({-1: alone}, Style()))).header["check"]["classes"][0]
    assert found["pasted"] is found["pasted_control"] is None
    assert [one["label"] for one in found["pictures"]] == ["the place, 4 %", "covered by another"]


def test_without_results_there_is_no_check():
    assert check_for_tab({}, Style()) is None
