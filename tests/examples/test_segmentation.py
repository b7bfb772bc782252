"""U-Net: the example's step against a plain loop, with the same flips."""

import torch
from torch import Tensor
from torch.nn import functional as F

import purecompose as pc
from examples import segmentation


def plain_loop(num_batches: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    torch.manual_seed(0)
    net = segmentation.UNet().to(dtype)
    _, start, batches = segmentation.make(dtype)  # the state gives the draws
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for i in range(num_batches):
        now = start.replace(timestamp=start.timestamp.replace(batch=i), batch=batches[i % len(batches)])
        images, masks = segmentation.flipped(now.example_rng("flip"), *now.batch)
        optimizer.zero_grad()
        F.cross_entropy(net(images), masks, ignore_index=segmentation.BORDER).backward()
        optimizer.step()
    return {name: param.detach() for name, param in net.named_parameters()}


def test_segmentation_equals_a_plain_loop():
    step, start, batches = segmentation.make(torch.float64)
    trained = pc.fit(step, start, batches, duration="10ba")
    torch.testing.assert_close(trained.params, plain_loop(10), rtol=1e-9, atol=1e-9)


def test_masks_are_flipped_with_their_images():
    images, masks = segmentation.scenes(0, torch.float64)
    both = segmentation.flipped(pc.random.Rng(pc.random.key(0)).per_example(torch.arange(16)), images, masks)
    is_flipped = (both[0] != images).flatten(1).any(1)
    assert 0 < is_flipped.sum() < 16
    for found, given in zip(both, (images, masks), strict=True):
        assert torch.equal(found[is_flipped], given[is_flipped].flip(-1))
        assert torch.equal(found[~is_flipped], given[~is_flipped])
