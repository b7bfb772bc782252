"""How fast are RandAugment and AugMix on batches, against the same operations image by image with Pillow?

    python benchmarks/augmentation.py [--only randaugment] [--no-compile]

512 images of 32x32 and 64 of 224x224, uint8 in and out. Pillow's way is what data sets do: each image becomes a PIL
image, gets its random operations, and comes back as a tensor; in two threads and in two processes that stay, of which
the faster one counts. The batched way runs eager and compiled, with two threads. All take turns; times are medians.
"""

import argparse
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from _timing import Row, arguments, median_us, paired, parse, ratio, save
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from purecompose.functional import augmix_batch, randaugment_batch
from purecompose.random import fold_in, key


SIZES = ((512, 32), (64, 224))
CORES = 2

Draw = Callable[[np.random.Generator, float], Any]


def _level(unit: float) -> Draw:
    return lambda rng, severity: rng.uniform(0, severity) * unit / 10


def _signed(unit: float, whole: bool = False) -> Draw:
    def draw(rng: np.random.Generator, severity: float) -> float:
        size = rng.uniform(0, severity) * unit / 10
        return (int(size) if whole else size) * (1 if rng.random() < 0.5 else -1)

    return draw


def _factor(rng: np.random.Generator, severity: float) -> float:
    share = rng.random()
    return 1 + share * max(severity - 1, 0) if rng.random() < 0.5 else 1 - 0.09 * share * severity


def _affine(image: Image.Image, *matrix: float) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix, resample=Image.Resampling.BILINEAR)


def _rotated(image: Image.Image, degrees: float) -> Image.Image:
    return image.rotate(degrees, resample=Image.Resampling.BILINEAR)


OPERATIONS: tuple[Callable[[Image.Image, np.random.Generator, float], Image.Image], ...] = (
    lambda image, rng, severity: ImageOps.autocontrast(image),
    lambda image, rng, severity: ImageOps.equalize(image),
    lambda image, rng, severity: ImageOps.posterize(image, 8 - int(_level(4)(rng, severity))),
    lambda image, rng, severity: _rotated(image, _signed(30, whole=True)(rng, severity)),
    lambda image, rng, severity: ImageOps.solarize(image, 256 - int(_level(256)(rng, severity))),
    lambda image, rng, severity: _affine(image, 1, _signed(0.3)(rng, severity), 0, 0, 1, 0),
    lambda image, rng, severity: _affine(image, 1, 0, 0, _signed(0.3)(rng, severity), 1, 0),
    lambda image, rng, severity: _affine(image, 1, 0, _signed(image.width / 3, whole=True)(rng, severity), 0, 1, 0),
    lambda image, rng, severity: _affine(image, 1, 0, 0, 0, 1, _signed(image.height / 3, whole=True)(rng, severity)),
    lambda image, rng, severity: ImageEnhance.Color(image).enhance(_factor(rng, severity)),
    lambda image, rng, severity: ImageEnhance.Contrast(image).enhance(_factor(rng, severity)),
    lambda image, rng, severity: ImageEnhance.Brightness(image).enhance(_factor(rng, severity)),
    lambda image, rng, severity: ImageEnhance.Sharpness(image).enhance(_factor(rng, severity)),
)


def pillow_randaugment(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Two operations of severity up to 9."""
    for _ in range(2):
        image = OPERATIONS[rng.integers(len(OPERATIONS))](image, rng, 9.0)
    return image


def pillow_augmix(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Three chains of one to three operations of severity up to 3."""
    weights, share = rng.dirichlet([1.0] * 3), rng.beta(1.0, 1.0)
    mixture = np.zeros((image.height, image.width, 3), dtype=np.float32)
    for weight in weights:
        chain = image
        for _ in range(rng.integers(1, 4)):
            chain = OPERATIONS[rng.integers(len(OPERATIONS))](chain, rng, 3.0)
        mixture += weight * np.asarray(chain, dtype=np.float32)
    mixed = (1 - share) * np.asarray(image, dtype=np.float32) + share * mixture
    return Image.fromarray(mixed.round().astype(np.uint8))


PILLOW = {"randaugment": pillow_randaugment, "augmix": pillow_augmix}
BATCHED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "randaugment": lambda key, images: randaugment_batch(key, images, severity=9.0, depth=2),
    "augmix": lambda key, images: augmix_batch(key, images, severity=3.0, width=3),
}


def one_by_one(name: str, images: Tensor, seed: int) -> Tensor:
    """What a worker does with its share of a batch."""
    rng, results = np.random.default_rng(seed), []
    for image in images:
        changed = PILLOW[name](Image.fromarray(image.permute(1, 2, 0).numpy()), rng)
        results.append(torch.from_numpy(np.array(changed)).permute(2, 0, 1))
    return torch.stack(results)


def shared_out(pool: Executor, name: str, images: Tensor, seed: int) -> Tensor:
    """The batch in as many parts as there are cores."""
    parts = [pool.submit(one_by_one, name, part, seed + i) for i, part in enumerate(images.chunk(CORES))]
    return torch.cat([part.result() for part in parts])


def pictures(num: int, size: int) -> Tensor:
    """Smooth colours with noise, so that no operation finds flat images."""
    generator = torch.Generator().manual_seed(size)
    coarse = torch.rand(num, 3, 4, 4, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (size, size), mode="bilinear")
    noise = 0.1 * torch.rand(num, 3, size, size, generator=generator)
    return ((0.9 * smooth + noise) * 255).to(torch.uint8)


def measure(name: str, num: int, size: int, pools: dict[str, Executor], args: argparse.Namespace) -> Row:
    """One row: a batch of one size by one method."""
    images, seeds = pictures(num, size), iter(range(10**9))
    batched = BATCHED[name]
    ways: dict[str, Callable[[], Tensor]] = {
        kind: lambda pool=pool: shared_out(pool, name, images, next(seeds)) for kind, pool in pools.items()
    }
    ways["eager"] = lambda: batched(fold_in(key(0), next(seeds)), images)
    if not args.no_compile:
        compiled = torch.compile(batched, fullgraph=True, backend=args.backend)
        ways["compiled"] = lambda: compiled(fold_in(key(0), next(seeds)), images)
    seconds = paired(ways, calls=args.calls, blocks=args.blocks)
    faster = min(pools, key=lambda kind: median_us(seconds[kind]))
    row: Row = {"method": name, "images": f"{num} of {size}x{size}"}
    row |= {f"{kind} ms": round(median_us(values) / 1e3, 1) for kind, values in seconds.items()}
    for kind in ("eager", "compiled"):
        if kind in seconds:
            low, middle, high = ratio(seconds, faster, kind)
            row |= {f"Pillow / {kind}": round(middle, 2), f"quartiles {kind}": f"{low:.2f} {high:.2f}"}
    return row


def main() -> None:
    """Measures, prints and saves."""
    parser = arguments(__doc__, blocks=15, calls=2)
    parser.add_argument("--only", choices=sorted(BATCHED), help="one method")
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled way out")
    args = parse(parser)
    torch.set_num_threads(CORES)
    names = [args.only] if args.only else sorted(BATCHED, reverse=True)
    # Started again, not forked: a fork of a process with threads of OpenMP hangs at the first parallel loop.
    spawned = ProcessPoolExecutor(CORES, mp_context=get_context("spawn"), initializer=_one_thread)
    with ThreadPoolExecutor(CORES) as threads, spawned as processes:
        pools: dict[str, Executor] = {"threads": threads, "processes": processes}
        rows = [measure(name, num, size, pools, args) for name in names for num, size in SIZES]
    save("augmentation", rows, args.out, "pillow")


def _one_thread() -> None:
    torch.set_num_threads(1)


if __name__ == "__main__":
    main()
