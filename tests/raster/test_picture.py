# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import pickle
import struct
import zlib

import cv2
import numpy as np
import pytest
from hypothesis import given, settings

from infsa_seg.raster import Window, open_raster
from infsa_seg.raster.picture import PictureReader

from .strategies import HEIGHT, WIDTH, noise, whole, windows

LOSSLESS = {
    'grey.png': noise(HEIGHT, WIDTH),
    'rgb.png': noise(HEIGHT, WIDTH, 3),
    'rgba.png': noise(HEIGHT, WIDTH, 4),
    'grey16.png': noise(HEIGHT, WIDTH, dtype=np.uint16) * 300,
    'rgb16.png': noise(HEIGHT, WIDTH, 3, dtype=np.uint16) * 300,
    'rgb.bmp': noise(HEIGHT, WIDTH, 3),
}
LOSSY = {
    'grey.jpg': noise(HEIGHT, WIDTH),
    'rgb.jpg': noise(HEIGHT, WIDTH, 3),
    'rgb.webp': noise(HEIGHT, WIDTH, 3),
}


def bgr(pixels):
    if pixels.ndim == 2:
        return pixels
    return pixels[..., [2, 1, 0, *range(3, pixels.shape[2])]]


def encode(name, pixels):
    done, content = cv2.imencode(name[name.index('.') :], bgr(pixels))
    assert done
    return content.tobytes()


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('pictures')
    for name, pixels in (LOSSLESS | LOSSY).items():
        (folder / name).write_bytes(encode(name, pixels))
    return folder


@pytest.mark.parametrize('name', LOSSLESS)
@settings(max_examples=10)
@given(window=windows())
def test_a_window_is_the_crop(folder, name, window):
    stored = LOSSLESS[name].reshape(HEIGHT, WIDTH, -1)
    with open_raster(folder / name) as reader:
        assert isinstance(reader, PictureReader)
        meta = reader.meta
        pixels, valid = reader.read(window), reader.read_valid(window)
    assert pixels.dtype == meta.dtype == stored.dtype
    assert meta.nbytes_resident == stored.nbytes
    assert meta.channels == pixels.shape[2] == min(3, stored.shape[2])
    assert np.array_equal(pixels, stored[window.slices][..., :3])
    assert meta.has_alpha == (stored.shape[2] == 4)
    if meta.has_alpha:
        assert np.array_equal(valid, stored[window.slices][..., 3] > 0)
    else:
        assert valid is None


@pytest.mark.parametrize('name', LOSSY)
def test_lossy_formats_are_read_as_opencv_reads_them(folder, name):
    expected = cv2.imread(str(folder / name), cv2.IMREAD_UNCHANGED)
    with open_raster(folder / name) as reader:
        pixels = reader.read(whole(reader))
    assert np.array_equal(pixels, bgr(expected).reshape(pixels.shape))


@pytest.mark.parametrize('name', [*LOSSLESS, *LOSSY])
@pytest.mark.parametrize('share', [0.02, 0.3, 0.8, 1])
def test_a_cut_file_is_an_error(folder, tmp_path, name, share):
    content = (folder / name).read_bytes()
    cut = content[: min(int(share * len(content)), len(content) - 1)]
    (tmp_path / name).write_bytes(cut)
    with pytest.raises(ValueError, match=rf'^[^\n]*{name}: is [^\n]*$'):
        open_raster(tmp_path / name)


def test_a_cut_jpeg_is_seen_despite_a_thumbnail_and_older_opencv(
    tmp_path, monkeypatch
):
    # Older OpenCV fills what is missing with grey.
    monkeypatch.setattr(cv2, 'imdecode', lambda *_: noise(HEIGHT, WIDTH))
    content = encode('rgb.jpg', noise(HEIGHT, WIDTH, 3))
    thumbnail = b'Exif\0\0' + encode('rgb.jpg', noise(8, 8, 3))
    segment = b'\xff\xe1' + struct.pack('>H', len(thumbnail) + 2) + thumbnail
    content = content[:2] + segment + content[2:]
    path = tmp_path / 'a.jpg'
    path.write_bytes(content + b'of a camera')
    open_raster(path)
    for end in (3, len(segment), len(segment) + 30, len(content) - 2):
        path.write_bytes(content[:end])
        with pytest.raises(ValueError, match='is cut off'):
            open_raster(path)


def test_damage_within_is_an_error(folder, tmp_path):
    content = bytearray((folder / 'rgb.png').read_bytes())
    content[len(content) // 2] ^= 0xFF
    (tmp_path / 'a.png').write_bytes(content)
    with pytest.raises(ValueError, match=r'a\.png: is damaged'):
        open_raster(tmp_path / 'a.png')


def test_opencv_has_a_limit(tmp_path):
    def chunk(kind, data):
        check = struct.pack('>I', zlib.crc32(kind + data))
        return struct.pack('>I', len(data)) + kind + data + check

    head = struct.pack('>IIBBBBB', 40_000, 40_000, 8, 0, 0, 0, 0)
    chunks = (b'IHDR', head), (b'IDAT', zlib.compress(b'')), (b'IEND', b'')
    content = b''.join(chunk(*pair) for pair in chunks)
    (tmp_path / 'a.png').write_bytes(b'\x89PNG\r\n\x1a\n' + content)
    with pytest.raises(ValueError, match=r'a\.png: is too large for OpenCV'):
        open_raster(tmp_path / 'a.png')


def test_exif_does_not_turn_the_picture(tmp_path):
    content = encode('a.jpg', noise(20, 30, 3))
    orientation = struct.pack('<HHHIHHI', 1, 0x112, 3, 1, 6, 0, 0)
    exif = b'Exif\0\0II*\0\x08\0\0\0' + orientation
    segment = b'\xff\xe1' + struct.pack('>H', len(exif) + 2) + exif
    (tmp_path / 'a.jpg').write_bytes(content[:2] + segment + content[2:])
    assert cv2.imread(str(tmp_path / 'a.jpg')).shape == (30, 20, 3)
    with open_raster(tmp_path / 'a.jpg') as reader:
        assert reader.read(whole(reader)).shape == (20, 30, 3)


def test_nodata(folder):
    stored = LOSSLESS['grey.png']
    with open_raster(folder / 'grey.png', nodata=int(stored[4, 5])) as reader:
        valid = reader.read_valid(whole(reader))
    assert np.array_equal(valid, stored != stored[4, 5])


def test_it_is_pickled_without_pixels(folder, monkeypatch):
    with open_raster(folder / 'rgb.png') as reader:
        content = pickle.dumps(reader)
        assert len(content) < 1000
        copy = pickle.loads(content)
        window = Window(3, 4, 5, 6)
        assert np.array_equal(copy.read(window), reader.read(window))
        # Once decoded, it is kept.
        monkeypatch.setattr(cv2, 'imdecode', None)
        assert np.array_equal(copy.read(window), reader.read(window))
