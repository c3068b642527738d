# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import pytest
from mmengine.registry import DefaultScope

# Its repairs must come before the tests import `mmseg.models`.
import infsa_seg  # noqa: F401


@pytest.fixture(autouse=True)
def scope():
    """Find mmsegmentation's transforms, as every run does."""
    with DefaultScope.overwrite_default_scope('mmseg'):
        yield
