# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Pictures that can only be decoded as a whole: PNG, JPEG, BMP, WebP."""

from pathlib import Path
from typing import Any

import numpy as np

from .base import WindowReader, check_nodata, naming, valid_pixels
from .meta import RasterMeta
from .window import Window

_PNG, _PNG_END = b'\x89PNG\r\n\x1a\n', b'IEND\xaeB`\x82'
_JPEG, _JPEG_END = b'\xff\xd8\xff', b'\xff\xd9'


class PictureReader(WindowReader):
    """Reads windows of a picture that OpenCV decodes.

    The picture is decoded when it is opened, and kept: its bytes are in
    ``meta.nbytes_resident``. Values are as stored, 8 or 16 bits; a palette is
    resolved to colours, and grey with alpha is read as red, green and blue.
    A rotation that EXIF asks for is not done: rows and columns are those of
    the file.

    Args:
        path: The file.
        nodata: A pixel is invalid where all channels have this value.

    Raises:
        OSError: It cannot be read.
        ValueError: It is cut off, damaged, no picture, or too large.
    """

    def __init__(self, path: Path, nodata: float | None = None) -> None:
        super().__init__(path)
        self._pixels: np.ndarray | None = self._decode()
        height, width, samples = self._pixels.shape
        check_nodata(path, nodata, self._pixels.dtype)
        self.meta = RasterMeta(
            height=height,
            width=width,
            channels=min(samples, 3),
            dtype=self._pixels.dtype,
            nodata=nodata,
            has_alpha=samples == 4,
            nbytes_resident=self._pixels.nbytes,
        )

    def _load(
        self, window: Window, level: int
    ) -> tuple[np.ndarray, np.ndarray | None]:
        if self._pixels is None:
            self._pixels = self._decode()
        stored = self._pixels[window.slices]
        colours = stored[..., :3]
        # OpenCV has blue first.
        pixels = np.array(colours[..., ::-1], order='C')
        valid = valid_pixels(
            colours,
            self.meta.nodata,
            [stored[..., 3]] if self.meta.has_alpha else [],
        )
        return pixels, valid

    def _decode(self) -> np.ndarray:
        """Decode the file: (height, width, samples), blue first."""
        import cv2

        with naming(self.path, 'cannot be read'):
            content = self.path.read_bytes()
        if _is_cut_off(content):
            raise ValueError(
                f'{self.path}: is cut off; copy or download it again'
            )
        try:
            pixels = cv2.imdecode(
                np.frombuffer(content, np.uint8), cv2.IMREAD_UNCHANGED
            )
        except cv2.error as error:
            if 'CV_IO_MAX_IMAGE' in str(error):
                raise ValueError(
                    f'{self.path}: is too large for OpenCV (2^30 pixels); '
                    'convert it to a tiled TIFF'
                ) from error
            pixels = None
        if pixels is None:
            raise ValueError(
                f'{self.path}: is damaged or no picture; use TIFF, PNG, '
                'JPEG, BMP, WebP or .npy'
            )
        return pixels.reshape(*pixels.shape[:2], -1)

    def close(self) -> None:
        """Drop the decoded picture; a later read decodes it again."""
        super().close()
        self._pixels = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), '_pixels': None}


def _is_cut_off(content: bytes) -> bool:
    """Whether the end of the picture is missing.

    Older OpenCV fills what is missing from a JPEG with grey, and is content.
    What comes after the end, as some cameras have it, is nobody's business.
    """
    if content.startswith(_PNG):
        return content.rfind(_PNG_END) < 0
    if content.startswith(_JPEG):
        return content.find(_JPEG_END, _jpeg_scan(content)) < 0
    if content.startswith(b'RIFF'):
        return len(content) < 8 + int.from_bytes(content[4:8], 'little')
    return False


def _jpeg_scan(content: bytes) -> int:
    """Offset of the first scan, which lies behind any embedded thumbnail."""
    place = 2
    while place + 4 <= len(content) and content[place] == 0xFF:
        marker = content[place + 1]
        if marker == 0xDA:
            return place
        if marker == 0xFF:  # a fill byte
            place += 1
            continue
        place += 2 + int.from_bytes(content[place + 2 : place + 4], 'big')
    return len(content)
