# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Linear-time InfSA segmentation of very large images, on mmsegmentation.

``import infsa_seg`` registers every model, dataset and transform with
mmsegmentation's own registries; configs need nothing else.
"""

from . import compat
from .version import __version__

# The repairs must be in place before anything imports `mmseg.models`.
compat.apply()

from . import datasets, engine, models  # noqa: E402
from .layers.convert import convert  # noqa: E402

__all__ = ['__version__', 'convert', 'datasets', 'engine', 'models']
