"""What `layers="auto"` takes, on small networks that are built like those it once went wrong on."""

import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from normgrad_lightning import NormGrad


def conv(inside, outside, stride=1):
    return nn.Sequential(nn.Conv2d(inside, outside, 3, stride, 1), nn.BatchNorm2d(outside), nn.ReLU())


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(conv(channels, channels), nn.Conv2d(channels, channels, 3, padding=1))

    def forward(self, x):
        return x + self.body(x)


class Stage(nn.Module):
    """Begins with a norm and a step to the next grid, as a stage of ConvNeXt does."""

    def __init__(self, inside, outside, stride):
        super().__init__()
        self.downsample = nn.Sequential(nn.GroupNorm(1, inside), nn.Conv2d(inside, outside, stride, stride))
        self.blocks = nn.Sequential(Residual(outside), Residual(outside))

    def forward(self, x):
        return self.blocks(self.downsample(x))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList([Stage(4, 4, 1), Stage(4, 8, 2), Stage(8, 16, 2)])

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return x


class InContainer(nn.Module):
    """A stem outside of the container with the stages."""

    def __init__(self):
        super().__init__()
        self.stem, self.encoder, self.head = conv(3, 4), Encoder(), nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.encoder(self.stem(x)).mean((2, 3)))


class Attention(nn.Module):
    """Attention with pooled keys, as in PVT: the keys are on a coarser grid."""

    def __init__(self, channels, grid):
        super().__init__()
        self.grid = grid
        self.query, self.keys = nn.Linear(channels, channels), nn.Linear(channels, channels)
        self.pool = nn.Conv2d(channels, channels, 2, 2)

    def forward(self, x):
        patches = x.mT.unflatten(2, self.grid)
        keys = self.keys(self.pool(patches).flatten(2).mT)
        return (self.query(x) @ keys.mT).softmax(-1) @ keys


class Block(nn.Module):
    def __init__(self, channels, grid=None):
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.attention = Attention(channels, grid) if grid else nn.MultiheadAttention(channels, 1, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(channels), nn.Linear(channels, channels), nn.GELU())

    def forward(self, x):
        y = self.norm(x)
        x = x + (self.attention(y) if isinstance(self.attention, Attention) else self.attention(y, y, y)[0])
        return x + self.mlp(x)


class PooledKeys(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 2, 2)
        self.blocks = nn.Sequential(Block(8, (8, 12)), Block(8, (8, 12)))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.blocks(self.embed(x).flatten(2).mT).mean(1))


class ClassToken(nn.Module):
    """A convolutional stem, then blocks; the head reads the class token alone."""

    def __init__(self, depth=6):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 2, 2), nn.ReLU(), nn.Conv2d(4, 16, 2, 2))
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.blocks = nn.ModuleList(Block(16) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), 1, 16), self.stem(x).flatten(2).mT], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class PyramidPooling(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.body = conv(3, 4, 2), conv(4, 8, 2)
        self.pools = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(size), nn.Conv2d(8, 4, 1), nn.ReLU()) for size in (2, 3)
        )
        self.fuse, self.logits = conv(16, 8), nn.Conv2d(8, 5, 1)

    def forward(self, x):
        x = self.body(self.stem(x))
        pooled = [F.interpolate(pool(x), x.shape[2:]) for pool in self.pools]
        return self.logits(self.fuse(torch.cat([x, *pooled], 1)))


class TwoTowers(nn.Module):
    """Words, as many as a coarse grid has cells, run before the image."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 8)
        self.text = nn.ModuleList(Block(8) for _ in range(4))
        self.embed = nn.Conv2d(3, 8, 4, 4)
        self.vision = nn.ModuleList(Block(8) for _ in range(3))

    def forward(self, pixels, words):
        text = self.words(words)
        for block in self.text:
            text = block(text)
        image = self.embed(pixels).flatten(2).mT
        for block in self.vision:
            image = block(image)
        return image.mean(1) @ text.mean(1).mT


class Unrolled(nn.Module):
    """Sorts its tokens into blocks once, as Hiera does."""

    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Conv2d(3, 8, 4, 4), nn.ModuleList(Block(8) for _ in range(3))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.embed(x).reshape(len(x), 8, 2, 2, 3, 2).permute(0, 2, 4, 3, 5, 1).reshape(len(x), 24, 8)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Masked(Unrolled):
    """Keeps some of the patches, as the encoder of a masked autoencoder does: four rows of six, to look at."""

    def forward(self, x):
        x = self.embed(x).flatten(2).mT[:, torch.randperm(24)[:6]]
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Reader(nn.Module):
    """Strides that differ between rows and columns, as in networks that read lines of text."""

    def __init__(self):
        super().__init__()
        self.first, self.second = conv(3, 4, 2), conv(4, 8, (4, 1))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.second(self.first(x)).mean((2, 3)))


class InParts(nn.Module):
    """A step that calls one part after the other."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 8, 3, 2, 1))
        self.head = nn.Linear(8, 5)


def classified(model, *inputs):
    return F.cross_entropy(model(*inputs), torch.arange(2))


NETWORKS = {
    "stages in a container": (InContainer, ["encoder.stages.0", "encoder.stages.1", "encoder.stages.2"]),
    "pooled keys": (PooledKeys, ["blocks.0", "blocks.1"]),
    "class token behind a stem": (ClassToken, ["blocks.0", "blocks.1", "blocks.2", "blocks.3", "blocks.4"]),
    "other strides for rows": (Reader, ["first.2", "second.2"]),
}


def layers_of(model, loss):
    torch.manual_seed(0)
    with warnings.catch_warnings(), NormGrad(model) as recorder:
        warnings.simplefilter("error")
        loss(model).backward()
        maps = recorder.maps
    assert all(m.any() for m in maps.values())
    return list(maps)


@pytest.mark.parametrize("name", NETWORKS)
def test_auto_takes_what_a_person_would_name(name):
    network, layers = NETWORKS[name]
    torch.manual_seed(0)
    found = layers_of(network(), lambda model: classified(model, torch.randn(2, 3, 16, 24)))
    assert found == layers


def test_neither_pooled_pyramids_nor_logits():
    def loss(model):
        return F.cross_entropy(model(torch.randn(2, 3, 16, 24)), torch.zeros(2, 4, 6, dtype=torch.long))

    assert layers_of(PyramidPooling(), loss) == ["stem.2", "fuse.2"]


class Head(nn.Sequential):
    """Ends with the logits, as torchvision's heads of segmentation do."""

    def __init__(self, channels):
        super().__init__(*conv(channels, 3 * channels), nn.Conv2d(3 * channels, 5, 1))


class Segments(nn.Module):
    """A head on the last grid, drawn to the image's size."""

    def __init__(self):
        super().__init__()
        self.stem, self.body, self.head = conv(3, 4, 2), Stage(4, 8, 2), Head(8)

    def forward(self, x):
        return F.interpolate(self.head(self.body(self.stem(x))), x.shape[2:])


class Decoder(nn.Sequential):
    """Ends with an image."""

    def __init__(self):
        up = nn.Upsample(scale_factor=2)
        super().__init__(up, conv(8, 8), up, conv(8, 4), nn.Conv2d(4, 3, 3, padding=1))


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(conv(3, 4, 2), conv(4, 8, 2)), Decoder()

    def forward(self, x):
        return self.decoder(self.encoder(x))


@pytest.mark.parametrize(
    ("network", "layers"),
    [(Segments, ["stem.2", "body"]), (Autoencoder, ["encoder.0.2", "encoder.1.2", "decoder.3.2"])],
)
def test_a_block_that_ends_with_the_prediction_is_no_feature(network, layers):
    assert layers_of(network(), lambda model: model(torch.randn(2, 3, 16, 24)).square().mean()) == layers


class Gated(nn.Module):
    """A pyramid of single numbers says which places count, as in PAN."""

    def __init__(self):
        super().__init__()
        self.stem, self.body = conv(3, 4, 2), conv(4, 8, 2)
        self.down = nn.ModuleList([conv(8, 1, 2), conv(1, 1, 1)])
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.body(self.stem(x))
        gate = x
        for down in self.down:
            gate = down(gate)
        return self.head((x * F.interpolate(gate, x.shape[2:])).mean((2, 3)))


def test_one_number_for_each_place_is_no_feature():
    assert layers_of(Gated(), lambda model: classified(model, torch.randn(2, 3, 16, 24))) == ["stem.2", "body.2"]


def test_a_backbone_without_a_head_predicts_nothing():
    def loss(model):
        return model(torch.randn(2, 3, 16, 24)).square().mean()

    assert layers_of(nn.Sequential(conv(3, 4, 2), Stage(4, 8, 2)), loss) == ["0.2", "1"]


def test_words_are_no_patches():
    """24 words would fit the grid of 4 × 6."""

    def loss(model):
        return classified(model, torch.randn(2, 3, 16, 24), torch.randint(50, (2, 24)))

    assert layers_of(TwoTowers(), loss) == ["vision.0", "vision.1", "vision.2"]


@pytest.mark.parametrize("network", [Unrolled, Masked])
def test_tokens_out_of_order_are_left_out_and_named(network):
    model = network()
    with NormGrad(model) as recorder:
        classified(model, torch.randn(2, 3, 16, 24)).backward()
        with pytest.warns(UserWarning, match="leaves 'blocks.0.* and .* more layers out of .* not in the order"):
            maps = recorder.maps
    assert list(maps) == ["embed"]
    with NormGrad(model, "blocks.1") as recorder:
        classified(model, torch.randn(2, 3, 16, 24)).backward()
        with pytest.warns(UserWarning, match="cannot read the layer 'blocks.1': the tokens are not in the order"):
            assert recorder.maps == {}


def test_who_knows_the_order_can_give_the_grid():
    model = Unrolled()
    with NormGrad(model, "blocks.1", token_grid=(4, 6)) as recorder:
        classified(model, torch.randn(2, 3, 16, 24)).backward()
        assert recorder.maps["blocks.1"].shape == (2, 4, 6)


def test_parts_called_one_after_the_other_are_no_predictions():
    """The last convolution gives what the head reads, though its own network ends there."""

    def loss(model):
        return F.cross_entropy(model.head(model.features(torch.randn(2, 3, 16, 24)).mean((2, 3))), torch.arange(2))

    assert layers_of(InParts(), loss) == ["features.1", "features.2"]


class Detects(nn.Module):
    """A class token before the patches and detection tokens after them, as in YOLOS."""

    def __init__(self, before, after):
        super().__init__()
        self.embed, self.block, self.head = nn.Conv2d(3, 8, 4, 4), Block(8), nn.Linear(8, 5)
        self.before, self.after = (nn.Parameter(torch.randn(1, count, 8)) for count in (before, after))

    def forward(self, x):
        patches = self.embed(x).flatten(2).mT
        self.tokens = torch.cat([self.before.expand(2, -1, -1), patches, self.after.expand(2, -1, -1)], 1)
        self.seen = self.block(self.tokens)
        return self.head(self.seen[:, len(self.before[0]) + 24 :].mean(1))


@pytest.mark.parametrize(("before", "after"), [(1, 12), (0, 100), (3, 0)])
def test_an_offset_says_where_the_patches_begin(before, after):
    model = Detects(before, after)
    with NormGrad(model, "block", token_grid=(4, 6, before)) as recorder:
        model(torch.randn(2, 3, 16, 24))
        model.seen.retain_grad()
        F.cross_entropy(model.head(model.seen.square().mean(1)), torch.arange(2)).backward()
        found = recorder.maps["block"]
    patches = slice(before, before + 24)
    wanted = model.seen.detach()[:, patches].norm(dim=2) * model.seen.grad[:, patches].norm(dim=2)
    torch.testing.assert_close(found, wanted.unflatten(1, (4, 6)))


def test_many_extra_tokens_need_an_offset():
    model = Detects(1, 12)
    with NormGrad(model, "block", token_grid=(4, 6)) as recorder:
        classified(model, torch.randn(2, 3, 16, 24)).backward()
        with pytest.warns(UserWarning, match=r"13 tokens more than `token_grid=\(4, 6\)` needs"):
            assert recorder.maps == {}


class Marked(torch.autograd.Function):
    """Puts an object into the graph, so that one can see how long the graph lives."""

    @staticmethod
    def forward(ctx, x, mark):
        ctx.mark = mark
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Mark:
    pass


def test_a_step_without_a_backward_holds_no_graph():
    """The graph of a skipped batch lives no longer with the recorder than without."""
    mark = Mark()
    alive = weakref.ref(mark)
    model = InContainer()
    stage = model.encoder.stages[0]
    handle = stage.register_forward_hook(lambda layer, args, output, mark=mark: Marked.apply(output, mark))
    with NormGrad(model):
        output = model(torch.randn(2, 3, 16, 24))
        handle.remove()
        del mark
        assert alive() is not None
        del output
        assert alive() is None


def test_auto_names_the_blocks_that_need_an_offset():
    """Otherwise a user would take the patch embedding for all that there is."""
    model = Detects(1, 12)
    with NormGrad(model) as recorder:
        classified(model, torch.randn(2, 3, 16, 24)).backward()
        with pytest.warns(UserWarning, match=r"leaves 'block.* out of .*: its 37 tokens fit no grid.*tokens before"):
            assert list(recorder.maps) == ["embed"]
    with warnings.catch_warnings(), NormGrad(model, token_grid=(4, 6, 1)) as recorder:
        warnings.simplefilter("error")
        model(torch.randn(2, 3, 16, 24))
        model.head(model.seen.square().mean(1)).sum().backward()  # all tokens are read
        assert any(name.startswith("block") for name in recorder.maps)


class TalkingHeads(nn.Module):
    """Attention whose matrices go through a convolution: of 7 × 7 tokens, they look like a grid of 49 × 49 cells."""

    def __init__(self, channels, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(channels, 3 * channels)
        self.talk = nn.Sequential(nn.Conv2d(heads, heads, 1), nn.BatchNorm2d(heads))
        self.proj = nn.Linear(channels, channels)

    def forward(self, x):
        grid = x.shape[2:]
        q, k, v = self.qkv(x.flatten(2).mT).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attention = self.talk(q @ k.mT).softmax(-1)
        mixed = self.proj((attention @ v).transpose(1, 2).flatten(2))
        return x + mixed.mT.unflatten(2, grid)


class Hybrid(nn.Module):
    """Convolutions, then attention on the last grid."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList([conv(3, 4, 2), conv(4, 8, 2), conv(8, 16, 2)])
        self.attention = nn.ModuleList([TalkingHeads(16), TalkingHeads(16)])
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        for part in (*self.stages, *self.attention):
            x = part(x)
        return self.head(x.mean((2, 3)))


class Grows(nn.Module):
    """A decoder: its grid of 16 × 16 cells is a grid, though it comes after one of 4 × 4."""

    def __init__(self):
        super().__init__()
        self.shrink = conv(3, 8, 16)
        self.up = nn.ModuleList(
            nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(3)
        )

    def forward(self, x):
        x = self.shrink(x)
        for up in self.up:
            x = up(x)
        return x


def taken_from(network, images):
    with NormGrad(network) as recorder:
        network(images).square().sum().backward()
    return recorder.layers


def test_a_matrix_of_attention_is_no_grid():
    assert taken_from(Hybrid(), torch.randn(2, 3, 56, 56)) == ["stages.0.2", "stages.1.2", "attention.1"]


def test_a_grid_that_all_features_go_through_is_one_whatever_its_size():
    assert taken_from(Grows(), torch.randn(2, 3, 64, 64)) == ["shrink.2", "up.0.2", "up.1.2"]  # the last predicts


class Stacked(nn.Module):
    """A few blocks on a fine grid, before many wide ones on the next."""

    def __init__(self):
        super().__init__()
        self.stem, self.fine = conv(3, 4, 2), nn.Sequential(Residual(4), Residual(4))
        self.step, self.coarse = nn.Conv2d(4, 32, 2, 2), nn.Sequential(*(Residual(32) for _ in range(5)))
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        return self.head(self.coarse(self.step(self.fine(self.stem(x)))).mean((2, 3)))


def test_a_stage_before_the_one_with_nearly_all_weights_counts():
    assert taken_from(Stacked(), torch.randn(2, 3, 16, 24)) == ["fine.1", "coarse.4"]


class ConvNorm(nn.Sequential):
    def __init__(self, inside, outside, stride=1):
        super().__init__(nn.Conv2d(inside, outside, 3, stride, 1), nn.BatchNorm2d(outside))


class PlainStem(nn.Module):
    """Two convolutions on a finer grid before the blocks."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(ConvNorm(3, 2, 2), ConvNorm(2, 2), nn.Conv2d(2, 16, 2, 2))
        self.blocks, self.head = nn.ModuleList(Block(16) for _ in range(6)), nn.Linear(16, 5)

    def forward(self, x):
        x = self.stem(x).flatten(2).mT
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def test_the_convolutions_of_a_stem_are_no_stage():
    found = taken_from(PlainStem(), torch.randn(2, 3, 16, 24))
    assert found == ["blocks.0", "blocks.1", "blocks.2", "blocks.4", "blocks.5"]


class Tapped(nn.Module):
    """A decoder that uses what each block gives, as that of DPT does."""

    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Conv2d(3, 8, 4, 4), nn.ModuleList(Block(8) for _ in range(4))
        self.up, self.head = conv(8, 8), nn.Conv2d(8, 5, 1)

    def forward(self, x):
        x, taken = self.embed(x).flatten(2).mT, []
        for block in self.blocks:
            taken.append(x := block(x))
        features = sum(F.interpolate(t.mT.unflatten(2, (4, 6)), scale_factor=2) for t in taken)
        return self.head(self.up(features))


def test_what_a_decoder_uses_of_a_block_hides_no_later_block():
    assert taken_from(Tapped(), torch.randn(2, 3, 16, 24)) == ["blocks.3", "up.2"]


class Fuses(nn.Module):
    """A block of a decoder that works on a grid, and then steps to a finer one."""

    def __init__(self):
        super().__init__()
        self.before, self.after = Residual(8), Residual(8)
        self.up, self.project = nn.Upsample(scale_factor=2), nn.Conv2d(8, 8, 1)

    def forward(self, x, skip):
        return self.project(self.up(self.after(x + self.before(skip))))


class Fusion(nn.Module):
    """Makes a pyramid of one grid, and fuses it again, as DPT does."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = conv(3, 8, 8), nn.Conv2d(8, 5, 1)
        self.pyramid = nn.ModuleList([nn.Identity(), nn.ConvTranspose2d(8, 8, 2, 2), nn.ConvTranspose2d(8, 8, 4, 4)])
        self.fuse = nn.ModuleList([Fuses(), Fuses(), Fuses()])

    def forward(self, x):
        features = self.stem(x)
        pyramid = [step(features) for step in self.pyramid]
        x = features
        for fuse, skip in zip(self.fuse, pyramid, strict=True):
            x = fuse(x, skip)
        return self.head(x)


def test_a_block_of_a_decoder_stands_for_the_grid_that_it_ends_on():
    assert taken_from(Fusion(), torch.randn(2, 3, 32, 48)) == ["stem.2", "pyramid.1", "fuse.1", "fuse.2"]


class UpscaledLogits(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 5, 1))

    def forward(self, x):
        return F.interpolate(self.layers(x), scale_factor=2)


class SumOfLogits(nn.Module):
    """Of this grid and of the one before, as in LR-ASPP."""

    def __init__(self):
        super().__init__()
        self.low, self.high = nn.Conv2d(4, 5, 1), nn.Conv2d(8, 5, 1)

    def forward(self, low, high):
        return self.low(low) + F.interpolate(self.high(high), scale_factor=2)


class Segmenter(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.stem, self.body, self.head = conv(3, 4, 2), conv(4, 8, 2), head

    def forward(self, x):
        low = self.stem(x)
        features = self.body(low)
        return self.head(features) if isinstance(self.head, UpscaledLogits) else self.head(low, features)


@pytest.mark.parametrize("head", [UpscaledLogits, SumOfLogits])
def test_logits_that_are_upscaled_or_added_up_are_no_features(head):
    network = Segmenter(head())
    assert taken_from(network, torch.randn(2, 3, 16, 24)) == ["stem.2", "body.2"]


class Folds(nn.Module):
    """Pools tokens as if they were sorted into windows, which they are not, as a backbone of Hiera does."""

    def __init__(self):
        super().__init__()
        self.embed, self.first, self.second = nn.Conv2d(3, 8, 2, 2), Block(8), Block(8)
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(8)])

    def forward(self, x):
        fine = self.first(self.embed(x).flatten(2).mT)
        coarse = self.second(fine.reshape(len(x), 4, -1, 8).amax(1))
        return sum(norm(t).square().mean(1) for norm, t in zip(self.norms, (fine, coarse), strict=True))


def test_pooled_tokens_out_of_order_are_left_out_and_named():
    model = Folds()
    with NormGrad(model) as recorder:
        model(torch.randn(2, 3, 16, 24)).square().sum().backward()
        with pytest.warns(UserWarning, match="leaves 'second.* out of .* not in the order"):
            assert list(recorder.maps) == ["first"]


class DividedBlock(nn.Module):
    """Mixes the frames of a clip at each place, then the places of each frame, as in TimeSformer."""

    def __init__(self, frames):
        super().__init__()
        self.frames, self.time, self.space = frames, Block(8), Block(8)

    def forward(self, x):
        clips, patches = len(x), x[:, 1:].unflatten(1, (self.frames, -1))
        patches = self.time(patches.transpose(1, 2).flatten(0, 1)).unflatten(0, (clips, -1)).transpose(1, 2)
        token = x[:, None, :1].expand(-1, self.frames, -1, -1)
        space = self.space(torch.cat([token, patches], 2).flatten(0, 1)).unflatten(0, (clips, -1))
        return x + torch.cat([space[:, :, 0].mean(1, keepdim=True), space[:, :, 1:].flatten(1, 2)], 1)


class Clips(nn.Module):
    def __init__(self, frames=3):
        super().__init__()
        self.embed, self.token = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.randn(1, 1, 8))
        self.blocks, self.head = nn.ModuleList(DividedBlock(frames) for _ in range(3)), nn.Linear(8, 5)

    def forward(self, clips):
        patches = self.embed(clips.flatten(0, 1)).flatten(2).mT.unflatten(0, clips.shape[:2]).flatten(1, 2)
        x = torch.cat([self.token.expand(len(clips), -1, -1), patches], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


def test_branches_of_blocks_that_mix_frames_are_left_out_and_the_blocks_named():
    model = Clips()
    with NormGrad(model) as recorder:
        classified(model, torch.randn(2, 3, 3, 16, 24)).backward()
        with pytest.warns(UserWarning, match="leaves 'blocks.0' and 2 more .* of several images"):
            assert list(recorder.maps) == ["embed"]


class WithState(nn.Module):
    """Gives features and a state, as a block of EfficientViM does."""

    def __init__(self):
        super().__init__()
        self.body, self.mix = conv(8, 8), conv(8, 8)

    def forward(self, x):
        x = x + self.body(x)
        return x + self.mix(x), x.flatten(2)[..., :4]


class States(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks, self.head = conv(3, 8, 2), nn.ModuleList([WithState(), WithState()]), nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x, state = block(x)
        return self.head(x.mean((2, 3)) + state.mean(2))


def test_features_before_a_state_of_fewer_axes_are_what_a_block_gives():
    assert taken_from(States(), torch.randn(2, 3, 16, 24)) == ["blocks.0", "blocks.1"]
