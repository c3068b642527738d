# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Windows, and pictures to read them from."""

import numpy as np
from hypothesis import strategies as st

from infsa_seg.raster import Window

HEIGHT, WIDTH = 75, 110


@st.composite
def windows(draw, height=HEIGHT, width=WIDTH):
    """A window within a picture of this size."""
    row = draw(st.integers(0, height - 1))
    col = draw(st.integers(0, width - 1))
    return Window(
        row,
        col,
        draw(st.integers(1, height - row)),
        draw(st.integers(1, width - col)),
    )


def noise(*shape, dtype=np.uint8):
    """Values of any type that compress a little."""
    values = np.random.default_rng(7).integers(0, 200, shape)
    return values.astype(dtype)


def whole(reader):
    """The window of everything."""
    return Window(0, 0, reader.meta.height, reader.meta.width)
