# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Styles as an XML parser reads them."""

import os
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infsa_seg.raster import write_qml

ODD = ['<a href="x">&amp;</a>', 'it\'s "so"', 'Wälder 森', 'a\tb\nc\rd', '']
PALETTE = [(0, 0, 0), (255, 255, 255), (1, 2, 3), (16, 160, 255), (9, 99, 0)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / 'deep' / 'a.qml'


def entries(path):
    """(value, label, color, alpha) of a style that is as QGIS has them."""
    root = ElementTree.parse(path).getroot()
    assert root.tag == 'qgis' and root.get('version').startswith('3.')
    (renderer,) = root.findall('pipe/rasterrenderer')
    assert (renderer.get('type'), renderer.get('band')) == ('paletted', '1')
    assert renderer.get('nodataColor') == ''
    return [
        tuple(entry.get(key) for key in ('value', 'label', 'color', 'alpha'))
        for entry in renderer.findall('colorPalette/paletteEntry')
    ]


def test_names_colours_and_nodata(path):
    write_qml(path, ODD, np.array(PALETTE, np.uint8), 255)
    colours = ['#000000', '#ffffff', '#010203', '#10a0ff', '#096300']
    assert entries(path) == [
        *((str(i), ODD[i], colours[i], '255') for i in range(5)),
        ('255', 'no data', '#000000', '0'),
    ]
    assert os.listdir(path.parent) == ['a.qml']


def test_without_nodata(path):
    write_qml(str(path), ['a'], [(1, 2, 3)])
    assert entries(path) == [('0', 'a', '#010203', '255')]


@settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.text(st.characters())))
def test_any_name(path, names):
    write_qml(path, names, [(7, 8, 9)] * len(names), overwrite=True)
    labels = [label for _, label, *_ in entries(path)]
    assert [len(label) for label in labels] == [len(name) for name in names]
    for label, name in zip(labels, names, strict=True):
        for shown, meant in zip(label, name, strict=True):
            assert shown == meant or (
                shown == '\ufffd'
                and (meant < ' ' or '\ud800' <= meant <= '\uffff')
            )


def test_control_characters(path):
    write_qml(path, ['a\x00b\x0b\ud800\uffff'], [(0, 0, 0)])
    assert entries(path)[0][1] == 'a\ufffdb\ufffd\ufffd\ufffd'


@pytest.mark.parametrize(
    ('names', 'palette', 'nodata', 'problem'),
    [
        (['a'], PALETTE, None, '1 classes cannot have 5 colours'),
        (ODD, PALETTE, 4, 'nodata=4 is a class'),
        (['a'], [(0, 256, 0)], None, r'\(0, 256, 0\) is no colour'),
        (['a'], [(0, 5)], None, r'\(0, 5\) is no colour'),
    ],
)
def test_what_does_not_fit(path, names, palette, nodata, problem):
    with pytest.raises(ValueError, match=rf'a\.qml: {problem}'):
        write_qml(path, names, palette, nodata)
    assert not path.parent.exists()


def test_an_existing_file_is_kept_unless_told(path):
    path.parent.mkdir()
    path.write_text('as it was')
    with pytest.raises(FileExistsError):
        write_qml(path, ['a'], [(1, 2, 3)])
    assert path.read_text() == 'as it was'
    write_qml(path, ['a'], [(1, 2, 3)], overwrite=True)
    assert len(entries(path)) == 1


def test_an_interruption_leaves_no_trace(path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(ElementTree.ElementTree, 'write', interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_qml(path, ['a'], [(1, 2, 3)])
    assert not os.listdir(path.parent)
