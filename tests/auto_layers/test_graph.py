"""Where a tensor stands in autograd's graph, against a search of all paths."""

import random

import pytest
import torch
from torch import nn

from normgrad_lightning.auto_layers.graph import Graph, value_of


def edges_below(node):
    """All nodes below a node, and the edges between them, but for leaves."""
    edges, waiting, seen = [], [node], set()
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            inside = [
                source for source, _ in node.next_functions if source is not None and not hasattr(source, "variable")
            ]
            edges += [(source, node) for source in inside]
            waiting += inside
    return seen, edges


def is_reached_without(edges, begin, end, without):
    """Whether any path leads from `begin` to `end` without a node."""
    reached, changed = {begin} - {without}, True
    while changed:
        more = {b for a, b in edges if a in reached and b is not without}
        changed = bool(more - reached)
        reached |= more
    return end in reached


def random_network(seed):
    """A graph of features: each new one is computed from one or two of those before."""
    chance = random.Random(seed)
    convs = [nn.Conv2d(3, 3, 1) for _ in range(8)]
    first = convs[0](torch.randn(2, 3, 4, 6))
    features = [first]
    for conv in convs[1:]:
        picked = chance.sample(features[-3:], k=min(len(features), chance.choice([1, 1, 2])))
        features.append(conv(sum(picked[1:], picked[0])).tanh())
    return first, features, features[-1].mean((2, 3))


@pytest.mark.parametrize("seed", range(30))
def test_what_nothing_goes_around_is_on_every_path(seed):
    first, features, output = random_network(seed)
    graph = Graph([output], [value_of(first)])
    nodes, edges = edges_below(output.grad_fn)
    for t in features:
        position = graph.position_of(value_of(t))
        if t.grad_fn not in nodes:
            assert position is None
            continue
        is_on_every_path = not is_reached_without(edges, first.grad_fn, output.grad_fn, t.grad_fn)
        assert position.is_cut == is_on_every_path
        assert (position.bypass == 0) == is_on_every_path
        assert position.comes_from_images
        assert position.keeps_order


def test_each_feature_that_goes_around_counts():
    conv = nn.Conv2d(3, 3, 1)
    one = conv(torch.randn(2, 3, 4, 4))
    two = conv(one)
    three = conv(two)
    output = conv(three) + two + one
    graph = Graph([output], [value_of(one)])
    assert [graph.position_of(value_of(t)).bypass for t in (one, two, three, output)] == [0, 1, 2, 0]


def test_a_pooled_vector_goes_around_a_cut_but_is_no_feature():
    conv, head = nn.Conv2d(3, 3, 1), nn.Linear(3, 2)
    one = conv(torch.randn(2, 3, 4, 4))
    early = head(one.mean((2, 3)))
    two = conv(one)
    graph = Graph([early, head(two.mean((2, 3)))], [value_of(one)])
    position = graph.position_of(value_of(two))
    assert (position.bypass, position.is_cut) == (0, False)


def test_what_the_network_gives_goes_around_nothing():
    conv, norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
    one = conv(torch.randn(2, 3, 4, 4))
    given = norm(one)
    two = conv(one)
    graph = Graph([given, norm(two)], [value_of(one)])
    assert [graph.position_of(value_of(t)).bypass for t in (one, given, two)] == [0, 1, 0]
    assert not graph.position_of(value_of(two)).is_cut


def test_only_what_comes_from_the_images_counts():
    conv = nn.Conv2d(3, 3, 1)
    image, table = conv(torch.randn(2, 3, 4, 4)), nn.Parameter(torch.randn(1, 3, 4, 4)) * 2
    later = conv(image)
    output = conv(later) + table
    graph = Graph([output], [value_of(image)])
    assert graph.position_of(value_of(later)).bypass == 0
    assert not graph.position_of(value_of(table)).comes_from_images


def test_weights_that_come_after():
    conv = nn.Conv2d(3, 3, 1)
    features = conv(torch.randn(2, 3, 4, 4))
    logits = conv(features)
    temperature = nn.Parameter(torch.ones(()))
    graph = Graph([(logits * temperature).softmax(1)], [value_of(features)])
    assert graph.position_of(value_of(features)).feeds_weights
    assert not graph.position_of(value_of(logits)).feeds_weights


def test_weights_that_are_computed_count():
    """As those of a linear layer without a bias, which are transposed first."""
    tokens = nn.Conv2d(3, 4, 1)(torch.randn(2, 3, 4, 4)).flatten(2).mT
    source, features = tokens.grad_fn.next_functions[0][0], tokens * 2
    logits = nn.Linear(4, 3, bias=False)(features)
    graph = Graph([logits], [(source.next_functions[0][0], 0)])
    assert graph.position_of(value_of(features)).feeds_weights
    assert not graph.position_of(value_of(logits)).feeds_weights


ORDER = {
    "as they are": (lambda x: x, True),
    "a class token before them": (lambda x: torch.cat([torch.zeros(2, 1, 4), x], 1), True),
    "a register between them": (
        lambda x: torch.cat([(y := torch.cat([torch.zeros(2, 1, 4), x], 1))[:, :1], torch.ones(2, 1, 4), y[:, 1:]], 1),
        True,
    ),
    "other channels behind theirs": (lambda x: torch.cat([x, torch.zeros(2, 16, 4)], 2), True),
    "group tokens behind them": (lambda x: torch.cat([x, torch.zeros(2, 2, 4)], 1), False),
    "group tokens behind them, counted from the end": (lambda x: torch.cat([x, torch.zeros(2, 2, 4)], -2), False),
    "attention, with a residual": (lambda x: x + (x @ x.mT).softmax(-1) @ x, True),
    "windows, with a residual": (
        lambda x: x + x.reshape(2, 2, 2, 2, 2, 4).permute(0, 1, 3, 2, 4, 5).reshape(2, 16, 4),
        True,
    ),
    "attention of these": (lambda x: (x @ torch.ones(2, 4, 16)).softmax(-1) @ torch.ones(2, 16, 4), True),
    "a random subset": (lambda x: x[:, torch.tensor([3, 1, 8, 12])], False),
    "gathered": (lambda x: x.gather(1, torch.arange(15, -1, -1)[None, :, None].expand(2, 16, 4)), False),
    "sorted into blocks": (lambda x: x.reshape(2, 2, 2, 2, 2, 4).permute(0, 1, 3, 2, 4, 5).reshape(2, 16, 4), False),
    "distant rows pooled": (lambda x: x.reshape(2, 4, 4, 4).amax(1), False),
    "distant rows pooled, with their place": (lambda x: x.reshape(2, 4, 4, 4).max(1).values, False),
    "pooled heads": (lambda x: torch.stack([x, x], 1).mean(1), True),
    "looked up by queries": (lambda x: (torch.ones(2, 16, 4) @ x.mT).softmax(-1) @ x, False),
    "looked up by queries, fused": (
        lambda x: nn.functional.scaled_dot_product_attention(torch.ones(2, 16, 4), x, x),
        False,
    ),
}


@pytest.mark.parametrize("name", ORDER)
def test_the_order_of_tokens(name):
    function, keeps_order = ORDER[name]
    first = nn.Conv2d(3, 4, 1)(torch.randn(2, 3, 4, 4))
    tokens = function(first.flatten(2).transpose(1, 2))
    assert Graph([tokens], [value_of(first)]).position_of(value_of(tokens)).keeps_order == keeps_order


def test_without_a_known_beginning_everything_counts():
    """As in a network whose first layers are frozen."""
    conv = nn.Conv2d(3, 3, 1)
    one = conv(torch.randn(2, 3, 4, 4))
    output = conv(one)
    position = Graph([output], []).position_of(value_of(one))
    assert (position.bypass, position.comes_from_images, position.keeps_order) == (0, True, True)
