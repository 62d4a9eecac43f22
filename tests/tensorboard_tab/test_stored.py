"""The format of what is stored for the tab: what goes in comes out, and what is not ours is told in a sentence."""

import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from known_log import EVIL, check, event, ramp

from normgrad_lightning.tensorboard_tab.event import Check, ClassCheck, Layer, Maps, coarse, encode_event
from normgrad_lightning.tensorboard_tab.stored import Content, Parts, Problem, decode

BLOB = event(0)


def header_of(blob):
    length = struct.unpack_from("<I", blob, 8)[0]
    return json.loads(blob[12 : 12 + length])


def with_header(blob, change):
    length = struct.unpack_from("<I", blob, 8)[0]
    header = header_of(blob)
    change(header)
    text = json.dumps(header).encode()
    return b"NGTB" + struct.pack("<II", 1, len(text)) + text + blob[12 + length :]


def maps_of(maps):
    content = decode(encode_event(3, maps=[Maps("order0", "order0", "", False, "batch", [Layer("a", maps)])]))
    return content.maps(content.header["sets"][0]["layers"][0]["maps"])


def test_maps_come_out_as_they_went_in():
    content = decode(event(10))
    stored = content.maps(content.header["sets"][0]["layers"][0]["maps"])
    np.testing.assert_allclose(stored, [ramp(10, n) for n in range(3)], rtol=2**-11, atol=2**-25)


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1.0, 1e20])
def test_small_and_large_maps_keep_their_digits(scale):
    maps = scale * np.random.default_rng(0).random((4, 7, 5))
    np.testing.assert_allclose(maps_of(maps), maps, rtol=2**-10, atol=scale * 2**-25)


def test_each_map_has_a_scale_of_its_own():
    maps = np.stack([np.full((3, 3), 1e-9), np.full((3, 3), 1e9), np.zeros((3, 3))])
    np.testing.assert_allclose(maps_of(maps), maps, rtol=1e-6)


def test_values_that_are_not_finite_become_zero():
    maps = np.array([[[1.0, np.nan], [np.inf, 2.0]]])
    np.testing.assert_array_equal(maps_of(maps), [[[1.0, 0.0], [0.0, 2.0]]])


def test_fine_maps_are_averaged_over_blocks():
    maps = np.random.default_rng(0).random((2, 256, 300))
    small = coarse(maps)
    assert small.shape == (2, 86, 100)
    np.testing.assert_allclose(small[1, 2, 3], maps[1, 6:9, 9:12].mean())
    np.testing.assert_allclose(small[:, -1], maps[:, 255:, :].reshape(2, 100, 3).mean(axis=2))


def test_the_same_part_is_kept_once():
    parts = Parts()
    assert [parts.add(b"one"), parts.add(b"two"), parts.add(b"one")] == [0, 1, 0]
    assert decode(event(0)).header["parts"] == [len(part) for part in decode(event(0)).parts]


def test_numbers_of_a_check_that_are_not_known_are_left_out():
    unknown = ClassCheck("a", 1, 0, plain=(float("nan"), 0.0), covered=(1.0, float("inf")), share=float("nan"))
    found = decode(encode_event(0, check=Check(0, [unknown]))).header["check"]["classes"][0]
    assert (found["plain"], found["covered"], found["share"]) == (None, [1.0, 0.0], None)


def test_names_are_kept_to_the_letter():
    header = decode(event(10)).header
    assert header["classes"][1]["name"] == header["check"]["classes"][1]["name"] == EVIL
    assert header["check"]["sentence"] == check(10).sentence


def large_shape(header):
    header["sets"][0]["layers"][0]["maps"]["shape"] = [1, 10**6, 10**6]


def huge_part(header):
    header["parts"][0] = 10**15


HOSTILE = {
    "empty": b"",
    "short": BLOB[:11],
    "not ours": b"PNG!" + BLOB[4:],
    "of another version": BLOB[:4] + struct.pack("<I", 2) + BLOB[8:],
    "header cut off": BLOB[:100],
    "a header of 4 GB": BLOB[:8] + b"\xff\xff\xff\xff" + BLOB[12:],
    "cut off": BLOB[:-9],
    "no JSON": BLOB[:12] + b"x" + BLOB[13:],
    "a list": b"NGTB" + struct.pack("<II", 1, 2) + b"[]",
    "nested deeply": b"NGTB" + struct.pack("<II", 1, 200_000) + b"[" * 200_000,
    "many digits": b"NGTB" + struct.pack("<II", 1, 100_014) + b'{"step": ' + b"9" * 100_004 + b"}",
    "a shape of 10^12": with_header(BLOB, large_shape),
    "a huge part": with_header(BLOB, huge_part),
    "a part that is not there": with_header(BLOB, lambda h: h["classes"][0]["patches"][0].update(sprite=999)),
    "a negative part": with_header(BLOB, lambda h: h["classes"][0]["patches"][0].update(sprite=-1)),
    "a number for a name": with_header(BLOB, lambda h: h["classes"][0].update(name=3)),
    "a name that is long": with_header(BLOB, lambda h: h["classes"][0].update(name="a" * 10**5)),
    "no step": with_header(BLOB, lambda h: h.pop("step")),
    "infinite": with_header(BLOB, lambda h: h["sets"][0]["layers"][0]["maps"]["max"].__setitem__(0, float("inf"))),
    "more than float32 has": with_header(BLOB, lambda h: h["sets"][0]["layers"][0]["maps"]["max"].__setitem__(0, 1e99)),
    "too many maxima": with_header(BLOB, lambda h: h["sets"][0]["layers"][0]["maps"]["max"].append(1.0)),
    "true for a step": with_header(BLOB, lambda h: h.update(step=True)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_not_ours_is_a_sentence(name):
    found = decode(HOSTILE[name])
    assert isinstance(found, Problem)
    assert found.reason.startswith("its ") or found.reason.startswith("it is ") or found.reason.startswith("it has ")


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(0, len(BLOB) - 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_bytes_that_are_wrong_never_raise(changes):
    blob = bytearray(BLOB)
    for place, byte in changes:
        blob[place] = byte
    found = decode(bytes(blob))
    if isinstance(found, Content):  # what passes can be read
        for one in found.header["sets"]:
            for layer in one["layers"]:
                assert found.maps(layer["maps"]).shape == tuple(layer["maps"]["shape"])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def paths(value, path=()):
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from paths(inner, (*path, key))


PATHS = [path for path in paths(header_of(BLOB)) if path]


@settings(max_examples=60)
@given(st.sampled_from(PATHS), JSON)
def test_a_header_with_anything_anywhere_never_raises(path, value):
    def change(header):
        for key in path[:-1]:
            header = header[key]
        header[path[-1]] = value

    found = decode(with_header(BLOB, change))
    assert isinstance(found, Content | Problem)


@settings(max_examples=100)
@given(st.binary(max_size=300))
def test_any_bytes_never_raise(data):
    assert isinstance(decode(data), Problem)
    assert isinstance(decode(b"NGTB\x01\x00\x00\x00" + data), Problem)
