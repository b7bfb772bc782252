"""Draws what the programs of docs/gallery.md have learned, and writes what they print into their pages.

    python docs/images/gallery.py [--short] [--folder FOLDER] [NAME ...]

Each program runs as `python examples/NAME.py`; its states go to the picture of its name. Writes gallery_NAME.svg beside
this file, and the program's output into the first block of docs/gallery/NAME.md; with a folder, only the pictures, into
that folder. With --short the programs run in their short form.
"""

import argparse
import base64
import io
import pathlib
import re
import runpy
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from typing import Any
from unittest import mock

import torch
from explained import COLORS, Drawing
from PIL import Image
from torch import Tensor

import purecompose as pc


FOLDER = pathlib.Path(__file__).parent
ROOT = FOLDER.parents[1]
WIDTH, HEIGHT = 320, 200
CLASSES = torch.tensor([[71, 85, 105], [234, 88, 12], [45, 212, 191], [203, 213, 225]], dtype=torch.uint8)
"""Colours of the classes of masks: the background, squares, discs, and pixels without a class."""

Names = dict[str, Any]
"""Those of a program, and "duration", of its runs."""
Runs = list[tuple[pc.State, pc.State]]
"""The first and the last state of each of a program's runs by `fit`."""


class Picture(Drawing):
    """A drawing of one size, with dots, lines and images."""

    def __init__(self, label: str) -> None:
        super().__init__(label)
        self.height = HEIGHT

    def svg(self) -> str:
        sizes = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH * 3 // 2}" height="{HEIGHT * 3 // 2}"'
        return re.sub(r'viewBox="[^"]*" width="\d+" height="\d+"', sizes, super().svg(), count=1)

    def dots(self, points: Tensor, color: str, size: float = 3) -> None:
        """Draw points (N, 2) in pixels; those outside of the picture are left out."""
        is_inside = ((points >= 0) & (points <= torch.tensor([WIDTH, HEIGHT]))).all(1)
        places = "".join(f"M{x:.0f} {y:.0f}h0" for x, y in points[is_inside].tolist())
        self._path(places, color, f"stroke-linecap:round;stroke-width:{size:g}")

    def curve(self, points: Tensor, color: str, dashes: str = "none") -> None:
        """Draw a line through points (N, 2) in pixels."""
        places = "L".join(f"{x:.0f} {y:.0f}" for x, y in points.tolist())
        self._path(f"M{places}", color, f"stroke-width:2;stroke-dasharray:{dashes}")

    def _path(self, places: str, color: str, style: str) -> None:
        light, dark = COLORS[color]
        stroke = f"stroke:{light};stroke:light-dark({light},{dark})"
        self.elements.append(f'<path d="{places}" style="fill:none;{stroke};{style}"/>')

    def image(self, x: float, y: float, side: float, pixels: Tensor) -> None:
        """Draw a square image, uint8 (H, H) or (H, H, 3)."""
        file = io.BytesIO()
        Image.fromarray(pixels.numpy()).save(file, "png", optimize=True)
        data = base64.b64encode(file.getvalue()).decode()
        self.elements.append(
            f'<image x="{x:g}" y="{y:g}" width="{side:g}" height="{side:g}" style="image-rendering:pixelated" '
            f'href="data:image/png;base64,{data}"/>'
        )


def gray(images: Tensor) -> Tensor:
    """Return images as uint8, black at their least value and white at their greatest."""
    return ((images - images.min()) / (images.max() - images.min()) * 255).to(torch.uint8)


def placed(points: Tensor, center: tuple[float, float], scale: float, middle: tuple[float, float] = (0, 0)) -> Tensor:
    """Return points (N, 2) of the plane in pixels, with the `middle` of the plane at the center, and y upwards."""
    return torch.tensor(center) + scale * torch.tensor([1, -1]) * (points - torch.tensor(middle))


def vae(names: Names, runs: Runs) -> Picture:
    picture = Picture("Digits, their reconstructions by the trained network, and digits decoded from noise")
    images = pc.data.load("digits").test_inputs[:8]
    images = (images - images.min()) / (images.max() - images.min())
    net: Any = pc.to_module(runs[0][-1])
    codes = [net.encoder(images).chunk(2, dim=1)[0], pc.random.normal(pc.random.key(99), (8, 8))]
    rows = [images, *(net.decoder(code).sigmoid().view(8, 8, 8) for code in codes)]
    for row, (label, shown) in enumerate(zip(("test images", "reconstructed", "from noise"), rows, strict=True)):
        picture.text(8, 20 + 64 * row, label, "faint")
        for column, image in enumerate(shown.view(8, 8, 8)):
            picture.image(8 + 38.5 * column, 26 + 64 * row, 35, gray(image))
    return picture


def simclr(names: Names, runs: Runs) -> Picture:
    picture = Picture("Test images and the most similar ones of 100 others, before and after training")
    digits, rows = pc.data.load("digits"), 4
    for side, state in enumerate(runs[0]):
        left = 8 + 158 * side
        picture.text(left, 20, ("untrained", "trained")[side], "faint")
        images = torch.cat([digits.train_inputs[:100], digits.test_inputs[:rows]])
        known, found = torch.nn.functional.normalize(state.forward(images[:, None])[:, 0], dim=1).tensor_split([100])
        for row, nearest in enumerate((found @ known.T).topk(3).indices):
            top = 30 + 42 * row
            picture.image(left, top, 34, gray(digits.test_inputs[row, 0]))
            for column, index in enumerate(nearest.tolist()):
                x = left + 42 + 36 * column
                picture.image(x, top, 32, gray(digits.train_inputs[index, 0]))
                if digits.train_targets[index] != digits.test_targets[row]:
                    picture.curve(torch.tensor([[x, top + 34.0], [x + 32, top + 34]]), "one")
    return picture


def ddpm(names: Names, runs: Runs) -> Picture:
    picture = Picture("Points on two half circles, and samples of the trained network")
    data = torch.cat([names["half_circles"](seed, torch.float32) for seed in range(2)])
    samples = names["sampled"](pc.to_module(runs[0][-1], weights="ema"))
    for x, label, points, color in ((80, "data", data, "faint"), (240, "samples", samples, "three")):
        picture.text(x, 24, label, "faint", "middle")
        picture.dots(placed(points, (x, 110), 46, (0.5, 0.25)), color, 2.5)
    return picture


def wgan_gp(names: Names, runs: Runs) -> Picture:
    picture = Picture("Real points near eight places, and generated points before and after training")
    real, noise = names["ring"](0, torch.float32)[:, 0], pc.random.normal(pc.random.key(99), (300, 2))
    for x, label, state in zip((80, 240), ("untrained", "trained"), runs[0], strict=True):
        picture.text(x, 24, label, "faint", "middle")
        picture.dots(placed(real, (x, 112), 62), "faint", 5)
        picture.dots(placed(state.forward(["generator", noise]), (x, 112), 62), "one", 2)
    return picture


def maml(names: Names, runs: Runs) -> Picture:
    picture = Picture("Two new sine waves, predicted by the meta-trained weights, and after one gradient step")
    (x, y, _), _ = names["sine_waves"](pc.random.Rng(pc.random.key(99)), torch.float32, 2)
    places = torch.linspace(-5, 5, 60).view(1, -1, 1).expand(2, -1, -1)
    net: Any = pc.to_module(runs[0][-1])
    adapted, first = net(x, y, places), net.net(places)
    for task, center in enumerate(((80, 112), (240, 112))):
        for values, color, dashes in ((first, "faint", "3 4"), (adapted, "three", "none")):
            picture.curve(placed(torch.cat([places, values], -1)[task], center, 14), color, dashes)
        picture.dots(placed(torch.cat([x, y], -1)[task], center, 14), "one", 6)
    for x_of, label, color in ((8, "known points", "one"), (106, "before", "faint"), (202, "after one step", "three")):
        picture.text(x_of, 24, label, color)
    return picture


def lora(names: Names, runs: Runs) -> Picture:
    picture = Picture("What the base network and the adapted one write after three numbers")
    (_, base), (_, adapted) = runs
    prompt, length = torch.tensor([[4, 7, 10]]), 8
    for row, (label, state) in enumerate((("base network", base), ("with the adapters", adapted))):
        tokens, net = prompt, pc.to_module(state).eval()
        while tokens.shape[1] < length:
            tokens = torch.cat([tokens, net(input_ids=tokens).logits[:, -1:].argmax(-1)], 1)
        picture.text(8, 44 + 80 * row, label, "faint")
        for i, token in enumerate(tokens[0].tolist()):
            picture.box(8 + 38.5 * i, 54 + 80 * row, 34, 30, "box" if i < prompt.shape[1] else ("four", "two")[row])
            kind = "ink" if i < prompt.shape[1] else "on"
            picture.text(25 + 38.5 * i, 74 + 80 * row, str(token), kind, "middle")
    return picture


def graphs(names: Names, runs: Runs) -> Picture:
    picture = Picture("Predicted energies of new graphs against true ones, before and after training")
    batch = names["graphs"](99, torch.float32)
    for x, label, state in zip((84, 244), ("untrained", "trained"), runs[0], strict=True):
        picture.text(x, 24, label, "faint", "middle")
        picture.curve(placed(torch.tensor([[-1.0, -1], [1, 1]]), (x, 108), 66), "box")
        points = torch.cat([batch["energy"], pc.to_module(state)(batch)], 1)
        picture.dots(placed(points, (x, 108), 66), "three", 4)
        picture.text(x, 192, "true energy", "faint", "middle")
    picture.elements.append(
        '<text transform="translate(14 108) rotate(-90)" class="faint" text-anchor="middle">predicted</text>'
    )
    return picture


def translation(names: Names, runs: Runs) -> Picture:
    picture = Picture("Words, and how the untrained and the trained network reverse them")
    words = names["words"](99)["word"][:5]
    columns = [words, *(names["translated"](state, words) for state in runs[0])]
    for x, label, column in zip((10, 110, 216), ("word", "untrained", "trained"), columns, strict=True):
        picture.text(x, 28, label, "faint")
        for row, ids in enumerate(column.tolist()):
            text = "".join(chr(ord("a") + i - 3) if i > 2 else "" for i in ids[: (*ids, 2).index(2)])
            is_right = text == _letters(words[row])[::-1]
            picture.text(x, 60 + 29 * row, text or "-", "event" if x == 10 else ("one", "two")[is_right])
    return picture


def _letters(word: Tensor) -> str:
    return "".join(chr(ord("a") + i - 3) for i in word.tolist() if i > 2)


def segmentation(names: Names, runs: Runs) -> Picture:
    picture = Picture("Images with noise, their masks, and the masks that the trained network predicts")
    images, masks = names["scenes"](99, torch.float32, number=4)
    rows = [gray(images[:, 0]), CLASSES[masks.clamp(max=3)], CLASSES[runs[0][-1].forward(images).argmax(1)]]
    for row, (label, shown) in enumerate(zip(("image", "mask", "predicted"), rows, strict=True)):
        picture.text(8, 40 + 62 * row, label, "faint")
        for column, image in enumerate(shown):
            picture.image(80 + 60 * column, 8 + 62 * row, 56, image)
    return picture


def ppo(names: Names, runs: Runs) -> Picture:
    picture = Picture("Mean number of steps until a pole falls, over the rollouts of training")
    step, start, batches = names["make"]()
    lengths = [batches.fn.length.item() for _ in pc.training(step, start, batches, duration=names["duration"])]
    _chart(picture, {"steps per fall": lengths[:-1]}, ["three"], "rollout")  # the last state comes twice
    return picture


def _chart(
    picture: Picture, series: dict[str, Sequence[float]], colors: Sequence[str], x_label: str, every: int = 1
) -> None:
    """Draw series over time, with the least and the greatest value of all."""
    highest = max(map(max, series.values()))
    left, right, top, bottom = 46, WIDTH - 12, 40, HEIGHT - 26
    for y, value in ((top, highest), (bottom, 0)):
        picture.line(left, y, right, y)
        picture.text(left - 6, y + 4, f"{value:.3g}" if value < 100 else f"{value:.0f}", "faint", "end")
    length = len(next(iter(series.values())))
    picture.text(left, HEIGHT - 8, f"{x_label} {every}", "faint")
    picture.text(right, HEIGHT - 8, f"{length * every}", "faint", "end")
    for (label, values), color, x in zip(series.items(), colors, (left, 180), strict=False):
        heights = bottom - (bottom - top) * torch.tensor(values) / highest
        picture.curve(torch.stack([torch.linspace(left, right, length), heights], 1), color)
        picture.text(x, 26, label, color)


def distillation(names: Names, runs: Runs) -> Picture:
    picture = Picture(
        "Accuracy of the teacher, of a student of noisy labels, and of a student that has a teacher as well"
    )
    x, y = names["points"](99, torch.float32, number=2000)
    teacher, *students = [run[-1].forward(x) for run in runs]
    rows = zip(
        ("teacher", "student of labels", "student of both"), (teacher, *(one[0] for one in students)), strict=True
    )
    for row, (label, outputs) in enumerate(rows):
        accuracy, top = (outputs.argmax(1) == y).float().mean().item(), 16 + 60 * row
        picture.text(8, top + 14, label, "faint")
        picture.box(8, top + 22, 240, 22)
        picture.box(8, top + 22, 240 * accuracy, 22, ("faint", "one", "two")[row])
        picture.text(258, top + 38, f"{accuracy:.1%}")
    return picture


def pcgrad(names: Names, runs: Runs) -> Picture:
    picture = Picture("Loss of each task on new points, over training")
    step, start, batches = names["make"]()
    (inputs, targets), every = names["points"](99, torch.float32, 1000), 20
    states = pc.training(step, start, batches, duration=names["duration"])
    losses = [
        (one.forward(inputs) - targets).square().mean(0) for i, one in enumerate(states) if i % every == every - 1
    ]
    first, second = torch.stack(losses).T.tolist()
    _chart(picture, {"first task": first, "second task": second}, ["one", "three"], "step", every)
    return picture


PICTURES: dict[str, Callable[[Names, Runs], Picture]] = {
    picture.__name__: picture
    for picture in (
        vae,
        simclr,
        ddpm,
        wgan_gp,
        maml,
        lora,
        graphs,
        translation,
        segmentation,
        ppo,
        distillation,
        pcgrad,
    )
}


def run(name: str, *, is_short: bool) -> tuple[str, Names, Runs]:
    """Run a program; return what it prints, its names, and the states of its runs."""
    path, runs, fit = ROOT / "examples" / f"{name}.py", [], pc.fit
    ((short, full),) = re.findall(r'main\("(\w+)" if .* else "(\w+)"\)', path.read_text())

    def recorded(step: pc.Step, state: pc.State, *args: Any, **settings: Any) -> pc.State:
        runs.append((state, fit(step, state, *args, **settings)))
        return runs[-1][1]

    names = runpy.run_path(str(path)) | {"duration": short if is_short else full}
    with mock.patch.object(pc, "fit", recorded), redirect_stdout(io.StringIO()) as printed:
        names["main"](names["duration"])
    return printed.getvalue(), names, runs


def main() -> None:
    """Run the programs that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PICTURES))
    parser.add_argument("--short", action="store_true", help="run the programs in their short form")
    parser.add_argument("--folder", type=pathlib.Path, help="folder of the pictures, and leave the pages as they are")
    args = parser.parse_args()
    for name in args.names or PICTURES:
        printed, names, runs = run(name, is_short=args.short)
        with torch.no_grad():
            drawn = PICTURES[name](names, runs).svg()
        ((args.folder or FOLDER) / f"gallery_{name}.svg").write_text(drawn)
        block = f"```text\n$ python examples/{name}.py{' --short' * args.short}\n{printed}```"
        print(block, flush=True)
        if not args.folder:
            page = ROOT / "docs" / "gallery" / f"{name}.md"
            before, _, rest = page.read_text().partition("```text\n")
            page.write_text(before + block + rest.partition("```")[2])


if __name__ == "__main__":
    main()
