"""Tensors arrive on the host as they were; `tests/device` has what a device adds to that."""

import torch

from normgrad_lightning.hooks.to_host import OnTheWay, _sent

TENSORS = [
    torch.randn(2, 3, dtype=torch.float16),
    torch.tensor(3.0),
    torch.arange(5),
    torch.zeros(0, 4),
    torch.tensor([True, False, True]),
    torch.randn(2, 3, dtype=torch.float64),
    torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    torch.randn(4, 6)[:, ::2],
    torch.randn(3, 1).expand(3, 4),
]


def assert_as_they_were(arrived):
    assert len(arrived) == len(TENSORS)
    for t, sent in zip(arrived, TENSORS, strict=True):
        assert t.dtype == sent.dtype
        assert torch.equal(t, sent)


def test_tensors_arrive_in_their_order_with_their_types_and_shapes():
    on_the_way = OnTheWay(TENSORS)
    first = on_the_way.arrived()
    assert_as_they_were(first)
    assert all(t is again for t, again in zip(first, on_the_way.arrived(), strict=True))


def test_a_packed_copy_holds_all_types_and_shapes():
    assert_as_they_were(_sent(torch.device("meta"), TENSORS)())  # as on any device but the CPU


def test_what_arrives_is_what_the_tensors_were_when_they_were_sent():
    images = torch.ones(2, requires_grad=True)
    on_the_way = OnTheWay([images])
    with torch.no_grad():
        images.zero_()
    (arrived,) = on_the_way.arrived()
    assert arrived.tolist() == [1.0, 1.0]
    assert not arrived.requires_grad


def test_nothing_arrives_as_nothing():
    assert OnTheWay([]).arrived() == []
