"""Which axis is what."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from networks import ViT, batch
from torch import nn

from normgrad_lightning import NormGrad, order0_maps
from normgrad_lightning.layers.layouts import Layout, grid_of_tokens, infer_layout, patch_grid


@given(
    h=st.integers(1, 9),
    w=st.integers(1, 9),
    patch=st.integers(4, 20),
    prefix=st.integers(0, 5),
)
def test_the_patch_grid_is_found_from_the_images_size(h, w, patch, prefix):
    assume(h * w > 1)
    assume(prefix <= h * w // 2)
    grid, extra = grid_of_tokens(h * w + prefix, (h * patch, w * patch))
    # A grid with fewer extra tokens may fit too, but none with more is taken, and what is taken adds up.
    assert math.prod(grid) + extra == h * w + prefix
    assert extra <= prefix
    assert grid[0] * w == grid[1] * h
    if prefix <= 1:
        assert grid == (h, w)


@pytest.mark.parametrize(
    ("tokens", "image", "grid", "prefix"),
    [
        (197, (224, 224), (14, 14), 1),
        (50, (224, 224), (7, 7), 1),
        (261, (224, 224), (16, 16), 5),
        (256, (224, 224), (16, 16), 0),
        (25, (96, 64), (6, 4), 1),
        (129, (16, 64, 64), (2, 8, 8), 1),
    ],
)
def test_known_transformers(tokens, image, grid, prefix):
    assert grid_of_tokens(tokens, image) == (grid, prefix)


@given(
    n=st.integers(1, 3),
    grid=st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple),
    c=st.integers(1, 4),
    prefix=st.integers(0, 3),
)
def test_a_layouts_view_puts_every_value_in_its_place(n, grid, c, prefix):
    features = torch.randn(n, c, *grid)
    assert Layout(grid).view(features) is features
    last = features.movedim(1, -1).contiguous()
    if len(grid) > 1:
        assert torch.equal(Layout(grid, channels_last=True).view(last), features)
    tokens = torch.cat([torch.randn(n, prefix, c), last.reshape(n, -1, c)], 1)
    view = Layout(grid, channels_last=True, prefix=prefix).view(tokens)
    assert torch.equal(view, features)
    assert view.untyped_storage().data_ptr() == tokens.untyped_storage().data_ptr()


IMAGE = (2, 3, 64, 96)


@pytest.mark.parametrize(
    ("shape", "layer", "expected"),
    [
        ((2, 8, 16, 24), nn.Conv2d(3, 8, 1), Layout((16, 24))),
        ((2, 16, 24, 8), nn.LayerNorm(8), Layout((16, 24), channels_last=True)),
        ((2, 16, 24, 8), nn.Linear(4, 8), Layout((16, 24), channels_last=True)),
        ((2, 16, 24, 8), nn.GELU(), Layout((16, 24), channels_last=True)),
        ((2, 8, 16, 24), nn.GELU(), Layout((16, 24))),
        ((2, 8, 1, 96), nn.ReLU(), Layout((1, 96))),
        ((2, 16, 16, 16), nn.ReLU(), Layout((16, 16))),
        ((2, 16, 16, 16), nn.LayerNorm(16), Layout((16, 16), channels_last=True)),
        ((2, 16, 16, 16), nn.BatchNorm2d(16), Layout((16, 16))),
        ((2, 24, 16, 24), nn.Sequential(nn.Conv2d(3, 24, 1), nn.LayerNorm(24)), Layout((16, 24))),
        ((2, 25, 8), nn.LayerNorm(8), Layout((4, 6), channels_last=True, prefix=1)),
    ],
)
def test_layouts_are_recognised(shape, layer, expected):
    image = (2, 3, 64, 64) if shape[1:] == (16, 16, 16) else IMAGE
    assert infer_layout(shape, image, layer) == expected


def test_signals_and_volumes():
    assert infer_layout((2, 8, 50), (2, 1, 100), nn.Conv1d(1, 8, 3)) == Layout((50,))
    assert infer_layout((2, 50, 8), (2, 1, 100), nn.LayerNorm(8)) == Layout((50,), channels_last=True)
    assert infer_layout((2, 8, 4, 5, 6), (2, 1, 8, 10, 12), nn.Conv3d(1, 8, 3)) == Layout((4, 5, 6))


@pytest.mark.parametrize(
    ("shape", "layer", "told"),
    [
        ((2, 10), nn.Linear(5, 10), "has no spatial axis. Choose a layer before the pooling or flattening"),
        ((6, 8, 16, 24), nn.Conv2d(3, 8, 1), "does not begin with the batch size 2"),
        (
            (2, 43, 8),
            nn.LayerNorm(8),
            r"its 43 tokens fit no grid of square patches that cover .* Set `token_grid=\(rows, columns\)`",
        ),
        ((2, 4, 49, 8), nn.LayerNorm(8), r"these may be windows. If they are a grid, set `channels_last=True`"),
        ((2, 77, 8), nn.LayerNorm(8), "its 77 tokens fit no grid"),
        ((2, 1, 2, 3, 4, 5), nn.ReLU(), "is neither features on 2 spatial axes nor tokens"),
    ],
)
def test_what_cannot_be_inferred_names_the_flag(shape, layer, told):
    with pytest.raises(ValueError, match=told):
        infer_layout(shape, IMAGE, layer)


def test_what_the_user_says_comes_first():
    assert infer_layout((2, 43, 8), IMAGE, nn.LayerNorm(8), token_grid=(2, 21)) == Layout((2, 21), True, 1)
    assert infer_layout((2, 4, 49, 8), IMAGE, nn.LayerNorm(8), channels_last=True).grid == (4, 49)
    assert infer_layout((2, 16, 24, 8), IMAGE, nn.LayerNorm(8), channels_last=False).grid == (24, 8)
    with pytest.raises(ValueError, match=r"43 tokens, fewer than `token_grid=\(9, 9\)` needs"):
        infer_layout((2, 43, 8), IMAGE, nn.LayerNorm(8), token_grid=(9, 9))


def test_only_a_patch_embedding_tells_the_grid():
    assert patch_grid(nn.Conv2d(3, 8, (8, 16), (8, 16)), IMAGE) == (8, 6)
    assert patch_grid(nn.Conv2d(3, 8, 3, 1, 1), IMAGE) is None
    assert patch_grid(nn.Conv2d(3, 8, 2, 2, 1), IMAGE) is None
    assert patch_grid(nn.ReLU(), IMAGE) is None


@pytest.mark.parametrize("extra", [0, 1, 5])
def test_a_token_stands_where_its_patch_is(extra):
    """The loss reads one patch token: just that place of the grid has a gradient."""
    torch.manual_seed(0)
    model, (images, _) = ViT(extra=extra, depth=2), batch(1, (32, 48))
    row, column = 2, 5

    def loss(m, x):
        kept = []
        handle = m.blocks[1].register_forward_hook(lambda _, a, out: kept.append(out))
        m(x)
        handle.remove()
        return kept[0][:, extra + row * 6 + column].square().sum()

    m = order0_maps(model, loss, images, "blocks.1")["blocks.1"]
    assert m.shape == (1, 4, 6)
    assert m[0, row, column] > 0
    assert m.sum() == m[0, row, column]


@pytest.mark.parametrize(("tokens", "grid"), [(8 * 56 * 56 + 1, (8, 56, 56)), (1568, (8, 14, 14)), (393, (8, 7, 7))])
def test_networks_for_video_merge_rows_and_columns_and_keep_the_frames(tokens, grid):
    """1568 tokens would be 2 × 28 × 28 if patches were cubes."""
    video = (2, 3, 16, 224, 224)
    patches = patch_grid(nn.Conv3d(3, 8, (3, 7, 7), (2, 4, 4), (1, 3, 3)), video)
    assert patches == (8, 56, 56) == nn.Conv3d(3, 8, (3, 7, 7), (2, 4, 4), (1, 3, 3))(torch.zeros(video)).shape[2:]
    assert infer_layout((2, tokens, 8), video, nn.LayerNorm(8), patch_grid=patches).grid == grid


def test_token_grid_is_a_flag_of_the_recorder():
    """Patches cut by a linear layer, in a shape no square patch explains."""

    class Strips(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(3 * 32 * 4, 8)
            self.norm = nn.LayerNorm(8)

        def forward(self, x):
            strips = x.unflatten(3, (12, 4)).permute(0, 3, 1, 2, 4).flatten(2)
            return self.norm(self.embed(strips)).square().sum()

    model = nn.Sequential(Strips())
    images, _ = batch(2, (32, 48))
    with NormGrad(model, "0.embed", token_grid=(1, 12)) as recorder:
        model(images).backward()
    assert recorder.maps["0.embed"].shape == (2, 1, 12)
    with NormGrad(model, "0.embed") as recorder:
        model(images).backward()
    with pytest.warns(UserWarning, match="Set `token_grid"):
        assert not recorder.maps


def test_where_the_patches_are_known_other_tokens_are_not_taken_for_them():
    """Text of 20 tokens beside 64 patches: 4 × 4 and four more would fit, but is not so."""
    with pytest.raises(ValueError, match="20 tokens fit no grid"):
        infer_layout((2, 20, 8), (2, 3, 64, 64), nn.LayerNorm(8), patch_grid=(8, 8))
    assert infer_layout((2, 16, 8), (2, 3, 64, 64), nn.LayerNorm(8), patch_grid=(8, 8)).grid == (4, 4)
    assert infer_layout((2, 69, 8), (2, 3, 64, 64), nn.LayerNorm(8), patch_grid=(8, 8)).prefix == 5


def test_the_weights_that_read_a_tensor_tell_its_layout():
    image = (1, 3, 224, 224)
    wide = nn.Linear(96, 384)
    assert infer_layout((1, 56, 56, 96), image, wide, of_input=True).grid == (56, 56)
    assert infer_layout((1, 56, 56, 96), image, nn.Identity()).grid == (56, 56)
    assert infer_layout((1, 96, 56, 56), image, nn.Identity()).grid == (56, 56)
    assert infer_layout((1, 96, 56, 56), image, nn.Conv2d(96, 4, 1), of_input=True).grid == (56, 56)


def test_tokens_before_the_batch_are_not_mixed_up_with_images():
    """(T, N, C) with T = N cannot be told from (N, T, C)."""

    class TokensFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Conv2d(3, 8, 8, 8)
            self.block = nn.TransformerEncoderLayer(8, 2, 16)

        def forward(self, x):
            return self.block(self.embed(x).flatten(2).permute(2, 0, 1)).square().sum()

    model = TokensFirst()
    for n in (16, 5):
        images, _ = batch(n, (32, 32))
        with NormGrad(model, "block") as recorder:
            model(images).backward()
        told = "does not tell tokens from images" if n == 16 else "does not begin with the batch size 5"
        with pytest.warns(UserWarning, match=told):
            assert recorder.maps == {}
