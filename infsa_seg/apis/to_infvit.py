# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Checkpoints of other Vision Transformers into such of InfViT."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infsa_seg.engine.files import atomic_path
from infsa_seg.models import InfViT
from infsa_seg.models.utils import check_checkpoint
from infsa_seg.models.utils.vit_weights import VitWeights, rename_vit

_SIZE_KEYS = ('img_size', 'image_size', 'input_size')
_SIZE_IN_TEXT = re.compile(r'\bimg_size\s*=\s*[\[(]?\s*(\d+)(?:\s*,\s*(\d+))?')


@dataclass(frozen=True)
class InfViTReport:
    """What :func:`convert_to_infvit` did.

    Attributes:
        source (str): The file that was read.
        prefix (str): What was taken off the names in it.
        loaded (tuple[str]): Entries of an InfViT that are now in the new
            file.
        missing (tuple[str]): Entries of an InfViT that it lacks. The
            attention's own (landmarks, discount) do not count.
        unexpected (tuple[str]): Entries of the source without a place in
            InfViT.
        notes (tuple[str]): What else was done, in words.
        backbone (dict): Arguments of InfViT for the new file. They say
            nothing of ``num_heads`` where that was not given.
    """

    source: str
    prefix: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    notes: tuple[str, ...]
    backbone: dict[str, Any]

    def __str__(self) -> str:
        total = len(self.loaded) + len(self.missing)
        first = f'{self.source}: loaded {len(self.loaded)} of {total} entries'
        if self.prefix:
            first += f', prefix {self.prefix!r} removed'
        lines = [first]
        for kind, names in (
            ('missing in the file', self.missing),
            ('of the file unexpected in InfViT', self.unexpected),
        ):
            if names:
                lines.append(f'  {len(names)} {kind}: {_some(names)}')
        lines += [f'  {note}' for note in self.notes]
        arguments = ', '.join(f'{k}={v!r}' for k, v in self.backbone.items())
        lines.append(f'  backbone=dict({arguments})')
        return '\n'.join(lines)


def convert_to_infvit(
    source: str | Path,
    out: str | Path,
    grid: tuple[int, int] | None = None,
    img_size: tuple[int, int] | None = None,
    num_heads: int | None = None,
    overwrite: bool = False,
) -> InfViTReport:
    """Write the weights of a Vision Transformer as those of an InfViT.

    Sources are checkpoints of timm (DeiT, DINO, DINOv2 too), torchvision,
    mmsegmentation, mmpretrain, Hugging Face's transformers, and of the
    reference package of InfSA. See
    :func:`infsa_seg.models.utils.vit_weights.rename_vit` for what becomes of
    the class token and of layer scale.

    Args:
        source (str | Path): The file, read in safe mode.
        out (str | Path): File to write, for
            ``init_cfg=dict(type='Pretrained', checkpoint=...)`` of an InfViT
            with any attention.
        grid (tuple[int, int], optional): Rows and columns of the positions,
            where neither their shape nor the file says so.
        img_size (tuple[int, int], optional): Or height and width in pixels
            of the images that the source was trained on.
        num_heads (int, optional): To be put into the backbone's arguments.
        overwrite (bool): Replace ``out`` if it exists.

    Returns:
        InfViTReport: What was loaded, is missing, was unexpected.

    Raises:
        FileNotFoundError: There is no such file.
        FileExistsError: ``out`` exists.
        ValueError: It is no checkpoint, or of no transformer that is known,
            or of one that InfViT cannot be.
    """
    out = Path(out)
    if out.exists() and not overwrite:
        raise FileExistsError(f'{out}: exists; use --overwrite')
    if Path(source).suffix == '.safetensors':
        raise ValueError(
            f'{source}: load it with safetensors.torch.load_file and save '
            'the result with torch.save first'
        )
    check_checkpoint(source)
    content = torch.load(source, map_location='cpu', weights_only=True)
    entries = {
        name: value
        for name, value in _find_entries(content).items()
        if isinstance(value, Tensor)
    }
    if grid is None and img_size is None:
        img_size = _find_img_size(content)
    try:
        weights = rename_vit(entries, grid, img_size)
        report = _report(str(source), weights, num_heads)
    except ValueError as error:
        raise ValueError(f'{source}: {error}') from error
    meta = dict(source=Path(source).name, backbone=report.backbone)
    with atomic_path(out) as part:
        torch.save(dict(state_dict=weights.state, meta=meta), part)
    return report


def _report(
    source: str, weights: VitWeights, num_heads: int | None
) -> InfViTReport:
    """Compare the weights with those of an InfViT that has no others."""
    arguments = weights.shape.arguments()
    heads = num_heads or 1
    if arguments['embed_dims'] % heads:
        raise ValueError(
            f'num_heads={heads} does not divide the width '
            f'{arguments["embed_dims"]}'
        )
    with torch.device('meta'):
        own = InfViT(
            **arguments, num_heads=heads, attn_cfg=dict(variant='softmax')
        ).state_dict()
    for name, value in weights.state.items():
        if name in own and own[name].shape != value.shape:
            raise ValueError(
                f'{name} would be {tuple(value.shape)}, not '
                f'{tuple(own[name].shape)}'
            )
    backbone = dict(type='InfViT', **arguments)
    notes = weights.notes
    if num_heads is not None:
        backbone['num_heads'] = num_heads
    else:
        notes += ("num_heads is not in the weights; give InfViT the source's",)
    return InfViTReport(
        source=source,
        prefix=weights.prefix,
        loaded=tuple(name for name in own if name in weights.state),
        missing=tuple(name for name in own if name not in weights.state),
        unexpected=weights.unexpected,
        notes=notes,
        backbone=backbone,
    )


def _find_entries(content: Mapping) -> Mapping[str, Any]:
    for key in ('state_dict', 'model', 'teacher'):
        if isinstance(content.get(key), Mapping):
            return content[key]
    return content


def _find_img_size(content: Mapping) -> tuple[int, int] | None:
    """Height and width of the image, where the file names one size only."""
    sizes = set(_sizes(content))
    return sizes.pop() if len(sizes) == 1 else None


def _sizes(content: Mapping, depth: int = 4) -> Iterator[tuple[int, int]]:
    for key, value in content.items():
        if key in _SIZE_KEYS:
            size = [value] * 2 if isinstance(value, int) else value
            # timm puts the channels first.
            if isinstance(size, list | tuple) and len(size) in (2, 3):
                yield int(size[-2]), int(size[-1])
        elif isinstance(value, Mapping) and depth:
            yield from _sizes(value, depth - 1)
        elif key == 'cfg' and isinstance(value, str):
            # The config of mmengine, which is not to be run.
            for height, width in _SIZE_IN_TEXT.findall(value):
                yield int(height), int(width or height)


def _some(names: Iterable[str], most: int = 6) -> str:
    names = list(names)
    more = f' and {len(names) - most} more' if len(names) > most else ''
    return ', '.join(names[:most]) + more
