# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from hypothesis import given

from infsa_seg.raster import Window

from .strategies import HEIGHT, WIDTH, windows

PIXELS = np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH)


def marked(window):
    mask = np.zeros((HEIGHT, WIDTH), bool)
    mask[window.slices] = True
    return mask


@given(windows(), windows())
def test_intersect_is_what_both_cover(a, b):
    both = a.intersect(b)
    assert np.array_equal(marked(both), marked(a) & marked(b))
    assert both.height * both.width == marked(both).sum()
    assert both == b.intersect(a) or 0 in both[2:]


@given(windows(), windows())
def test_within_takes_the_same_pixels(a, b):
    both = a.intersect(b)
    if both.height and both.width:
        part = PIXELS[a.slices][both.within(a)]
        assert np.array_equal(part, PIXELS[both.slices])


@pytest.mark.parametrize(
    ('window', 'clipped'),
    [
        (Window(-3, -4, 10, 10), Window(0, 0, 7, 6)),
        (Window(15, 2, 10, 3), Window(15, 2, 5, 3)),
        (Window(3, 2, 5, 90), Window(3, 2, 5, 28)),
        (Window(3, 2, 5, 3), Window(3, 2, 5, 3)),
    ],
)
def test_clip(window, clipped):
    assert window.clip(20, 30) == clipped
