# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import pytest
from mmengine.registry import DefaultScope


@pytest.fixture(autouse=True)
def scope():
    """Find mmsegmentation's transforms, as every run does."""
    with DefaultScope.overwrite_default_scope('mmseg'):
        yield
