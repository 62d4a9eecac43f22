"""Rounds of the check: the right numbers of each class, in bounded pieces, or nothing."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracles import PLACE, OnePlace, maps_at_the_place, marked_images, mean_loss, slow_losses

from normgrad_lightning.check import regions
from normgrad_lightning.check.network import NetworkCall
from normgrad_lightning.check.passes import Losses, Pool, network_pool
from normgrad_lightning.check.results import ClassCheck, Tally, class_check
from normgrad_lightning.check.rounds import ALL, FEW, FORMS, MANY, ROWS, Check, first_round, round_of
from normgrad_lightning.check.rule import rests, sentence
from normgrad_lightning.check.typical import TypicalOfOthers


def pool_of(network, images, labels, maps=None):
    call = NetworkCall(network, (images,), {}, network(images).detach())
    return network_pool(call, images, maps or maps_at_the_place(len(images)), labels.tolist())


def watched(pool, rows):
    """The same pool; notes what it was asked for."""

    def losses(changed, images, donors):
        rows.append((changed, images, donors))
        return pool.losses(changed, images, donors)

    return Pool(pool.images, pool.maps, pool.labels, losses)


def by_name(check):
    """What is known, by name."""
    check.names = {0: "cat", 1: "dog"}
    return {one.name: one for one in check.results().values()}


def whole_round(check, pools, step=50):
    for pool in pools:
        while check.advance(pool, step):
            pass
    return by_name(check)


def slow_rows(network, pool, labels, asked, label):
    """What a slow reference gives for the squares of a class that a pool was asked for, `(R, 7)`."""
    m = regions.coarse_map(pool.maps)
    find, move, _ = FORMS["square"]
    rows = [torch.empty(0, 7)]
    for changed, own, donors in asked:
        region = find(m[own], (32, 32))
        control = move(region)
        for n, (image, donor) in enumerate(zip(own, donors, strict=True)):
            expected = regions.put_into(region[n : n + 1], pool.images[donor][None], pool.images[image][None])[0]
            if labels[image] == label and torch.equal(changed.covered[n], expected):
                where = region[n : n + 1], control[n : n + 1]
                rows.append(slow_losses(network, pool.images, labels, [image], [donor], *where))
    return torch.cat(rows)


def assert_means(found, rows):
    assert found.n == len(rows)
    for index, name in enumerate(Losses._fields):
        assert getattr(found, name) == pytest.approx(rows[:, index].mean().item(), abs=1e-5)
    for name, (one, other) in {"covered": (1, 2), "pasted": (3, 4)}.items():
        error = (rows[:, one] - rows[:, other]).std() / math.sqrt(len(rows))
        assert getattr(found, f"{name}_error") == pytest.approx(error.item(), abs=1e-5)


def test_its_numbers_are_those_of_a_slow_reference():
    network, (images, labels) = OnePlace(), marked_images(64)
    asked = []
    pool = watched(pool_of(network, images, labels), asked)
    found = whole_round(Check(), [pool])["dog"]
    assert found.form == "square"
    assert found.n == MANY
    assert found.area == pytest.approx(36 / 1024)
    assert_means(found, slow_rows(network, pool, labels, asked, 1))


def test_a_network_that_reads_one_place_is_told_and_one_that_reads_everything_is_not():
    images, labels = marked_images(64)
    found = whole_round(Check(), [pool_of(OnePlace(), images, labels)])
    assert list(found) == ["cat", "dog"]
    assert all(map(rests, found.values()))
    assert sentence(found.values()).count("A class may rightly rest on one place") == 1
    dog = found["dog"]
    assert dog.covered_difference > 3
    assert dog.pasted_difference > 3
    assert (dog.called, dog.called_control) == (1, 0)
    assert dog.example.region[PLACE].all()
    where = (slice(None), *PLACE)
    torch.testing.assert_close(dog.example.pasted[where], dog.example.image[where])
    assert f"from {dog.plain:.2f} to {dog.covered:.2f}" in sentence(found.values())

    everything = OnePlace(place=(slice(None), slice(None)))
    tinted = 0.1 * torch.randn(64, 3, 32, 32) + (2.0 * labels - 1)[:, None, None, None]
    found = whole_round(Check(), [pool_of(everything, tinted, labels)])
    assert not any(map(rests, found.values()))
    told = sentence(found.values())
    assert told.startswith("So far, no class was found to rest on one small place")
    assert "What is everywhere in an image (tint, blur, noise)" in told
    assert told.endswith("Checked: 2 classes, step 50.")


class TwoBars(OnePlace):
    """Reads the upper and the lower edge of an image."""

    def forward(self, x):
        return super().forward(torch.cat([x[:, :, :2], x[:, :, -2:]], 2))


def test_bars_at_the_edges_are_told_though_all_maps_are_strongest_in_the_middle():
    _, labels = marked_images(64)
    images = 0.1 * torch.randn(64, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    for edge in (slice(2), slice(-2, None)):
        images[:, :, edge] += (2.0 * labels - 1)[:, None, None, None]
    maps = torch.rand(64, 16, 16, generator=torch.Generator().manual_seed(3))
    maps[:, 4:12, 4:12] += 3
    maps[labels == 1, ::15] += 1
    network = TwoBars(weight=12.0, place=(slice(None), slice(None)))
    found = whole_round(Check(), [pool_of(network, images, labels, {"net": maps})])
    dog = found["dog"]
    assert rests(dog)
    assert dog.form == "tenth"
    assert dog.example.region[:2].float().mean() > 0.6
    assert dog.example.region[-2:].float().mean() > 0.6
    assert not rests(found["cat"])
    assert "covering 10 % of its images" in sentence(found.values())


def test_what_is_typical_of_other_classes_is_removed():
    generator = torch.Generator().manual_seed(0)
    typical, slow = TypicalOfOthers(), {0: [], 1: [], 5: []}
    for _ in range(3):
        maps, labels = torch.rand(6, 4, 5, generator=generator, dtype=torch.float64), [0, 1, 0, 5, 5, 1]
        typical.add(maps, labels)
        for label, m in zip(labels, maps, strict=True):
            slow[label].append(m.numpy())
    for label in (0, 1, 5, 7):
        of_others = [m for other in slow if other != label for m in slow[other]] + [np.ones((4, 5))] * 8
        expected = maps[:1].numpy() / (np.mean(of_others, axis=0) + 0.1)
        np.testing.assert_allclose(typical.removed(maps[:1], [label]).numpy(), expected, rtol=1e-12)
    typical.halve()
    of_others = np.mean(slow[0] + slow[5], axis=0) * 6 + 8
    np.testing.assert_allclose(typical.removed(maps[:1], [1]), maps[:1].numpy() / (of_others / 14 + 0.1), rtol=1e-12)
    other_grid = torch.rand(2, 3, 3, generator=generator)
    typical.add(other_grid, [0, 1])
    expected = other_grid[0] / ((other_grid[1] + 8) / 9 + 0.1)
    torch.testing.assert_close(typical.removed(other_grid[:1], [0])[0], expected)


def test_the_strongest_tenth_must_tell_more_and_surer():
    def found(form, difference):
        tally = Tally()
        for _ in range(FEW):
            tally.add([0.0, difference, 0.0, difference, 0.0, 1.0, 0.0])
        return rests(class_check("dog", 100, tally, form, 0.1, None))

    assert [found("square", value) for value in (1.1, 1.3, 2.1)] == [False, True, True]
    assert [found("tenth", value) for value in (1.1, 1.3, 2.1)] == [False, False, True]
    for form, enough in (("square", 3), ("tenth", 4)):
        errors = [rests(one_class(covered=5.0, pasted=5.0, error=5.0 / of, form=form)) for of in (enough - 0.1, enough)]
        assert errors == [False, True]


def test_the_sentence_says_what_was_measured():
    images, labels = marked_images(64)
    found = whole_round(Check(), [pool_of(OnePlace(), images, labels)])
    text = sentence([found["dog"]])
    dog = found["dog"]
    assert text.startswith("`dog` rests on one small place")
    assert "cat" not in text
    losses = [dog.plain, dog.covered, dog.covered_control]
    expected = [4, *losses, 24, dog.pasted_control, dog.pasted, 100 * dog.called, 100 * dog.called_control]
    assert numbers_in(text) == pytest.approx(expected, abs=0.005)


def numbers_in(text):
    """All numbers of a text, in order."""
    return [float(value) for value in re.findall(r"[+-]?\d+(?:\.\d+)?", text)]


WAYS = ("covering", "pasting")


def reason_in(text):
    """What a reason is about, and what is asked for."""
    (asked,) = numbers_in(text)
    return text.split()[0], f"{asked:.0f} errors" if "standard errors" in text else asked


def one_class(name="dog", n=24, step=500, covered=0.0, pasted=0.0, error=0.1, form="square"):
    """What is known of a class: its differences, and the standard error of both."""
    errors = {"covered_error": error, "pasted_error": None if pasted is None else error}
    pasting = {"pasted": pasted, "pasted_control": None if pasted is None else 0.0}
    return ClassCheck(
        name, step, n, 0.0, covered, 0.0, called=None, called_control=None, form=form, area=0.04, **errors, **pasting
    )


def test_where_nothing_is_near_no_class_is_named_but_what_is_asked_for_and_what_may_be_missed():
    cat, dog = one_class("cat", covered=0.1, pasted=-0.2), one_class(covered=0.3, pasted=0.2, n=8, step=600)
    told = sentence([cat, dog])
    assert told == (
        "No class was found to rest on one small place: for none do covering and pasting both raise the loss by 1.2 "
        "(2.0 where the place is a tenth of the image). What is everywhere in an image (tint, blur, noise), long or "
        "in several parts may be missed. Checked: 2 classes, step 600."
    )
    pasted = replace(one_class(covered=0.03, pasted=3.65, form="tenth", step=600), pasted_error=1.13)
    assert sentence([cat, pasted]) == told
    assert "2 of 1000 classes" in sentence([cat, dog], 1000)
    assert "2 classes" in sentence([cat, dog], 2)
    assert sentence([one_class(step=99)]).startswith("So far, no class")
    assert "1 class, step 99" in sentence([one_class(step=99)])
    assert "step" not in sentence([one_class(step=0)])
    alone = sentence([one_class("all", covered=0.3, pasted=None)])
    assert "for none does covering raise the loss by 1.2" in alone
    assert "nothing was pasted" in alone


def test_it_is_known_whether_more_images_of_a_class_follow_in_this_round():
    images, labels = marked_images(64)
    check = Check()
    for part in (slice(32), slice(32, 64)):
        pool = pool_of(OnePlace(), images[part], labels[part])
        while check.advance(pool, 50):
            results = check.results()
            assert all(check.wants_more([label]) == (one.n < MANY) for label, one in results.items())
    assert check.results().keys() == {0, 1}
    assert not check.wants_more([0, 1, 7])


@pytest.mark.parametrize(
    ("known", "why"),
    [
        # may be more than the rule asks
        ({"covered": 1.0, "pasted": 1.1, "error": 0.4}, [("covering", 1.2), ("pasting", 1.2)]),
        ({"covered": 3.0, "pasted": 3.0, "error": 1.1}, [("covering", "3 errors"), ("pasting", "3 errors")]),
        ({"covered": 5.0, "pasted": 3.0, "error": 1.1}, [("pasting", "3 errors")]),
        ({"covered": 5.0, "pasted": 5.0, "error": 1.3, "form": "tenth"}, [(w, "4 errors") for w in WAYS]),
        # half learned
        ({"covered": 0.7, "pasted": 0.7, "error": 0.05}, [("covering", 1.2), ("pasting", 1.2)]),
        # pasting tells, covering does not: the network has both
        ({"covered": 0.7, "pasted": 7.0, "form": "tenth"}, [("covering", 2.0)]),
        ({"covered": 5.0, "pasted": None}, [("pasting", 1.2)]),  # one class alone
        ({"covered": 5.0, "pasted": 5.0, "n": 7}, [("it", 8)]),
        ({"covered": 5.0, "pasted": 0.1, "n": 7}, [("it", 8), ("pasting", 1.2)]),
    ],
)
def test_what_is_open_is_not_yet_sure_and_the_sentence_says_why(known, why):
    dog = one_class(**known)
    assert not rests(dog)
    told = sentence([one_class("cat"), dog])
    what = "a small part of its images" if dog.form == "tenth" else "one small place"
    assert told.startswith(f"Not sure whether `dog` rests on {what}: ")
    reasons, _, measured = told.partition(": ")[2].partition(". ")
    assert [reason_in(text) for text in reasons.split("; ")] == why
    numbers = [4, dog.covered, dog.covered_error, dog.pasted, dog.pasted_error, dog.n, dog.step]
    assert numbers_in(measured) == [value for value in numbers if value is not None]
    assert ("nothing was pasted" in measured) == (dog.pasted is None)


def test_a_class_prints_numbers_that_can_be_read():
    printed = repr(one_class(covered=1 / 3, pasted=None))
    assert {"name='dog'", "n=24", "covered=0.33", "pasted=None"} <= set(re.split(r"[(), ]+", printed))


def test_each_piece_is_bounded_and_each_image_counts_once():
    images, labels = marked_images(48)
    asked, check = [], Check()
    pool = watched(pool_of(OnePlace(), images, labels), asked)
    pieces = 0
    while check.advance(pool, 50):
        pieces += 1
    assert all(len(own) <= 24 for _, own, _ in asked)
    assert pieces == len(asked) >= 4
    assert ROWS < 24
    assert check.is_complete
    assert not check.is_due(60)
    assert {found.n for found in check.results().values()} == {MANY}


def test_the_same_images_again_do_not_count_again():
    images, labels = marked_images(6)
    check = Check()
    for step in range(50, 90):
        check.advance(pool_of(OnePlace(), images, labels), step)
    assert check.results() == {}
    assert check.is_complete  # it gives up
    assert "fewer than 8 images of each class" in sentence([])


def test_rounds_begin_at_1_2_5_and_keep_the_numbers_of_the_one_before():
    assert [round_of(step) for step in (0, 49, 50, 99, 100, 200, 499, 500, 1000, 2000, 5000)] == [
        0, 0, 1, 1, 2, 3, 3, 4, 5, 6, 7,
    ]  # fmt: skip
    images, labels = marked_images(64)
    check = Check()
    assert not check.is_due(49)
    assert check.is_due(50)
    before = whole_round(check, [pool_of(OnePlace(), images, labels)], 50)
    assert check.is_due(100)
    check.advance(pool_of(OnePlace(weight=0.0), images[:4], labels[:4]), 100)
    between = by_name(check)
    assert between["dog"].step == before["dog"].step == 50
    assert check.is_due(199)
    after = whole_round(check, [pool_of(OnePlace(weight=0.0), images, labels)], 100)
    assert after["dog"].step == 100
    assert not rests(after["dog"])


def test_in_a_short_run_the_first_round_begins_at_a_tenth_and_the_others_in_proportion():
    totals = (3, 100, 128, 499, 500, 10_000, math.inf)
    assert [first_round(total) for total in totals] == [10, 10, 12, 49, 50, 50, 50]
    assert [round_of(step, 12) for step in (11, 12, 23, 24, 47, 48, 119, 120, 240)] == [0, 1, 1, 2, 2, 3, 3, 4, 5]
    check = Check()
    check.begin_at(12, 0)
    assert [check.is_due(step) for step in (11, 12)] == [False, True]


def test_a_short_run_that_goes_on_as_a_long_one_has_the_rounds_of_a_long_one():
    images, labels = marked_images(64)
    check = Check()
    check.begin_at(12, 0)
    whole_round(check, [pool_of(OnePlace(), images, labels)], 120)
    assert not check.is_due(200)
    check.begin_at(50, 130)
    assert [check.is_due(step) for step in (130, 199, 200)] == [False, False, True]


def test_a_round_that_is_not_over_lasts_until_the_next_but_one():
    images, labels = marked_images(4)
    check = Check()
    for step, expected in ((50, 50), (100, 100), (199, 199), (200, 200)):
        check.advance(pool_of(OnePlace(), images + step, labels), step)
        assert check._now[0].step == expected
    check.advance(pool_of(OnePlace(), images, labels), 200)
    check.finish()
    assert check._now[0].tallies["square"].n == 4


def test_a_checkpoint_carries_the_numbers():
    images, labels = marked_images(64)
    check = Check()
    before = whole_round(check, [pool_of(OnePlace(), images, labels)])
    other = Check()
    other.load_state_dict(check.state_dict())
    assert by_name(other) == before
    assert not other.is_due(60)
    assert other.is_due(100)


def test_without_labels_there_is_one_row_and_nothing_is_pasted():
    images, labels = marked_images(64)
    pool = pool_of(OnePlace(), images, labels)
    found = whole_round(Check(), [Pool(pool.images, pool.maps, None, pool.losses)])
    assert list(found) == ["all"]
    assert found["all"].pasted is None
    assert found["all"].pasted_difference is None
    assert not rests(found["all"])
    assert sentence(found.values()).startswith("Not sure whether `all` rests on one small place: ")
    assert "nothing was pasted" in sentence(found.values())


def test_of_one_class_alone_nothing_is_pasted():
    images, labels = marked_images(64)
    images, labels = images[labels == 1], labels[labels == 1]
    found = whole_round(Check(), [pool_of(OnePlace(), images, labels)])
    assert found["dog"].pasted is None
    assert not rests(found["dog"])
    assert found["dog"].n >= FEW
    assert found["dog"].plain == pytest.approx(mean_loss(OnePlace(), (images, labels)).item(), rel=0.1)


def test_two_images_of_a_class_say_nothing_of_it():
    images, labels = marked_images(64)
    labels = torch.zeros(64, dtype=torch.long)
    labels[:2] = 1
    found = whole_round(Check(), [pool_of(OnePlace(), images, labels)])
    assert list(found) == ["cat"]


class Thousand(OnePlace):
    """Has scores of a thousand classes: of the first, by the one place; the others are zero."""

    def forward(self, x):
        return F.pad(super().forward(x), (0, 998))


def test_of_a_thousand_classes_some_are_followed():
    images, labels = marked_images(64)[0], torch.arange(64)
    network, check, asked, pools = Thousand(), Check(), [], []
    for step in range(50, 62):  # a class has one image in each step
        rows = []
        pools.append(watched(pool_of(network, images + 0.01 * step, labels), rows))
        check.advance(pools[-1], step)
        asked.append(rows)
    found = check.results()
    assert list(found) == list(range(12))
    assert all(one.n >= FEW for one in found.values())
    assert check.seen == 64
    rows = [slow_rows(network, pool, labels, of, 1) for pool, of in zip(pools, asked, strict=True)]
    assert found[1].form == "square"
    assert_means(found[1], torch.cat(rows))


def test_of_a_thousand_classes_that_hardly_come_by_nothing_is_said():
    images, _ = marked_images(64)
    network, check, generator = Thousand(), Check(), torch.Generator().manual_seed(0)
    for step in range(50, 60):
        check.advance(pool_of(network, images + 0.01 * step, torch.randint(1000, (64,), generator=generator)), step)
    assert check.results() == {}
    assert check.seen > 300


def test_images_without_a_label_are_neither_measured_nor_donors():
    images, labels = marked_images(64)
    labels[:32] = -2
    asked = []
    pool = pool_of(OnePlace(), images, labels.clamp_min(0))
    pool = watched(Pool(pool.images, pool.maps, labels.tolist(), pool.losses), asked)
    whole_round(Check(), [pool])
    assert all(image >= 32 for _, own, donors in asked for image in (*own, *donors))


def test_losses_that_are_not_finite_do_not_count():
    tally = Tally()
    tally.add([1.0, 2.0, 1.0, 3.0, 1.0, math.nan, math.nan])
    tally.add([math.inf, 2.0, 1.0, 3.0, 1.0, math.nan, math.nan])
    assert tally.n == 1
    assert tally.mean("covered_difference") == 1
    assert tally.error("covered_difference") == math.inf
    assert FEW == 8
    assert ALL == -1
