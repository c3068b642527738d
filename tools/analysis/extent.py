# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Train on few tokens, test on many: ``python tools/analysis/extent.py``.

It prints the accuracy of each operator in associative recall (DESIGN 3.3) as
the image grows. Every image is a mosaic of eight textures with a legend in its
corner that deals them out to four classes anew, and every token must look up
its own texture: without the legend a texture means nothing. The legend keeps
its size, so that it fills an eighth of 256 tokens and one in 2,048 of 65,536.

A softmax whose temperature tau grows with log N weighs a token by N to a
power, and finds it among ever more others as long as that power is above 1.
What is random in a cosine, of deviation sigma, makes the others weigh
exp(tau^2 sigma^2 / 2) times as much, and that exponent grows with the square
of log N. Hence the network looks at neighbours before it looks anything up:
it nearly halves sigma.
"""

import argparse
import sys
from argparse import ArgumentParser
from math import isqrt
from typing import Any

try:
    import torch
    from torch import Tensor, nn
    from torch.nn import functional as F

    from infsa_seg.apis import cli
    from infsa_seg.apis.progress import progress
    from infsa_seg.layers import (
        FFN,
        Block,
        GlobalBranch,
        InfSAAttention,
        LocalBranch,
    )
except ImportError as error:  # not installed, or beside what cannot work
    sys.exit(f'extent.py: error: {error}')

VARIANTS: dict[str, dict[str, Any]] = {
    'neumann': dict(variant='neumann', num_landmarks=32),
    'neumann-fixed': dict(variant='neumann', num_landmarks=32, log_n=False),
    'softmax': dict(variant='softmax'),
    'linear': dict(variant='linear'),
}
TOKENS = (256, 1024, 4096, 16_384, 65_536)

NUM_TEXTURES = 8
NUM_CLASSES = 4
# A token shows a texture and, in the legend, the mark of a class.
CHANNELS = NUM_TEXTURES + NUM_CLASSES
NOISE = 0.1
# The mosaic is made of squares, the legend of smaller ones in a row.
REGION = 4
PATCH = 2
MIN_SIDE = PATCH * NUM_TEXTURES
# The class of the legend's tokens, which F.cross_entropy leaves out.
NO_CLASS = -100

WIDTH = 64
NUM_LAYERS = 3
NUM_HEADS = 4
BATCH = 8
LEARNING_RATE = 2e-3
# Far from the seeds that anybody trains with.
TEST_SEED = 1_000_000
TEST_IMAGES = 16


def deal(generator: torch.Generator) -> Tensor:
    """The class of each texture, int64 (NUM_TEXTURES,), two to a class."""
    return torch.randperm(NUM_TEXTURES, generator=generator) % NUM_CLASSES


def draw(
    meaning: Tensor, side: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw an image: a mosaic of random textures, the legend in its corner.

    Args:
        meaning: of :func:`deal`.
        side: rows and columns, at least MIN_SIDE.
        generator: source of the mosaic, of the legend's order and of the
            noise.

    Returns:
        Tokens, float32 (side, side, CHANNELS), and their classes, int64
        (side, side), NO_CLASS in the legend.
    """
    regions = -(-side // REGION)
    texture = torch.randint(
        NUM_TEXTURES, (regions, regions), generator=generator
    )
    texture = texture.repeat_interleave(REGION, 0)[:side]
    texture = texture.repeat_interleave(REGION, 1)[:, :side]
    order = torch.randperm(NUM_TEXTURES, generator=generator)
    texture[:PATCH, :MIN_SIDE] = order.repeat_interleave(PATCH)

    labels = meaning[texture]
    tokens = NOISE * torch.randn(side, side, CHANNELS, generator=generator)
    shown, mark = tokens.split([NUM_TEXTURES, NUM_CLASSES], -1)
    shown += F.one_hot(texture, NUM_TEXTURES)
    legend = labels[:PATCH, :MIN_SIDE]
    mark[:PATCH, :MIN_SIDE] += F.one_hot(legend, NUM_CLASSES)
    legend.fill_(NO_CLASS)
    return tokens, labels


class Recall(nn.Module):
    """A small network: neighbours first, then blocks with attention.

    Args:
        **attention: which operator, see :class:`InfSAAttention`.
    """

    def __init__(self, **attention: Any) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(CHANNELS, WIDTH),
            Block(None, self._local()),
            *(
                Block(self._global(attention), self._local())
                for _ in range(NUM_LAYERS)
            ),
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, NUM_CLASSES),
        )
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, rows, columns, CHANNELS) to logits (B, rows, columns, K)."""
        return self.body(tokens)

    @staticmethod
    def _global(attention: dict[str, Any]) -> GlobalBranch:
        return GlobalBranch(
            nn.LayerNorm(WIDTH),
            InfSAAttention(WIDTH, NUM_HEADS, **attention),
            nn.Identity(),
        )

    @staticmethod
    def _local() -> LocalBranch:
        return LocalBranch(
            nn.LayerNorm(WIDTH),
            FFN(WIDTH, 2 * WIDTH, 'dwconv'),
            nn.Identity(),
        )


def train(
    variant: str, side: int, iters: int, seed: int, device: torch.device
) -> Recall:
    """Train a network, every iteration on new images.

    Args:
        variant: one of VARIANTS.
        side: rows and columns of each image.
        iters: how many batches.
        seed: of the weights and the images.
        device: where to.

    Returns:
        The network in evaluation mode.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    network = Recall(**VARIANTS[variant]).to(device)
    optimizer = torch.optim.Adam(network.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, iters, pct_start=0.1, cycle_momentum=False
    )
    for _ in progress(range(iters), f'Training {variant}'):
        images = [draw(deal(generator), side, generator) for _ in range(BATCH)]
        tokens, labels = (
            torch.stack(parts).to(device)
            for parts in zip(*images, strict=True)
        )
        loss = F.cross_entropy(network(tokens).movedim(-1, 1), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return network.eval()


@torch.inference_mode()
def accuracy(network: Recall, side: int, device: torch.device) -> float:
    """The share of tokens that get their class, over test images.

    Images of any size have the same legends, whatever was trained on.
    """
    shares = []
    for index in range(TEST_IMAGES):
        generator = torch.Generator().manual_seed(TEST_SEED + index)
        tokens, labels = draw(deal(generator), side, generator)
        found = network(tokens[None].to(device)).argmax(-1)[0].cpu()
        shares.append((found == labels)[labels != NO_CLASS].double().mean())
    return torch.stack(shares).mean().item()


def measure(variant: str, args: argparse.Namespace) -> list[str]:
    """Train one variant; its accuracy on each size, a dash if left out."""
    network = train(
        variant, isqrt(args.tokens[0]), args.iters, args.seed, args.device
    )
    cells = []
    for num_tokens in progress(args.tokens, f'Testing {variant}'):
        if variant == 'softmax' and num_tokens > args.softmax_max_tokens:
            cells.append('-')
        else:
            share = accuracy(network, isqrt(num_tokens), args.device)
            cells.append(f'{share:.3f}')
    return cells


def extent(value: str) -> int:
    """An argument that is the number of tokens of a square image."""
    num_tokens = cli.positive(value)
    side = isqrt(num_tokens)
    if side * side != num_tokens or side < MIN_SIDE:
        raise argparse.ArgumentTypeError(
            f'{value} tokens make no square of {MIN_SIDE} x {MIN_SIDE} or more'
        )
    return num_tokens


def parse() -> argparse.Namespace:
    """The arguments."""
    parser = ArgumentParser(
        description='Accuracy in associative recall on images that grow, of '
        'networks trained on small ones'
    )
    parser.add_argument(
        '--variants',
        nargs='+',
        choices=VARIANTS,
        default=[*VARIANTS],
        help='operators to train; neumann-fixed does without the log-N '
        'temperature; defaults to all',
    )
    parser.add_argument(
        '--tokens',
        nargs='+',
        type=extent,
        default=TOKENS,
        metavar='N',
        help='sizes of square images to test on, of which the first is '
        f'trained on; defaults to {" ".join(map(str, TOKENS))}',
    )
    parser.add_argument(
        '--softmax-max-tokens',
        type=cli.positive,
        default=16_384,
        metavar='N',
        help='size beyond which softmax, of O(N^2), is not tested; defaults '
        'to 16384',
    )
    parser.add_argument(
        '--iters', type=cli.positive, default=600, help='defaults to 600'
    )
    parser.add_argument('--seed', type=int, default=0, help='defaults to 0')
    parser.add_argument(
        '--device',
        type=cli.device,
        default='cuda' if torch.cuda.is_available() else 'cpu',
        help='such as cuda:0; a GPU if there is',
    )
    return parser.parse_args()


def main() -> None:
    """Read the arguments; print a table in markdown, row by row."""
    args = parse()
    header = ['variant', *(f'{n:,}' for n in args.tokens)]
    for row in (header, ['---'] * len(header)):
        print(f'| {" | ".join(row)} |')
    for variant in args.variants:
        row = [variant, *measure(variant, args)]
        print(f'| {" | ".join(row)} |', flush=True)


if __name__ == '__main__':
    cli.run(main)
