# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""The spatial executor: one image over several ranks, a band on each.

States are summed over the group by one small collective per phase of a
global operation; halo rows come from the neighbours. Both are differentiable,
so the loss of every rank may be its own share: (local sum) / (valid count of
the group). Gradients of parameters are then to be summed over the group.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from infsa_seg.layers.protocol import (
    BandNetwork,
    GlobalOp,
    LocalOp,
    Step,
    Tap,
    count_context,
)
from infsa_seg.ops import Axis, Context, Place, Rows, resize_part, split_rows

from .bands import Grid
from .exchange import Traffic, exchange_rows, find_route

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclasses.dataclass(frozen=True)
class ParallelDims:
    """How the ranks of a job are shared out.

    Ranks of one spatial group are neighbours: rank = data rank * spatial +
    spatial rank. Data sets are sharded over the data ranks alone, so that a
    spatial group sees one image.

    Attributes:
        world_size: ranks in all.
        spatial: ranks that share an image.

    Raises:
        ValueError: a number below one, or ``spatial`` does not divide
            ``world_size``.
    """

    world_size: int
    spatial: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f'{name}={value} is less than 1')
        if self.data * self.spatial != self.world_size:
            raise ValueError(
                f'{self.spatial} ranks are to share an image, but the job has '
                f'{self.world_size}; choose a spatial size that divides it'
            )

    @property
    def data(self) -> int:
        """Spatial groups, each with images of its own."""
        return max(self.world_size // self.spatial, 1)

    def data_rank(self, rank: int) -> int:
        """The spatial group of a rank."""
        return rank // self.spatial

    def spatial_rank(self, rank: int) -> int:
        """The band of a rank, counted from the top."""
        return rank % self.spatial

    def mesh(self, device_type: str) -> DeviceMesh:
        """The ranks with the axes 'data' and 'spatial'.

        All ranks call it, after ``torch.distributed`` is initialised.

        Raises:
            ValueError: the job has another number of ranks.
        """
        from torch.distributed.device_mesh import init_device_mesh

        if dist.get_world_size() != self.world_size:
            raise ValueError(
                f'world_size={self.world_size}, but the job has '
                f'{dist.get_world_size()} ranks'
            )
        return init_device_mesh(
            device_type,
            (self.data, self.spatial),
            mesh_dim_names=('data', 'spatial'),
        )


class SpatialParallel:
    """What one rank of a spatial group needs of the others.

    :meth:`merge` and, bound to a number of rows, :meth:`halo` are the
    callables that layers take. All ranks have to call them in one order.

    Args:
        group: the ranks of one image, from the top: a process group, a mesh
            of one axis (or with an axis 'spatial'), or None for all ranks.

    Attributes:
        group: the process group.
        rank, size: of this process in it, and of it.
        traffic: what this rank has sent.
    """

    def __init__(
        self, group: dist.ProcessGroup | DeviceMesh | None = None
    ) -> None:
        if group is not None and not isinstance(group, dist.ProcessGroup):
            names = group.mesh_dim_names or ()
            group = group.get_group('spatial' if 'spatial' in names else None)
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.traffic = Traffic()

    def bands(self, num_rows: int) -> list[Rows]:
        """The rows of every rank.

        Raises:
            ValueError: there are fewer rows than ranks.
        """
        if num_rows < self.size:
            raise ValueError(
                f'the image has {num_rows} token rows, fewer than the '
                f'{self.size} ranks of its spatial group; use larger crops, '
                'smaller patches or a smaller spatial group'
            )
        return split_rows(num_rows, self.size)

    def rows(self, num_rows: int) -> Rows:
        """The rows of this rank, of an image with so many."""
        return self.bands(num_rows)[self.rank]

    def merge(self, state: Any) -> Any:
        """Complete a state over the group, by one message."""
        if self.size == 1:
            return state
        return state.all_reduce(self.group, self.traffic.add_merge)

    def halo(self, x: Tensor, n: int, num_rows: int) -> tuple[Tensor, Tensor]:
        """Up to ``n`` rows on each side of the band.

        Args:
            x: the band, (B, rows, ...).
            n: rows wanted; also from further ranks, where a neighbour has
                fewer. Fewer at the border of the image.
            num_rows: of the image.

        Raises:
            ValueError: ``x`` is not as high as this rank's band.
        """
        bands = self.bands(num_rows)
        if x.shape[1] != bands[self.rank].num_rows:
            raise ValueError(
                f'rank {self.rank} has {x.shape[1]} rows, but its band of an '
                f'image of {num_rows} has {bands[self.rank].num_rows}'
            )
        route = find_route(bands, self.rank, n)
        return exchange_rows(x, route, self.group, self.traffic.halos)

    def total(self, values: Tensor) -> Tensor:
        """Add numbers up over the group, for a log; without a gradient."""
        values = values.detach().clone()
        if self.size > 1:
            self.traffic.add_merge(values)
            dist.all_reduce(values, group=self.group)
        return values

    def __deepcopy__(self, memo: dict[int, Any]) -> SpatialParallel:
        # Copies of a model belong to the same processes.
        return self

    def share_random_state(self, device: torch.device) -> None:
        """Let all ranks go on with the random numbers of the first.

        Call it at the start of every step: stochastic depth must drop the
        same branches on all ranks. Dropout of single activations draws as
        many numbers as a band has; where bands differ in height it puts the
        ranks out of step until the next call.

        Args:
            device: of the tensors that travel, that of the backend.
        """
        seed = torch.randint(2**62, (1,)).to(device)
        whole = dist.group.WORLD if self.group is None else self.group
        assert whole is not None
        dist.broadcast(seed, dist.get_global_rank(whole, 0), self.group)
        torch.manual_seed(int(seed))


@dataclasses.dataclass
class BandLogits:
    """The logits of one rank.

    Attributes:
        logits: (B, classes, height, width) of the band and its halo, in
            steps of the network's stride. Its outermost rows, those of the
            halo, are not those of the image.
        down, across: where they lie in the image, padded to whole tokens.
        rows: pixel rows of the band.
        columns: pixel columns of the image.
    """

    logits: Tensor
    down: Axis
    across: Axis
    rows: Rows
    columns: Rows

    @property
    def place(self) -> Place:
        """Where logits and labels lie, for a loss on bands."""
        return Place(self.down, self.across, (self.rows.start, 0))

    def resize(self) -> Tensor:
        """Logits of the band's pixels, (B, classes, rows, columns)."""
        return resize_part(
            self.logits, self.down, self.across, self.rows, self.columns
        )


def spatial_forward(
    network: BandNetwork,
    pixels: Tensor,
    height: int,
    parallel: SpatialParallel,
    valid: Tensor | None = None,
    recompute: bool = False,
) -> BandLogits:
    """Run the band of this rank through a network.

    All ranks of the group call it, with bands of one batch of images.

    Args:
        network: its modules are called, so that hooks of others see them.
        pixels: (B, channels, rows, width), the pixel rows of the tokens
            ``parallel.rows(...)``, normalised. The last band ends with the
            image.
        height: of the image in pixels.
        parallel: the group.
        valid: bool (B, token rows of the band, token columns), False where a
            token is not to count; on all ranks or on none. None for all.
        recompute: compute each layer, collectives included, anew in the
            backward pass instead of keeping its activations.

    Raises:
        ValueError: fewer token rows than ranks, or ``pixels`` or ``valid``
            are not those of the band.
    """
    grid = Grid(height, pixels.shape[3], network.patch_size)
    band = parallel.rows(grid.rows)
    rows = grid.pixel_rows(band)
    _check_shape('pixels', pixels.shape[2:], (rows.num_rows, grid.width))
    if valid is not None:
        _check_shape('valid', valid.shape[1:], (band.num_rows, grid.columns))
    run = _Run(network, parallel, grid.rows, valid)
    taps = run(network.embed(pixels, (band.start, 0), grid.shape), recompute)
    above, below = run.halo(taps, network.halo)
    logits = network.decode(
        torch.cat([above, taps, below], 1), run.mask(network.halo)
    )

    def axis(first: int, tokens: int) -> Axis:
        places = grid.patch_size / network.stride
        return Axis(
            int(first * places), int(tokens * places), tokens * grid.patch_size
        )

    return BandLogits(
        logits,
        axis(band.start - above.shape[1], grid.rows),
        axis(0, grid.columns),
        rows,
        Rows(0, grid.width),
    )


class _Run:
    """One pass of a band through the steps of a network."""

    def __init__(
        self,
        network: BandNetwork,
        parallel: SpatialParallel,
        num_rows: int,
        valid: Tensor | None,
    ) -> None:
        self.layers = _group_steps(network.steps())
        self.merge = parallel.merge
        self.halo = functools.partial(parallel.halo, num_rows=num_rows)
        self.band, self.num_rows = parallel.rows(num_rows), num_rows
        self.valid = valid
        self.reach = 0
        self.grown: Tensor | None = None
        if valid is not None:
            steps = (step for layer in self.layers for step in layer)
            halos = [s.halo for s in steps if isinstance(s, LocalOp)]
            self.reach = max([network.halo, *halos])
            # Once, for all layers; collectives know no booleans.
            mask = valid.to(torch.uint8)
            above, below = self.halo(mask, self.reach)
            self.grown = torch.cat([above, mask, below], 1).bool()

    def mask(self, n: int) -> Tensor | None:
        """The mask of the band and ``n`` rows on each side."""
        if self.grown is None:
            return None
        have = self.band.grow(self.reach, self.num_rows)
        return self.grown[:, self.band.grow(n, self.num_rows).within(have)]

    def __call__(self, x: Tensor, recompute: bool) -> Tensor:
        """Tokens of the band to the sum of the taps."""
        context = count_context([x], self.merge, [self.valid])
        taps: Tensor | None = None
        for layer in self.layers:
            if isinstance(layer[0], Tap):
                tap = layer[0].project(x)
                taps = tap if taps is None else taps + tap
            elif recompute and torch.is_grad_enabled():
                x = checkpoint(
                    self._run_layer, layer, x, context, use_reentrant=False
                )
            else:
                x = self._run_layer(layer, x, context)
        assert taps is not None
        return taps

    def _run_layer(
        self, layer: list[Step], x: Tensor, context: Context
    ) -> Tensor:
        for step in layer:
            if isinstance(step, GlobalOp):
                x = step(
                    x, merge=self.merge, valid=self.valid, context=context
                )
            else:
                assert isinstance(step, LocalOp)
                x = step(x, halo=self.halo, valid=self.mask(step.halo))
        return x


def _group_steps(steps: Iterable[Step]) -> list[list[Step]]:
    """What is recomputed together: a global step and the local one after it.

    A tap stands alone.
    """
    layers: list[list[Step]] = []
    for step in steps:
        follows = layers and isinstance(layers[-1][-1], GlobalOp)
        if follows and not isinstance(step, GlobalOp | Tap):
            layers[-1].append(step)
        else:
            layers.append([step])
    return layers


def _check_shape(
    name: str, shape: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    if tuple(shape) != wanted:
        raise ValueError(
            f'{name} has {tuple(shape)} rows and columns, but the band of '
            f'this rank has {wanted}'
        )
