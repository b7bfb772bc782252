"""The plain networks: shapes, numbers of weights, and initial weights that only depend on a seed."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from purecompose.nn import models


SMALL = {
    "mlp": {"hidden": 8},
    "cnn": {"width": 2},
    "airbench": {"widths": (2, 3, 4)},
    "resnet8": {"width": 2},
    "resnet20": {"width": 2},
    "resnet18": {"width": 2},
    "resnet50": {"width": 2},
    "vit": {"patch_size": 1, "width": 4, "depth": 1, "num_heads": 2},
    "gpt": {"width": 4, "depth": 1, "num_heads": 2},
}
"""Options with which each network is small."""

FOR_IMAGES = sorted(set(SMALL) - {"gpt"})


def build_small(name: str, *, seed: int = 0) -> nn.Module:
    """Build a network for 3 classes or tokens, and images 1x9x9 or sequences of 8; patches are of one pixel."""
    return models.build(name, in_shape=(8,) if name == "gpt" else (1, 9, 9), num_classes=3, seed=seed, **SMALL[name])


def num_weights(net: nn.Module) -> int:
    return sum(param.numel() for param in net.parameters())


def flat_weights(net: nn.Module) -> torch.Tensor:
    return torch.cat([param.detach().flatten() for param in net.parameters()])


@given(
    name=st.sampled_from(FOR_IMAGES),
    channels=st.integers(1, 3),
    size=st.integers(4, 12),
    num_classes=st.integers(1, 12),
    batch=st.integers(2, 4),
)
def test_every_model_maps_images_to_logits(name, channels, size, num_classes, batch):
    size = max(size, 9) if name == "airbench" else size
    net = models.build(name, in_shape=(channels, size, size), num_classes=num_classes, seed=0, **SMALL[name])
    logits = net(torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(1)))
    assert logits.shape == (batch, num_classes)
    assert torch.isfinite(logits).all()
    logits.sum().backward()
    assert all(param.grad is not None for param in net.parameters() if param.requires_grad)


@given(in_features=st.integers(1, 20), hidden=st.lists(st.integers(1, 20), max_size=3), num_classes=st.integers(1, 9))
def test_mlp_equals_the_chain_of_its_matrices(in_features, hidden, num_classes):
    net = models.mlp(in_features, hidden, num_classes)
    inputs = torch.randn(4, in_features, generator=torch.Generator().manual_seed(0))
    values = inputs
    linears = [layer for layer in net if isinstance(layer, nn.Linear)]
    for index, layer in enumerate(linears):
        values = values @ layer.weight.T + layer.bias
        values = values.clamp(min=0) if index < len(linears) - 1 else values
    torch.testing.assert_close(net(inputs), values)
    sizes = [in_features, *hidden, num_classes]
    assert num_weights(net) == sum((a + 1) * b for a, b in zip(sizes, sizes[1:], strict=False))


@pytest.mark.parametrize("depth", [8, 14, 20])
@pytest.mark.parametrize("width", [2, 5])
def test_resnet_has_the_layers_of_its_depth(depth, width):
    net = models.resnet(depth, 3, 7, width=width)
    # The main path: every 3x3 convolution and the classifier.
    convs = [m for m in net.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
    assert len(convs) + 1 == depth


def test_large_resnets_have_the_known_numbers_of_weights():
    """They are those of torchvision's models."""
    with torch.device("meta"):
        assert num_weights(models.resnet18(3, 1000)) == 11_689_512
        assert num_weights(models.resnet50(3, 1000)) == 25_557_032


def test_airbench_has_the_layers_of_its_paper():
    """Seven convolutions, frozen weights of norms, no bias but those of norms, and 1.97 million numbers."""
    net = models.airbench(3, 10)
    assert [m.kernel_size for m in net.modules() if isinstance(m, nn.Conv2d)] == [(2, 2), *[(3, 3)] * 6]
    assert {name.rpartition(".")[2] for name, param in net.named_parameters() if param.ndim == 1} == {"weight", "bias"}
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    assert not any(norm.weight.requires_grad for norm in norms)
    assert "head.bias" not in dict(net.named_parameters()) and num_weights(net) == 1_972_768
    images = torch.randn(4, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    assert torch.equal(net.get_submodule("pool")(images), images.flatten(2).max(2).values / 9)


@pytest.mark.parametrize("widths", [(), 4, (2, 3), (2, 2, 2), (2, 2, 2, 2)], ids=str)
def test_airbench_takes_images_of_which_a_pixel_is_left(widths):
    size = 1 + 2 ** (1 if isinstance(widths, int) else len(widths))
    net = models.build("airbench", in_shape=(1, size, size), num_classes=3, seed=0, widths=widths)
    assert net.eval()(torch.zeros(2, 1, size, size)).shape == (2, 3)
    with pytest.raises(ValueError, match=f"airbench: .* at least {size}x{size}, got "):
        models.build("airbench", in_shape=(1, size, size - 1), num_classes=3, seed=0, widths=widths)


@given(seed=st.integers(0, 99), stride=st.sampled_from([1, 2]), in_channels=st.sampled_from([2, 8]))
def test_a_bottleneck_adds_branch_and_shortcut(seed, stride, in_channels):
    torch.manual_seed(seed)
    block = models.Bottleneck(in_channels, 2, stride=stride).eval()
    inputs = torch.randn(3, in_channels, 5, 5)
    values = inputs
    for conv in (layer for layer in block.branch if isinstance(layer, nn.Conv2d)):
        values = nn.functional.conv2d(values, conv.weight, stride=conv.stride, padding=conv.padding)
        values = values / (1 + 1e-5) ** 0.5  # a norm with initial statistics
        values = values.clamp(min=0) if conv.out_channels == 2 else values
    torch.testing.assert_close(block(inputs), (values + block.shortcut(inputs)).clamp(min=0))
    assert isinstance(block.shortcut, nn.Identity) == (stride == 1 and in_channels == 8)


def test_small_options_are_there_for_every_model():
    assert set(SMALL) == set(models.MODELS)


@pytest.mark.parametrize("name", sorted(models.MODELS))
def test_no_layer_works_in_place(name):
    net = build_small(name)
    assert not any(getattr(module, "inplace", False) for module in net.modules())


@pytest.mark.parametrize("name", sorted(models.MODELS))
def test_the_seed_decides_the_weights_and_the_global_generator_is_unchanged(name):
    def build(seed: int) -> torch.Tensor:
        return flat_weights(build_small(name, seed=seed))

    torch.manual_seed(11)
    before = torch.get_rng_state()
    first = build(5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(12)
    assert torch.equal(build(5), first)
    assert not torch.equal(build(6), first)


def test_build_is_on_the_cpu_whatever_the_default_device():
    with torch.device("meta"):
        net = models.build("mlp", in_shape=(4,), num_classes=2, seed=0)
    assert {param.device.type for param in net.parameters()} == {"cpu"}


def test_unknown_name_lists_the_known_and_the_closest():
    with pytest.raises(ValueError, match=r"no model is called 'resnet9'; did you mean 'resnet"):
        models.build("resnet9", in_shape=(1, 8, 8), num_classes=3, seed=0)
    known = "airbench, cnn, gpt, mlp, resnet18, resnet20, resnet50, resnet8, vit"
    with pytest.raises(ValueError, match=rf"called '\?'; known: {known}$"):
        models.build("?", in_shape=(1, 8, 8), num_classes=3, seed=0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "cnn",
            {"widht": 3},
            r"cnn has no option 'widht'; did you mean 'width'\? its options are cnn\(width=16, dropout=0.0\)",
        ),
        (
            "mlp",
            {"num_classes_": 3},
            r"mlp has no option 'num_classes_'; its options are mlp\(hidden=\(256, 128\), dropout=0.0\)",
        ),
        ("resnet8", {"in_channels": 3}, r"resnet8 has no option 'in_channels'; its options are resnet8\(width=16\)"),
    ],
)
def test_an_unknown_option_lists_the_known_ones(name, options, message):
    with pytest.raises(TypeError, match=message):
        models.build(name, in_shape=(1, 8, 8), num_classes=3, seed=0, **options)


def test_a_description_contains_the_defaults():
    assert models.describe("resnet20") == "resnet20(width=16)"
    described = models.build("mlp", in_shape=(1, 8, 8), num_classes=3, seed=0, hidden=(256, 128), dropout=0.0)
    plain = models.build("mlp", in_shape=(1, 8, 8), num_classes=3, seed=0)
    assert models.describe("mlp") == "mlp(hidden=(256, 128), dropout=0.0)"
    assert torch.equal(flat_weights(described), flat_weights(plain))


@pytest.mark.parametrize(
    ("make_fn", "message"),
    [
        (lambda: models.mlp(0, 3, 2), r"in_features: .* got 0 \(int\)"),
        (lambda: models.mlp(3, (4, -1), 2), r"hidden\[1\]: .* got -1 \(int\)"),
        (lambda: models.mlp(3, 2.5, 2), r"mlp: hidden: expected an int or a sequence .* got 2.5 \(float\)"),  # pyright: ignore[reportArgumentType]
        (lambda: models.resnet(9, 1, 2), r"depth=9 is not 6 n \+ 2"),
        (lambda: models.resnet18(3, 10, width=0), r"resnet18: width: expected an int >= 1, got 0 \(int\)"),
        (lambda: models.build("resnet50", in_shape=(8,), num_classes=2, seed=0), r"resnet50: .* got \(8,\)"),
        (
            lambda: models.build("cnn", in_shape=(1, 3, 8), num_classes=2, seed=0),
            r"cnn: .* at least 4x4, got \(1, 3, 8\)",
        ),
        (
            lambda: models.build("airbench", in_shape=(3, 8, 32), num_classes=2, seed=0),
            r"airbench: .* at least 9x9, got \(3, 8, 32\)",
        ),
        (lambda: models.build("mlp", in_shape=(1, 0), num_classes=2, seed=0), r"in_shape\[1\]"),
        (lambda: models.gpt(4, 4, width=6, num_heads=4), "width=6 is not a multiple of num_heads=4"),
        (lambda: models.gpt(4, 4)(torch.zeros(2, 5, dtype=torch.int64)), r"at most 4 positions, got 5"),
        (
            lambda: models.gpt(4, 4)(torch.zeros(2, 4)),
            r"gpt: expected tokens \(N, L\) of an integer dtype, got a torch",
        ),
        (
            lambda: models.gpt(4, 4)(torch.zeros(3, dtype=torch.int64)),
            r"\(N, L\) of an integer dtype, got .* shape \(3,\)",
        ),
        (lambda: models.build("gpt", in_shape=(3, 8, 8), num_classes=4, seed=0), r"gpt: expected in_shape \(length,\)"),
        (lambda: models.build("vit", in_shape=(8,), num_classes=4, seed=0), r"vit: expected in_shape \(channels, "),
        (lambda: models.vit((3, 8, 9), 4), r"vit: patch_size=4 does not divide images of 8x9"),
        (
            lambda: models.vit((3, 8, 8), 4, pool="max"),  # pyright: ignore[reportArgumentType]
            r"vit: pool: expected 'token' or 'mean', got 'max' \(str\)",
        ),
        (lambda: models.vit((3, 8, 8), 4)(torch.zeros(1, 3, 4, 4)), r"vit: expected images of 8x8, .* got 4x4; resize"),
    ],
)
def test_refused_arguments(make_fn, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make_fn()
