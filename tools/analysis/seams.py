# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What tiles do to an image: ``seams.py CONFIG CHECKPOINT INPUT --out DIR``.

It segments one image twice with the same weights: in tiles, by
mmsegmentation's own sliding window, and as a whole. It prints for both, in
markdown, the accuracy where labels are known, and the *seam ratio*: how often
the class changes between neighbouring pixels across a border of tiles,
divided by how often it does elsewhere. At 1 borders leave no trace. The whole
image is measured at the same lines, and shows what is due to the image and to
the network's own grid: where borders of tiles lie, its patches meet, and
classes change there more often (by a quarter in the demo), tiles or not.

``NAME_seams.png`` shows both class maps side by side, and below them how
often the class changes across the line before each column.

The sliding window keeps the logits of the whole image in memory, and adds to
all of them for each tile.
"""

import argparse
import math
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

try:
    import torch
    from PIL import Image, ImageDraw, ImageFont
    from rich.console import Console
    from rich.progress import Progress
    from torch import Tensor, nn

    from infsa_seg.apis import cli, infer_large_image, init_model
    from infsa_seg.apis.areas import count_areas, mean_iou
    from infsa_seg.apis.large import (
        RasterImage,
        Source,
        open_source,
        stem_of,
        valid_window,
    )
    from infsa_seg.engine import atomic_path
    from infsa_seg.ops import Rows
    from infsa_seg.raster import open_raster
except ImportError as error:  # not installed, or beside what cannot work
    sys.exit(f'seams.py: error: {error}')

# A class map holds this where the image is not valid.
UNKNOWN = -1

# Height and width of a class map in the picture, at most and about at least.
MAX_SIDE = 1500
MIN_SIDE = 500
INK, RULE, SEAM = '#3c3c3c', '#c8c8c8', '#d62728'


class Tiling(NamedTuple):
    """Tiles of one size, as ``slide_inference`` of mmsegmentation lays them.

    Where the stride does not reach the end of the image, the last tile is
    moved back to fit.
    """

    tile: int
    stride: int

    @property
    def cfg_options(self) -> dict[str, Any]:
        """What makes a model segment in such tiles."""
        return {
            'model.test_cfg.mode': 'slide',
            'model.test_cfg.crop_size': (self.tile, self.tile),
            'model.test_cfg.stride': (self.stride, self.stride),
        }

    def starts(self, size: int) -> list[int]:
        """The first pixel of each tile along a side of ``size`` pixels."""
        last = size - self.tile
        return [*range(0, last, self.stride), last]

    def borders(self, size: int) -> list[int]:
        """The pixels before which a tile begins or the one before has ended.

        The border of the image is none.
        """
        starts = self.starts(size)
        ends = [start + self.tile for start in starts]
        return sorted({*starts, *ends} - {0, size})

    def check(self, height: int, width: int, patch: int) -> None:
        """Raise a ValueError if this does not suit image and model."""
        if self.tile % patch:
            raise ValueError(
                f'--tile {self.tile}: is no multiple of the patch of {patch} '
                'pixels'
            )
        if self.stride > self.tile:
            raise ValueError(
                f'--stride {self.stride}: leaves gaps between tiles of '
                f'{self.tile} pixels'
            )
        if self.tile > min(height, width):
            raise ValueError(
                f'--tile {self.tile}: is larger than the image of '
                f'{height}x{width} pixels'
            )
        if self.tile == height == width:
            raise ValueError(
                f'--tile {self.tile}: covers the whole image, so that there '
                'are no borders'
            )


class Run(NamedTuple):
    """A class map, and what is measured of it.

    Attributes:
        name: whose it is.
        classes: int64 (height, width), UNKNOWN where the image is not valid.
        accuracy: of :func:`measure_accuracy`.
        rates: of :func:`change_rates`.
        seconds: what the class map took, with reading the image.
    """

    name: str
    classes: Tensor
    accuracy: tuple[float, float]
    rates: tuple[float, float]
    seconds: float

    @property
    def seam_ratio(self) -> float:
        """1 if borders leave no trace; NaN if nothing changes anywhere."""
        border, elsewhere = torch.tensor(self.rates)
        return (border / elsewhere).item()

    @property
    def title(self) -> str:
        """The name and what matters most."""
        parts = [f'seam ratio {number(self.seam_ratio)}']
        if not math.isnan(self.accuracy[0]):
            parts.insert(0, f'mIoU {number(self.accuracy[0])}')
        return f'{self.name}: {", ".join(parts)}'

    @property
    def cells(self) -> list[str]:
        """The row of the table."""
        values = (
            *self.accuracy,
            self.seam_ratio,
            *(100 * rate for rate in self.rates),
        )
        return [self.name, *map(number, values), f'{self.seconds:.1f}']


HEADER = [
    *('', 'mIoU', 'accuracy', 'seam ratio', '% at borders', '% elsewhere'),
    'seconds',
]


def line_changes(classes: Tensor) -> Tensor:
    """Count how often the class changes across each line between columns.

    Args:
        classes: (height, width), UNKNOWN where nothing counts.

    Returns:
        int64 (2, width): for the line before each column, the changes and the
        pairs of neighbours. Before the first column there are none.
    """
    left, right = classes[:, :-1], classes[:, 1:]
    known = (left != UNKNOWN) & (right != UNKNOWN)
    counts = torch.stack([((left != right) & known).sum(0), known.sum(0)])
    return nn.functional.pad(counts, (1, 0))


def change_rates(
    classes: Tensor, rows: Sequence[int], cols: Sequence[int]
) -> tuple[float, float]:
    """The share of neighbours that differ: across borders, and elsewhere.

    Args:
        classes: as for :func:`line_changes`.
        rows, cols: the borders, of :meth:`Tiling.borders`.
    """
    counts = torch.cat([line_changes(classes.mT), line_changes(classes)], 1)
    at_border = torch.zeros(counts.shape[1], dtype=torch.bool)
    at_border[[*rows, *(len(classes) + col for col in cols)]] = True
    border, elsewhere = (
        changes / pairs
        for changes, pairs in (
            counts[:, at_border].sum(1),
            counts[:, ~at_border].sum(1),
        )
    )
    return border.item(), elsewhere.item()


def measure_accuracy(
    classes: Tensor, labels: Tensor | None, num_classes: int
) -> tuple[float, float]:
    """Mean IoU of the classes that occur, and pixel accuracy, in percent.

    Args:
        classes: int64 (height, width), UNKNOWN where nothing counts.
        labels: of the same shape; those of no class are ignored. Without
            any, the accuracy is NaN.
        num_classes: how many there are.
    """
    if labels is None:
        return math.nan, math.nan
    return mean_iou(count_areas(classes, labels, num_classes))


def compare(model: nn.Module, source: Source, tiling: Tiling) -> list[Run]:
    """Segment the valid part of an image, in tiles and as a whole.

    Args:
        model: set up for the tiles.
        source: the image.
        tiling: the tiles.

    Raises:
        ValueError: the tiles do not suit the image or the model, or that
            cannot run in bands.
    """
    reader = source.reader
    window = valid_window(reader)
    if window is None:
        raise ValueError(f'{source.name}: has no valid pixel')
    size = (window.height, window.width)
    tiling.check(*size, getattr(model.backbone, 'patch_size', 1))
    # First, as its plan counts what the process has taken before.
    start = time.perf_counter()
    whole = segment_whole(model, source.name, window)
    middle = time.perf_counter()
    tiles = segment_tiles(model, RasterImage(reader, model, window), tiling)
    end = time.perf_counter()
    tiles[whole == UNKNOWN] = UNKNOWN

    labels = None
    if source.labels is not None:
        labels = torch.from_numpy(source.labels.read_labels(window)).long()

    num_classes = len(model.dataset_meta['classes'])
    borders = [tiling.borders(side) for side in size]
    return [
        Run(
            name,
            classes,
            measure_accuracy(classes, labels, num_classes),
            change_rates(classes, *borders),
            seconds,
        )
        for name, classes, seconds in (
            ('tiles', tiles, end - middle),
            ('whole image', whole, middle - start),
        )
    ]


def segment_whole(model: nn.Module, source: str, window: Any) -> Tensor:
    """The classes of a window, from the whole image."""
    with tempfile.TemporaryDirectory() as folder:
        result = infer_large_image(model, source, folder)
        with open_raster(result.written[0], indexed=True) as reader:
            mask = reader.read(window)[..., 0]
            valid = reader.read_valid(window)
    classes = torch.from_numpy(mask.astype('int64'))
    if valid is not None:
        classes[~torch.from_numpy(valid)] = UNKNOWN
    return classes


@torch.no_grad()
def segment_tiles(
    model: nn.Module, image: RasterImage, tiling: Tiling
) -> Tensor:
    """The classes of an image, by the model's own sliding window."""
    inputs = image.read(Rows(0, image.height), Rows(0, image.width))
    total = len(tiling.starts(image.height)) * len(tiling.starts(image.width))
    console = Console(stderr=True)
    with Progress(
        console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task('Tiles', total=total)
        handle = model.backbone.register_forward_hook(
            lambda *_: bar.advance(task)
        )
        try:
            (sample,) = model.predict(inputs)
        finally:
            handle.remove()
    return sample.pred_sem_seg.data[0].long().cpu()


def draw(
    path: Path, runs: Sequence[Run], palette: Any, borders: Sequence[int]
) -> None:
    """Write a PNG of the class maps, with their changes along the columns.

    Args:
        path: replaced only when the new file is complete.
        runs: what to show, from the left to the right.
        palette: one (red, green, blue) per class.
        borders: the columns before which a tile begins or has ended.
    """
    counts = [line_changes(run.classes) for run in runs]
    rates = [(changes / pairs).nan_to_num() for changes, pairs in counts]
    top = max(rate.max().item() for rate in rates) or 1.0
    panels = [
        draw_panel(run, palette, rate, top, borders)
        for run, rate in zip(runs, rates, strict=True)
    ]
    gap = panels[0].height // 40
    sheet = Image.new(
        'RGB',
        (
            sum(panel.width + gap for panel in panels) + gap,
            panels[0].height + 2 * gap,
        ),
        'white',
    )
    left = gap
    for panel in panels:
        sheet.paste(panel, (left, gap))
        left += panel.width + gap
    with atomic_path(path) as part:
        sheet.save(part, format='PNG')


def draw_panel(
    run: Run, palette: Any, rates: Tensor, top: float, borders: Sequence[int]
) -> Any:
    """A class map under its title and over its changes.

    Args:
        run: what to show.
        palette: one (red, green, blue) per class.
        rates: share of neighbours that differ, before each column.
        top: the rate at the upper end of the scale.
        borders: columns whose rate is marked.
    """
    longest = max(run.classes.shape)
    step = -(-longest // MAX_SIDE)
    zoom = max(MIN_SIDE // longest, 1)
    classes = run.classes[::step, ::step]
    classes = classes.repeat_interleave(zoom, 0).repeat_interleave(zoom, 1)
    # The last colour is that of UNKNOWN, -1.
    colours = torch.tensor([*palette, (0, 0, 0)], dtype=torch.uint8)
    picture = Image.fromarray(colours[classes].numpy())

    # What is left out of the map keeps its line here: the highest is shown.
    marks = torch.zeros_like(rates)
    marks[list(borders)] = 1
    bars, marks = (
        nn.functional.pad(x, (0, -len(x) % step))
        .view(-1, step)
        .amax(1)
        .repeat_interleave(zoom)
        for x in (rates, marks)
    )

    size = max(12, picture.width // 38)
    font, small = (ImageFont.load_default(x) for x in (size, size * 3 // 4))
    width = max(picture.width, int(font.getlength(run.title)))
    chart = 5 * size
    above = picture.height + 2 * size
    panel = Image.new('RGB', (width, above + 2 * size + chart), 'white')
    pen = ImageDraw.Draw(panel)
    pen.text((0, size // 2), run.title, INK, font, 'lm')
    panel.paste(picture, (0, size * 3 // 2))
    pen.text(
        (0, above + size // 2),
        f'class changes at each column, 0 to {top:.0%} (red: tile borders)',
        INK,
        small,
        'lm',
    )
    bottom = panel.height - 1
    tops = (bottom - (bars * (chart / top)).round()).tolist()
    for x, y in enumerate(tops):
        pen.line((x, bottom, x, y), RULE)
    for x in marks.nonzero()[:, 0].tolist():
        pen.line((x, bottom, x, tops[x]), SEAM, max(picture.width // 400, 1))
    pen.line((0, bottom, picture.width - 1, bottom), INK)
    return panel


def number(value: float) -> str:
    """Two decimals, a dash for NaN."""
    return '-' if math.isnan(value) else f'{value:.2f}'


def parse() -> argparse.Namespace:
    """The arguments."""
    parser = ArgumentParser(
        description='Segment an image in tiles and as a whole, and measure '
        'what the borders of the tiles do to it'
    )
    cli.add_config_arguments(parser)
    parser.add_argument('checkpoint', help='trained weights')
    parser.add_argument(
        'input',
        metavar='INPUT',
        help='a raster, or scene:SIZE[:NUMBER] for a synthetic scene',
    )
    parser.add_argument(
        '--out',
        required=True,
        type=Path,
        metavar='DIR',
        help='where NAME_seams.png goes',
    )
    parser.add_argument(
        '--tile',
        type=cli.positive,
        default=512,
        metavar='N',
        help='pixels of a side of a tile, defaults to 512',
    )
    parser.add_argument(
        '--stride',
        type=cli.positive,
        metavar='N',
        help='pixels from tile to tile; that of a tile by default, so that '
        'none overlap',
    )
    parser.add_argument(
        '--device',
        type=cli.device,
        default='cuda' if torch.cuda.is_available() else 'cpu',
        help='such as cuda:0; a GPU if there is',
    )
    args = parser.parse_args()
    args.stride = args.stride or args.tile
    return args


def main() -> None:
    """Read the arguments, compare, print a table in markdown, and draw."""
    args = parse()
    tiling = Tiling(args.tile, args.stride)
    model = init_model(
        args.config,
        args.checkpoint,
        str(args.device),
        {**(args.cfg_options or {}), **tiling.cfg_options},
    )
    stem = stem_of(model, args.input)
    with open_source(model, args.input) as source:
        runs = compare(model, source, tiling)
    for row in (HEADER, ['---'] * len(HEADER), *(run.cells for run in runs)):
        print(f'| {" | ".join(row)} |')
    path = args.out / f'{stem}_seams.png'
    draw(
        path,
        runs,
        model.dataset_meta['palette'],
        tiling.borders(runs[0].classes.shape[1]),
    )
    print(path)


if __name__ == '__main__':
    cli.run(main)
