# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""What is wrong with a file is one line; nothing is left behind."""

import io
import os
import re
import struct
import tempfile
import zlib
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from infsa_seg.apis import infer_large, infer_large_image, init_model
from infsa_seg.apis.errors import one_line

rasterio = pytest.importorskip('rasterio')

REPO = Path(__file__).parents[2]
SHARED = REPO.parent / 'shared' / 'data'
needs_shared = pytest.mark.skipif(
    not SHARED.exists(), reason='the shared data are not there'
)
RNG = np.random.default_rng(0)
NOISE = RNG.integers(0, 255, (96, 96, 3)).astype(np.uint8)


def picture(kind, **options):
    """The bytes of a picture."""
    buffer = io.BytesIO()
    Image.fromarray(NOISE).save(buffer, kind, **options)
    return buffer.getvalue()


def tiff(pixels=NOISE, **options):
    """The bytes of a TIFF."""
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, pixels, **options)
    return buffer.getvalue()


def npy(array, **options):
    """The bytes of a NumPy file."""
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


def jp2():
    """The bytes of a JPEG 2000."""
    with rasterio.MemoryFile() as memory:
        with memory.open(
            driver='JP2OpenJPEG', height=96, width=96, count=3, dtype='uint8'
        ) as dataset:
            dataset.write(np.moveaxis(NOISE, 2, 0))
        return memory.read()


def half(content):
    """The first half of a file."""
    return content[: len(content) // 2]


def with_tag(content, tag, value):
    """A little-endian TIFF, a tag of one value changed in its first page."""
    content = bytearray(content)
    (start,) = struct.unpack_from('<I', content, 4)
    (count,) = struct.unpack_from('<H', content, start)
    for entry in range(start + 2, start + 2 + 12 * count, 12):
        if struct.unpack_from('<H', content, entry)[0] == tag:
            struct.pack_into('<HHII', content, entry, tag, 4, 1, value)
            return bytes(content)
    raise AssertionError(tag)


def png_of_size(width, height):
    """A PNG that claims to be so large."""
    header = struct.pack('>IIBBBBB', width, height, 8, 2, 0, 0, 0)
    chunk = b'IHDR' + header
    return (
        b'\x89PNG\r\n\x1a\n'
        + struct.pack('>I', len(header))
        + chunk
        + struct.pack('>I', zlib.crc32(chunk))
        + picture('png')[33:]
    )


VRT = """<VRTDataset rasterXSize="9" rasterYSize="9">
<VRTRasterBand dataType="Byte" band="1"><SimpleSource>
<SourceFilename relativeToVRT="1">nowhere.tif</SourceFilename>
<SourceBand>1</SourceBand></SimpleSource></VRTRasterBand></VRTDataset>"""
PAGE = b'<!DOCTYPE html><html><body>404 Not Found</body></html>'
POINTER = b'version 1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1\n'

# Names, contents, and words of the line.
BAD = {
    'empty.tif': (b'', 'is empty'),
    'empty.svs': (b'', 'is empty'),
    'half.tif': (half(tiff(tile=(32, 32))), 'damaged or cut off'),
    'half-strips.tif': (half(tiff()), 'damaged or cut off'),
    'half-lzw.tif': (half(tiff(compression='zlib')), 'damaged or cut off'),
    'half-big.tif': (half(tiff(bigtiff=True)), 'damaged or cut off'),
    'header-only.tif': (tiff()[:8], 'damaged or cut off'),
    'magic-only.tif': (b'II*\0', 'damaged or cut off'),
    'half.png': (half(picture('png')), 'damaged|cut off|decode'),
    'half.jpg': (half(picture('jpeg')), 'damaged|cut off|decode'),
    'half.bmp': (half(picture('bmp')), 'damaged|cut off|decode'),
    'half.webp': (half(picture('webp')), 'damaged|cut off|decode'),
    'half.jp2': (half(jp2()), 'cannot be read|damaged'),
    'half.npy': (half(npy(NOISE)), 'damaged|cut off'),
    'text.tif': (b'not a picture at all\n' * 9, 'not|no '),
    'text.png': (b'not a picture at all\n' * 9, 'not|no '),
    'text.npy': (b'not a picture at all\n' * 9, 'not|no '),
    'text.svs': (b'not a picture at all\n' * 9, 'not|no '),
    'text.jp2': (b'not a picture at all\n' * 9, 'not|no '),
    'page.tif': (PAGE, 'not|no '),
    'pointer.tif': (POINTER, 'not|no '),
    'zeros.tif': (bytes(4096), 'not|no '),
    'archive.tif': (zlib.compress(tiff()), 'not|no '),
    'nowhere.vrt': (VRT.encode(), 'nowhere.tif|cannot be read'),
    'broken.vrt': (VRT.encode()[:150], 'cannot be read'),
    'slide.mrxs': (b'MRXS\0\0', 'not|no '),
    'garbage.dcm': (bytes(128) + b'DICM' + bytes(99), 'DICOM|not|no '),
    'objects.npy': (
        npy(np.array([{}, None]), allow_pickle=True),
        'type|object|numbers',
    ),
    'complex.npy': (npy(np.ones((9, 9), complex)), 'complex|type'),
    'video.npy': (npy(np.ones((2, 9, 9, 3))), 'shape|axes|dimension'),
    'line.npy': (npy(np.ones(9)), 'shape|axes|dimension'),
    'nothing.npy': (npy(np.ones((0, 9, 3))), 'empty|shape|no pixels'),
    'two.npy': (npy(np.ones((9, 9, 2))), 'has 2 channels, but the model'),
    'five.tif': (
        tiff(np.ones((5, 32, 32), np.uint8), planarconfig='separate'),
        'stack|has 5 channels',
    ),
    'four.tif': (
        tiff(
            np.ones((32, 32, 4), np.uint16),
            photometric='rgb',
            extrasamples=['unspecified'],
        ),
        'has 4 channels, but the model takes 3',
    ),
    'stack.tif': (tiff(np.ones((7, 32, 32), np.uint8)), 'stack'),
    'complex.tif': (tiff(np.ones((32, 32), np.complex64)), 'bits|complex'),
    'wide.tif': (with_tag(tiff(), 256, 2**31 - 1), 'damaged or cut off'),
    'high.tif': (with_tag(tiff(), 257, 2**31 - 1), 'damaged or cut off'),
    'far.tif': (with_tag(tiff(), 273, 2**31 - 1), 'damaged or cut off'),
    'flat.tif': (with_tag(tiff(), 257, 0), 'damaged|empty'),
    'huge.png': (png_of_size(2**30, 2**30), 'damaged|large|decode'),
}


def test_every_bad_file_is_one_line(tool, project, trained, tmp_path):
    """All in one run, which also segments what is good."""
    folder = tmp_path / 'in'
    folder.mkdir()
    for name, (content, _) in BAD.items():
        (folder / name).write_bytes(content)
    (folder / 'good.jpg').write_bytes(picture('png'))
    (folder / 'folder.tif').mkdir()
    (folder / 'gone.tif').symlink_to('nowhere.tif')
    bad = {name: words for name, (_, words) in BAD.items()}
    bad['folder.tif'] = 'has no file|directory'
    bad['gone.tif'] = 'No such file'
    bad['missing.tif'] = 'No such file'
    assert len(bad) >= 40
    del bad['folder.tif']  # stands for what is in it
    found = tool(
        *('infer_large.py', project / 'tiny.py', trained / 'iter_30.pth'),
        *(*(folder / name for name in bad), folder / 'good.jpg'),
        *('--out', tmp_path / 'out'),
    )
    assert found.status == 1, found.err
    assert 'Traceback' not in found.err
    lines = [
        line
        for line in found.err.splitlines()
        if line.startswith('infer_large.py: failed: ')
    ]
    reasons = {}
    for line in lines:
        path, _, reason = line.removeprefix(
            'infer_large.py: failed: '
        ).partition(': ')
        reasons[Path(path).name] = reason
    assert sorted(reasons) == sorted(bad)
    wrong = {
        name: reasons[name]
        for name, words in bad.items()
        if not re.search(words, reasons[name]) or len(reasons[name]) > 300
    }
    assert not wrong
    assert [p.name for p in (tmp_path / 'out').iterdir()] == ['good_mask.tif']


@pytest.mark.parametrize(
    ('out', 'words'),
    [
        ('here.tif', 'exists; use --overwrite'),
        ('folder.tif', 'directory'),
        ('file/out', 'Not a directory|exists'),
        ('file/out.tif', 'Not a directory|exists'),
        ('new/folder/out.tif', None),
    ],
)
def test_where_the_result_cannot_go(project, trained, out, words, tmp_path):
    (tmp_path / 'a.png').write_bytes(picture('png'))
    (tmp_path / 'here.tif').write_bytes(b'mine')
    (tmp_path / 'file').write_bytes(b'mine')
    (tmp_path / 'folder.tif').mkdir()
    before = sorted(str(p) for p in tmp_path.rglob('*'))
    result = infer_large(
        project / 'tiny.py',
        str(trained / 'iter_30.pth'),
        [str(tmp_path / 'a.png')],
        tmp_path / out,
        say=lambda line: None,
    )
    if words is None:
        assert not result.failures and (tmp_path / out).exists()
        return
    (reason,) = result.failures.values()
    assert '\n' not in reason
    assert re.search(words, reason), reason
    assert sorted(str(p) for p in tmp_path.rglob('*')) == before
    assert (tmp_path / 'here.tif').read_bytes() == b'mine'


@contextmanager
def without_rights():
    """Root may do anything; be somebody else meanwhile."""
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if was_root:
            os.seteuid(0)


def test_what_may_not_be_read_or_written(project, trained):
    """One line, and what is there stays as it is."""
    model = init_model(project / 'tiny.py', trained / 'iter_30.pth')
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        (folder / 'a.png').write_bytes(picture('png'))
        (folder / 'secret.png').write_bytes(picture('png'))
        (folder / 'secret.png').chmod(0)
        (folder / 'closed').mkdir(mode=0o555)
        # What is imported on use may lie where only root can read.
        infer_large_image(model, folder / 'a.png', folder / 'a.tif')
        before = sorted(folder.rglob('*'))
        for source, out, named in (
            ('secret.png', 'out', 'secret.png'),
            ('a.png', 'closed/b.tif', 'b.tif'),
        ):
            with without_rights(), pytest.raises(OSError) as caught:
                infer_large_image(model, folder / source, folder / out)
            reason = one_line(caught.value)
            assert 'Permission denied' in reason and '\n' not in reason
            assert named in reason
        assert sorted(folder.rglob('*')) == before


# What each of the shared files must give: its channels as they are, those to
# choose, or words of the line.
GIVEN = {
    'raster/389225main_sw_1965_1024.jpg': None,
    'raster/RGB.byte.rpc.vrt': None,
    'raster/RGB.byte.tif': None,
    'raster/RGBA.uint16.tif': None,
    'raster/all-nodata.tif': [3, 2, 1],
    'raster/alpha.tif': None,
    'raster/cogeo.tif': None,
    'raster/float_nan.tif': None,
    'raster/float_raster_with_nodata.tif': None,
    'raster/rgb_deflate.tif': None,
    'raster/rotated.tif': None,
    'raster/spacenet_uint16_gray.tif': None,
    'wsi/boxes.tiff': None,
    'wsi/he_1000.png': None,
    'wsi/small.svs': None,
    'raster/corrupt.tif': 'is damaged or cut off',
    'wsi/unreadable.svs': 'level 0 is damaged',
}


def rpcs_of(dataset):
    """Coefficients as they are, however many digits are written."""
    return {
        name: [f'{float(part):.12g}' for part in text.split()]
        for name, text in dataset.tags(ns='RPC').items()
    }


@needs_shared
def test_the_table_is_complete():
    files = {
        f'{path.parent.name}/{path.name}'
        for folder in ('raster', 'wsi')
        for path in (SHARED / folder).iterdir()
        if path.suffix != '.md'
    }
    assert files == set(GIVEN)


@needs_shared
@pytest.mark.parametrize('name', GIVEN)
def test_shared_files(name, project, trained, tmp_path):
    """Size and coordinates of the source, or a line and nothing else."""
    expected, source = GIVEN[name], SHARED / name
    result = infer_large(
        project / 'tiny.py',
        str(trained / 'iter_30.pth'),
        [str(source)],
        tmp_path / 'out',
        say=lambda line: None,
        warn=lambda line: None,
        channels=expected if isinstance(expected, list) else None,
    )
    if isinstance(expected, str):
        (reason,) = result.failures.values()
        assert expected in reason and '\n' not in reason
        assert not list(tmp_path.rglob('*.*'))
        return
    assert not result.failures
    mask = tmp_path / 'out' / f'{source.stem}_mask.tif'
    with rasterio.open(source) as before, rasterio.open(mask) as after:
        assert after.shape == before.shape
        assert after.crs == before.crs
        assert after.transform == before.transform
        assert after.gcps[0] == before.gcps[0]
        assert rpcs_of(after) == rpcs_of(before)
        assert after.nodata == 255
        classes = after.read(1)
        hidden = before.dataset_mask() == 0
    if name != 'wsi/small.svs':  # GDAL does not know about its background
        assert np.array_equal(classes == 255, hidden)
    assert (classes[classes != 255] < 3).all()
