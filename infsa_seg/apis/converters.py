# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Published data sets in the folders that our datasets read."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from infsa_seg.raster import GeoTiffWriter, RasterReader, Window, open_raster

from .progress import progress

IGNORED = 255
# Of a mask that are held at once, beside the row of blocks of its reader.
_STRIP_PIXELS = 2**22

Colour = tuple[int, int, int]


class Pair(NamedTuple):
    """An image and its mask.

    Args:
        split: ``'train'``, ``'val'`` or ``'test'``.
        name: What both are called, without a suffix.
        image: The file.
        mask: The file; None where the labels are not published.
    """

    split: str
    name: str
    image: Path
    mask: Path | None


@dataclass(frozen=True)
class Values:
    """Masks of one channel.

    Args:
        indices (dict[int, int]): The class index of each value, 255 to
            ignore it.
    """

    indices: dict[int, int]
    channels = 1

    def translate(
        self, pixels: np.ndarray, path: Path
    ) -> tuple[np.ndarray, int]:
        """Class indices of values (H, W, 1), uint8 (H, W); and 0.

        Raises:
            ValueError: There are other values.
        """
        out = np.full(pixels.shape[:2], IGNORED, np.uint8)
        known = np.zeros(pixels.shape[:2], bool)
        for value, index in self.indices.items():
            here = pixels[..., 0] == value
            out[here] = index
            known |= here
        if not known.all():
            wrong = pixels[..., 0][~known].flat[0]
            raise ValueError(
                f'{path}: has the value {wrong}, not only '
                f'{sorted(self.indices)}; is it a mask of this data set?'
            )
        return out, 0


@dataclass(frozen=True)
class Colours:
    """Masks of red, green and blue; pixels of other colours are ignored.

    Args:
        palette (sequence): The colour of each class.
        ignored (Colour): One that is known to stand for no class.
        threshold (int, optional): Values from this on are read as 255,
            others as 0, for masks that were smoothed or compressed.
    """

    palette: Sequence[Colour]
    ignored: Colour = (0, 0, 0)
    threshold: int | None = None
    channels = 3

    def translate(
        self, pixels: np.ndarray, path: Path
    ) -> tuple[np.ndarray, int]:
        """Class indices of colours (H, W, 3), uint8 (H, W).

        And how many pixels have a colour that is not known.
        """
        if self.threshold is not None:
            pixels = (pixels >= self.threshold) * np.uint8(255)
        out = np.full(pixels.shape[:2], IGNORED, np.uint8)
        known = np.zeros(pixels.shape[:2], bool)
        colours = [(self.ignored, IGNORED)]
        colours += [(colour, i) for i, colour in enumerate(self.palette)]
        for colour, index in colours:
            here = (pixels == np.array(colour, np.uint8)).all(2)
            out[here] = index
            known |= here
        return out, int(known.size - np.count_nonzero(known))


@dataclass(frozen=True)
class Conversion:
    """Images and masks of a data set, put where ``LargeRasters`` finds them.

    Images go to ``img_dir/SPLIT``, masks of class indices to
    ``ann_dir/SPLIT/NAME.tif``: tiled, with the classes' names and colours,
    255 where no class is known, and the coordinates of the mask or else of
    its image.

    Args:
        out_dir (Path): Where the two folders belong.
        labels (Values | Colours): What the masks mean.
        classes (sequence[str]): Their names.
        palette (sequence): A colour for each.
        copy (bool): Copy the images instead of linking to them.
        overwrite (bool): Replace what is there.
    """

    out_dir: Path
    labels: Values | Colours
    classes: Sequence[str]
    palette: Sequence[Colour]
    copy: bool = False
    overwrite: bool = False

    def run(self, pairs: Sequence[Pair]) -> None:
        """Convert all, under a bar, and say on stdout what came of it.

        Raises:
            OSError: A file cannot be read or written, or is there already.
            ValueError: There are no images; two have one name; a mask does
                not fit its image, or is none of this data set.
        """
        self._check(pairs)
        for pair in progress(pairs, 'masks'):
            if pair.mask is not None:
                self._convert(pair, pair.mask)
            self._place(pair)
        counts = Counter(pair.split for pair in pairs)
        for split in sorted(counts):
            print(f'{self.out_dir}: {counts[split]} images for {split}')

    def _check(self, pairs: Sequence[Pair]) -> None:
        if not pairs:
            raise ValueError('no images were found; is the folder right?')
        seen: dict[tuple[str, str], Path] = {}
        for pair in pairs:
            other = seen.setdefault((pair.split, pair.name), pair.image)
            if other != pair.image:
                raise ValueError(
                    f'{pair.image}: {other} has the same name; rename one '
                    'with its mask'
                )

    def _convert(self, pair: Pair, path: Path) -> None:
        target = self.out_dir / 'ann_dir' / pair.split / f'{pair.name}.tif'
        indexed = isinstance(self.labels, Values)
        with (
            open_raster(path, indexed=indexed) as mask,
            open_raster(pair.image) as image,
        ):
            meta = mask.meta
            _check_mask(path, mask, pair.image, image, self.labels.channels)
            unknown = 0
            with GeoTiffWriter(
                target,
                meta.height,
                meta.width,
                palette=self.palette,
                class_names=self.classes,
                nodata=IGNORED,
                overwrite=self.overwrite,
                georeference=meta.georeference or image.meta.georeference,
            ) as writer:
                for window in strips_of_rows(mask):
                    indices, count = self.labels.translate(
                        mask.read(window), path
                    )
                    unknown += count
                    writer.write(window.row, indices)
                if unknown == meta.height * meta.width:
                    raise ValueError(
                        f'{path}: has no colour of this data set; is it a '
                        'mask?'
                    )
        if unknown:
            warn(
                f'{path}: {unknown} pixels have colours of no class, and are '
                'ignored'
            )

    def _place(self, pair: Pair) -> None:
        name = pair.name + pair.image.suffix.lower()
        target = self.out_dir / 'img_dir' / pair.split / name
        if target.exists() and not self.overwrite:
            raise FileExistsError(f'{target}: exists; use --overwrite')
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f'.{name}.{os.getpid()}.part')
        try:
            if self.copy:
                shutil.copyfile(pair.image, part)
            else:
                part.symlink_to(pair.image.resolve())
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)


def add_arguments(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the arguments that every converter has.

    Args:
        parser (ArgumentParser): Of the tool.
        default (str): Where the results go by default.
    """
    parser.add_argument(
        'dataset_path', type=Path, help='folder of the unpacked data set'
    )
    parser.add_argument(
        '-o',
        '--out-dir',
        type=Path,
        default=Path(default),
        metavar='DIR',
        help=f'where img_dir and ann_dir belong; {default} by default',
    )
    parser.add_argument(
        '--copy',
        action='store_true',
        help='copy the images instead of linking to them',
    )
    parser.add_argument(
        '--overwrite', action='store_true', help='replace files that exist'
    )


def find_folder(root: Path, names: Sequence[str]) -> Path:
    """The first of some folders that is there, in ``root`` or one below.

    Raises:
        FileNotFoundError: None is.
    """
    for parent in (root, *sorted(p for p in root.glob('*') if p.is_dir())):
        for name in names:
            if (parent / name).is_dir():
                return parent / name
    raise FileNotFoundError(
        f'{root}: has no folder {" or ".join(names)}; give the folder into '
        'which the data set was unpacked'
    )


def check_masks(pairs: Sequence[Pair], hint: str) -> None:
    """Make sure that the mask of every pair is there.

    Raises:
        FileNotFoundError: One is not; the text says where it should be, and
            ends with ``hint``.
    """
    lost = [p for p in pairs if p.mask is not None and not p.mask.is_file()]
    if lost:
        more = f' (and {len(lost) - 1} more)' if len(lost) > 1 else ''
        raise FileNotFoundError(
            f'{lost[0].image}: there is no mask {lost[0].mask}{more}; {hint}'
        )


def warn(text: str) -> None:
    """Say in one line what the user should know of."""
    name = Path(sys.argv[0]).name
    print(f'{name}: warning: {text}', file=sys.stderr, flush=True)


def strips_of_rows(reader: RasterReader) -> Iterator[Window]:
    """All rows of a raster, so many at once as decode each block once."""
    meta = reader.meta
    blocks = max(_STRIP_PIXELS // (meta.width * meta.block_rows), 1)
    rows = blocks * meta.block_rows
    for row in range(0, meta.height, rows):
        yield Window(row, 0, min(rows, meta.height - row), meta.width)


def _check_mask(
    path: Path,
    mask: RasterReader,
    image_path: Path,
    image: RasterReader,
    channels: int,
) -> None:
    have, want = mask.meta, image.meta
    if (have.height, have.width) != (want.height, want.width):
        raise ValueError(
            f'{path}: has {have.height}x{have.width} pixels, its image '
            f'{image_path} {want.height}x{want.width}; get both anew'
        )
    if have.channels != channels or have.dtype != np.uint8:
        raise ValueError(
            f'{path}: has {have.channels} channels of {have.dtype}, not '
            f'{channels} of uint8; is it a mask of this data set?'
        )
