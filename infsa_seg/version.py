# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""The version, readable by ``setup.py`` without importing the package."""

__version__ = '0.1.0'
