# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""mmsegmentation's encoder-decoder, for images of any size."""

from __future__ import annotations

import torch
from mmengine.structures import PixelData
from mmseg.models.segmentors import EncoderDecoder
from mmseg.registry import MODELS
from mmseg.structures import SegDataSample
from mmseg.utils import OptSampleList, SampleList, add_prefix
from torch import Tensor
from torch.nn import functional as F

from infsa_seg.execution import (
    Grid,
    SpatialParallel,
    class_rows,
    run_bands,
)

from ..utils import SegmentorNetwork
from .spatial import spatial_loss


@MODELS.register_module()
class BandEncoderDecoder(EncoderDecoder):
    """An ``EncoderDecoder`` that can pass an image through in bands.

    It differs from its base in three things:

    * ``test_cfg=dict(mode='stream', band_rows=16)`` tests an image in bands
      of so many token rows. The classes are those of ``mode='whole'``, but
      neither attention nor logits of the whole image are in memory, and a
      sample gets no ``seg_logits``. ``'whole'`` and ``'slide'`` stay what
      they are.
    * After :meth:`share_images` it trains on bands, one on each process.
    * A side that is no multiple of the patch is padded, and the logits are
      resized to the padded size and cut. The base resizes them to the image,
      which squeezes them by up to a patch.

    Args:
        *args, **kwargs: As for mmsegmentation's ``EncoderDecoder``.

    Raises:
        ValueError: ``mode='stream'``, and a part of the network cannot run in
            bands.
    """

    # Of the processes that share its training images; None where none do.
    spatial_parallel: SpatialParallel | None = None

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if self._streams:
            SegmentorNetwork(self)

    def share_images(self, parallel: SpatialParallel) -> None:
        """Train on a band of every image from now on.

        ``loss`` then expects the rows of this process and gives the losses of
        the whole images. The mean of the gradients over the group is theirs:
        they are averaged over all processes, as if each had its own images.

        Args:
            parallel (SpatialParallel): The processes that share an image.

        Raises:
            ValueError: The size of the crops is not known or has too few rows
                of tokens, or a part of the network or its loss cannot run in
                bands.
        """
        SegmentorNetwork(self)
        if self.with_auxiliary_head:
            raise ValueError(
                'auxiliary_head: a head of whole images cannot train on '
                'bands; set it to None'
            )
        if not self.decode_head.loss_in_bands:
            raise ValueError(
                'decode_head.loss_decode: bands need losses in strips; use '
                "dict(type='BandCrossEntropyLoss') or 'BandDiceLoss'"
            )
        size = self.data_preprocessor.size
        if size is None:
            raise ValueError(
                'bands need crops of one size: say data_preprocessor.size='
                '(height, width)'
            )
        height, width = size
        grid = Grid(height, width, self.backbone.patch_size)
        rows = grid.pixel_rows(parallel.rows(grid.rows))
        self.spatial_parallel, self._crop_height = parallel, height
        # It pads what it is given, a band.
        self.data_preprocessor.size = rows.num_rows, width

    @property
    def _streams(self) -> bool:
        return (self.test_cfg or {}).get('mode') == 'stream'

    def encode_decode(
        self, inputs: Tensor, batch_img_metas: list[dict]
    ) -> Tensor:
        """Logits of whole images, (B, classes, height, width)."""
        height, width = inputs.shape[2:]
        inputs = self._pad(inputs, 0)
        # Upstream resizes to a torch.Size that it finds there.
        metas = [
            {**meta, 'img_shape': inputs.shape[2:]} for meta in batch_img_metas
        ]
        return super().encode_decode(inputs, metas)[..., :height, :width]

    def loss(self, inputs: Tensor, data_samples: SampleList) -> dict:
        """Losses by name; padding is ignored."""
        if self.spatial_parallel is not None:
            return self._shared_loss(inputs, data_samples)
        padded = self._pad(inputs, 0)
        if padded.shape != inputs.shape:
            data_samples = [self._pad_labels(s) for s in data_samples]
        return super().loss(padded, data_samples)

    def _shared_loss(self, inputs: Tensor, data_samples: SampleList) -> dict:
        parallel = self.spatial_parallel
        assert parallel is not None
        label = torch.stack([s.gt_sem_seg.data[0] for s in data_samples])
        shares = spatial_loss(self, inputs, label, self._crop_height, parallel)
        names = [name for name in shares if 'loss' in name]
        totals = parallel.total(torch.stack([shares[n] for n in names]))
        for name, total in zip(names, totals, strict=True):
            share = shares[name]
            # Shares are to be summed, and those who train average.
            shares[name] = total + parallel.size * (share - share.detach())
        return add_prefix(shares, 'decode')

    def predict(
        self, inputs: Tensor, data_samples: OptSampleList = None
    ) -> SampleList:
        """Segment a batch; with ``mode='stream'`` one image at a time.

        Raises:
            ValueError: In that mode, of an image that was resized: only
                logits could be resized back.
        """
        if not self._streams:
            return super().predict(inputs, data_samples)
        if data_samples is None:
            data_samples = [SegDataSample() for _ in inputs]
        network = SegmentorNetwork(self)
        for image, sample in zip(inputs, data_samples, strict=True):
            sample.pred_sem_seg = PixelData(
                data=self._stream(network, image, sample.metainfo)[None]
            )
        return data_samples

    def _stream(
        self, network: SegmentorNetwork, image: Tensor, meta: dict
    ) -> Tensor:
        left, right, top, bottom = meta.get(
            'img_padding_size', meta.get('padding_size', (0, 0, 0, 0))
        )
        height, width = image.shape[1:]
        image = image[:, top : height - bottom, left : width - right]
        size = tuple(image.shape[1:])
        if tuple(meta.get('ori_shape', size)) != size:
            raise ValueError(
                f"test_cfg mode='stream' classifies at the size of the image "
                f'that it is given, {size}, but the original has '
                f'{tuple(meta["ori_shape"])}; leave Resize out of the test '
                "pipeline, or use mode='whole'"
            )
        classes = torch.empty(size, dtype=torch.long)

        def sink(rows, pieces):
            classes[slice(*rows)] = class_rows(
                rows, size[1], pieces, self.decode_head.threshold
            )

        run_bands(
            network,
            image[None],
            sink,
            band_rows=self.test_cfg.get('band_rows', 16),
        )
        if meta.get('flip'):
            across = meta['flip_direction'] == 'horizontal'
            classes = classes.flip(1 if across else 0)
        return classes.to(image.device)

    def _pad(self, x: Tensor, value: float) -> Tensor:
        patch = getattr(self.backbone, 'patch_size', 1)
        height, width = x.shape[-2:]
        return F.pad(x, (0, -width % patch, 0, -height % patch), value=value)

    def _pad_labels(self, sample: SegDataSample) -> SegDataSample:
        label = sample.gt_sem_seg.data
        padded = SegDataSample(metainfo=sample.metainfo)
        padded.gt_sem_seg = PixelData(
            data=self._pad(label, self.decode_head.ignore_index)
        )
        return padded
