"""The sanity checks in their quick mode: what held, and what order 0 is blind to by construction."""

import re
from pathlib import Path

import pytest
import torch
from run_script import run_python

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "11_sanity_checks.py"
ORDER0 = [f"order 0, {where}" for where in ("early", "middle", "late", "pool's input", "combined")]


def tables(text):
    """The tables of Markdown in a text, in their order: `{row: {column: mean}}`."""
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        header, _, *rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines()]
        yield {
            row[0]: {name: float(value.split()[0]) for name, value in zip(header[1:], row[1:], strict=True) if value}
            for row in rows
        }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Spearman and SSIM of random weights, then of labels and a shifted input."""
    folder = tmp_path_factory.mktemp("sanity")
    done = run_python(folder, SCRIPT, "--network", "shapes", "--quick")
    assert (folder / "normgrad_sanity" / "sanity_shapes.jpg").stat().st_size > 10_000
    found = list(tables(done.stdout))
    assert len(found) == 4
    return found


@pytest.mark.nightly
def test_random_weights_change_the_maps_more_the_deeper_they_reach(results):
    for likeness in results[:2]:
        for method in ORDER0:
            row = likeness[method]
            assert row["head"] > max(row["stage1"], row["stem"] + 0.15)
            assert row["stem"] < row["other image"] + 0.2  # no more than the geometry that all images share


@pytest.mark.nightly
def test_contrast_sees_the_classifier_alone_and_order_0_hardly_does(results):
    spearman = results[0]
    assert spearman["contrast, last"]["head"] < 0.5
    assert min(spearman[method]["head"] for method in ORDER0) > 0.75


@pytest.mark.nightly
def test_before_an_average_pool_order_0_is_blind_to_the_label_and_to_what_follows(results):
    for likeness in results[:2]:
        assert likeness["order 0, pool's input"]["head"] == 1.0
    for likeness in results[2:]:
        assert likeness["order 0, pool's input"]["another label"] == 1.0
        assert likeness["order 0, early"]["another label"] < 1.0
        assert likeness["contrast, last"]["another label"] < 0.2


@pytest.mark.nightly
def test_random_labels_change_the_maps(results):
    for likeness in results[2:]:
        assert all(likeness[method]["random labels"] < 0.85 for method in ORDER0)


@pytest.mark.nightly
def test_a_shifted_input_changes_nothing_but_what_reads_the_input(results):
    for likeness in results[2:]:
        assert all(likeness[method]["shifted input"] == 1.0 for method in ORDER0)
        assert likeness["order 0, first weight"]["shifted input"] < 0.99
        assert likeness["order 1, last"]["shifted input"] < 0.99  # the inner step depends on the first layer's input


def test_likeness_of_maps_that_are_the_same_opposite_or_constant(example):
    maps = torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(example.spearman(maps, 2 * maps**3), torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(example.spearman(maps, -maps), -torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(example.ssim(maps, 5 * maps + 1), torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-6)
    assert (example.ssim(maps, -maps) < 0).all()
    assert not example.spearman(maps, torch.ones_like(maps)).any()


def test_equal_values_share_a_rank(example):
    assert example.ranks(torch.tensor([3.0, 1.0, 3.0, 2.0]).numpy()).tolist() == [3.5, 1.0, 3.5, 2.0]


def test_ssim_is_that_of_scikit_image(example):
    metrics = pytest.importorskip("skimage.metrics")
    one, other = torch.rand(2, 1, 20, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x, y = (example.stretched(m)[0].numpy() for m in (one, other))
    assert example.ssim(one, other).item() == pytest.approx(metrics.structural_similarity(x, y, data_range=1.0))


def test_edges_are_where_the_image_changes(example):
    images = torch.zeros(1, 3, 6, 6)
    images[..., 3:] = 1.0
    assert example.edges(images)[0].tolist() == [[0.0, 0.0, 1.0, 1.0, 0.0, 0.0]] * 6


def test_the_shifted_network_computes_the_same(example):
    torch.manual_seed(0)
    model = example.ShapeClassifier().double().eval()
    images = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    moved = example.shifted(model, "stem.0", 2.0)
    torch.testing.assert_close(moved.double()(images + 2.0), model(images), rtol=1e-5, atol=1e-5)
