# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""At which resolution a raster is read, and what is refused."""

import numpy as np
import pytest

from infsa_seg.apis.large.resolution import at_resolution, parse_resolution
from infsa_seg.raster import Georeference, RasterMeta, Window


@pytest.mark.parametrize(
    ('text', 'size'),
    [
        *(('0.5um', 0.5), ('0.5 µm', 0.5), ('.25um', 0.25), ('250nm', 0.25)),
        *(('30cm', 3e5), ('10 m', 1e7), ('1.5M', 1.5e6), ('2mm', 2000)),
    ],
)
def test_parse_resolution(text, size):
    assert parse_resolution(text) == pytest.approx(size)


@pytest.mark.parametrize('text', ['', '0.5', 'um', '-1um', '0cm', '1px', '1e'])
def test_no_resolution(text):
    with pytest.raises(ValueError, match='is no size of a pixel'):
        parse_resolution(text)


class Slide:
    """A reader of which only the form matters."""

    def __init__(self, mpp=(0.25, 0.25), **meta):
        sizes = ((1000, 800), (500, 400), (125, 100))
        self.meta = RasterMeta(
            *(1000, 800, 3, np.dtype(np.uint8)),
            level_sizes=sizes,
            mpp=mpp,
            **meta,
        )

    def read(self, window, level=0):
        return np.full((window.height, window.width, 3), level, np.uint8)

    def read_valid(self, window, level=0):
        return None


@pytest.mark.parametrize(
    ('res', 'size', 'level'),
    [
        # Within two hundredths a level is taken as it is.
        *(('0.25um', (1000, 800), 0), ('0.246um', (1000, 800), 0)),
        *(('0.5um', (500, 400), 1), ('0.505um', (500, 400), 1)),
        *(('0.4um', (625, 500), 0), ('1um', (250, 200), 1)),
        *(('2um', (125, 100), 2), ('1mm', (1, 1), 2)),
    ],
)
def test_resolution(res, size, level):
    reader, notes = at_resolution(Slide(), res, None, None)
    assert (reader.meta.height, reader.meta.width) == size
    assert reader.read(Window(0, 0, 1, 1)).max() == level
    assert not notes


def test_level_and_stated_resolution():
    reader, _ = at_resolution(Slide(), None, 1, None)
    assert (reader.meta.height, reader.meta.mpp) == (500, (0.5, 0.5))
    reader, _ = at_resolution(Slide(None), '1um', None, 0.5)
    assert (reader.meta.height, reader.meta.mpp) == (500, (1.0, 1.0))
    # What the file says does not count then.
    reader, _ = at_resolution(Slide(), None, None, 2.0)
    assert (reader.meta.height, reader.meta.mpp) == (1000, (2.0, 2.0))
    # Pixels need not be square.
    reader, _ = at_resolution(Slide((0.5, 0.25)), '1um', None, None)
    assert (reader.meta.height, reader.meta.width) == (500, 200)


@pytest.mark.parametrize(
    ('reader', 'options', 'words'),
    [
        (Slide(None), ('1um', None, None), 'state it with --mpp-override'),
        (Slide(), ('0.2um', None, None), 'has 0.25um per pixel, --res 0.2um'),
        (Slide((3e5, 3e5)), ('1cm', None, None), 'has 30cm per pixel'),
        (Slide(), (None, 3, None), 'has no level 3, but 0 to 2'),
        (Slide(), (None, -1, None), 'has no level -1'),
    ],
)
def test_what_is_refused(reader, options, words):
    with pytest.raises(ValueError, match=words):
        at_resolution(reader, *options)


def test_sizes_that_no_scanner_has():
    for reader, options, is_odd in (
        (Slide((352.8, 352.8)), ('1mm', None, None), True),
        (Slide((0.01, 0.01)), ('1um', None, None), True),
        (Slide(), (None, None, 30.0), True),
        (Slide((352.8, 352.8)), (None, None, None), False),
        (Slide((20, 20)), ('1mm', None, None), False),
        (
            Slide((1e7, 1e7), georeference=Georeference('x')),
            ('30m', None, None),
            False,
        ),
    ):
        assert bool(at_resolution(reader, *options)[1]) is is_odd
