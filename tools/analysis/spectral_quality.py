# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""How well each operator finds the tokens that matter, head by head.

``python tools/analysis/spectral_quality.py random``, or ``... trained CONFIG
CHECKPOINT [INPUT ...]``, the mean over the inputs. It prints the cosine of
what each token receives by an operator with the dominant left eigenvector of
ReLU(QK^T), the graph that InfSA stands for (DESIGN 3.3):

* linear: the scores of Linear-InfSA;
* crelu: the left eigenvector of the crelu graph, from an M x M problem;
* landmark: the importance map of the layer's landmark graph (on random
  tokens: of random landmarks);
* constant: the same for every token, to measure the others against: vectors
  without a negative entry are never far apart.

Every operator sees the same queries and keys, whichever the layer uses. A
dash stands where there is nothing to compare: no landmarks, or no dominant
eigenvector. Beside trained models stands what the paper tells of its own
(arXiv 2603.00175).
"""

import argparse
import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

try:
    import torch
    from PIL import Image
    from torch import Tensor, nn

    from infsa_seg.apis import classify, cli, inference, init_model
    from infsa_seg.apis.infer import draw_scene
    from infsa_seg.apis.pictures import read_image
    from infsa_seg.apis.progress import progress
    from infsa_seg.layers import InfSAAttention, LandmarkInfSA
    from infsa_seg.ops import crelu, reference
    from infsa_seg.ops.centrality import (
        DenseGraph,
        FactorGraph,
        Graph,
        eigenvector,
    )
except ImportError as error:  # not installed, or beside what cannot work
    sys.exit(f'spectral_quality.py: error: {error}')

OPERATORS = ('linear', 'crelu', 'landmark', 'constant')
MEANS = (0.0, 0.1, 0.2, 0.3, 0.5)
# Of linear, on trained models.
PAPER = 0.985
WIDTH = 64
# The matrix of a head then takes 2 GiB.
MAX_TOKENS = 16_384


def cosines(layer: InfSAAttention, q: Tensor, k: Tensor) -> Tensor:
    """Hold the operators against the eigenvector.

    Args:
        layer: gives the landmarks, if it has any.
        q, k: (H, N, D) projected tokens of one image.

    Returns:
        (H, len(OPERATORS)), NaN where there is nothing to compare.
    """
    q, k = q.double(), k.double()
    exact = received(
        DenseGraph((a @ b.mT).relu()) for a, b in zip(q, k, strict=True)
    )
    _, linear = reference.linear_infsa(q[None], k[None], k[None], 1.0)
    found = [
        linear[0, ..., 0],
        received(
            FactorGraph(crelu(a), crelu(b)) for a, b in zip(q, k, strict=True)
        ),
        landmark_importance(layer, q, k),
        torch.ones_like(exact),
    ]
    return torch.stack([cosine(importance, exact) for importance in found], -1)


def received(graphs: Iterable[Graph]) -> Tensor:
    """The dominant left eigenvector of each, (H, N), NaN where it has none."""
    vectors = []
    for graph in graphs:
        try:
            vectors.append(eigenvector(graph.T))
        except ValueError:
            vectors.append(torch.full_like(graph.ones[..., 0], torch.nan))
    return torch.stack(vectors)


def landmark_importance(layer: InfSAAttention, q: Tensor, k: Tensor) -> Tensor:
    """As the layer has it, (H, N); NaN without landmarks."""
    if not isinstance(layer, LandmarkInfSA):
        return torch.full_like(q[..., 0], torch.nan)
    q, k = q[None], k[None]
    return layer.operate(q, k, k, None, None, need_weights=True)[1][0]


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """(H, N) each to (H,); zeros have no direction, so NaN."""
    norm = torch.linalg.vector_norm
    return (a * b).sum(-1) / (norm(a, dim=-1) * norm(b, dim=-1))


def random_rows(args: argparse.Namespace) -> Iterator[list[str]]:
    """A row for each mean that queries and keys share, over the heads."""
    torch.manual_seed(args.seed)
    layer = InfSAAttention(args.heads * WIDTH, args.heads).eval()
    yield ['shared mean', *OPERATORS]
    for mean in progress(MEANS, 'Comparing'):
        q, k = torch.randn(2, args.heads, args.tokens, WIDTH) + mean
        yield [f'{mean:g}', *numbers(cosines(layer, q, k).nanmean(0))]


def trained_rows(args: argparse.Namespace) -> Iterator[list[str]]:
    """Rows for each head, each layer and the model, means over images."""
    model = init_model(
        args.config, args.checkpoint, cfg_options=args.cfg_options
    )
    found: dict[str, list[Tensor]] = {}
    names = picture_files(args.inputs, args.limit)
    for name in progress(names, 'Comparing'):
        for path, tokens in layer_inputs(model, name).items():
            layer = model.get_submodule(path)
            q, k = layer.queries(tokens[None]), layer.keys(tokens[None])
            found.setdefault(path, []).append(cosines(layer, q[0], k[0]))
    yield ['layer', 'head', *OPERATORS]
    table = {name: torch.stack(parts) for name, parts in found.items()}
    for name, values in table.items():
        for head, row in enumerate(values.nanmean(0)):
            yield [name, str(head), *numbers(row)]
    for name, values in table.items():
        yield [name, 'mean', *numbers(values.nanmean((0, 1)))]
    whole = torch.cat([values.flatten(0, 1) for values in table.values()])
    yield ['mean', '', *numbers(whole.nanmean(0))]
    yield ['paper', '', f'{PAPER:.3f}', *['-'] * (len(OPERATORS) - 1)]


def picture_files(inputs: list[str], limit: int) -> list[str]:
    """Files for folders, evenly spread over each; other names as they are.

    Raises:
        ValueError: a folder has no picture.
    """
    known = Image.registered_extensions()
    names: list[str] = []
    for name in inputs:
        if not Path(name).is_dir():
            names.append(name)
            continue
        files = sorted(
            str(file)
            for file in Path(name).rglob('*')
            if known.get(file.suffix.lower()) in Image.OPEN
        )
        if not files:
            raise ValueError(f'{name}: has no picture in it')
        count = min(limit, len(files))
        names += [files[i * len(files) // count] for i in range(count)]
    return names


def run(model: nn.Module, name: str) -> None:
    """Segment or classify an input."""
    if name.startswith('scene:'):
        _, image, _ = draw_scene(name, model.cfg)
        inference(model, image)
    elif hasattr(model, 'decode_head'):
        inference(model, read_image(name))
    else:
        classify(model, [name])


def layer_inputs(model: nn.Module, name: str) -> dict[str, Tensor]:
    """Run a model; the valid tokens (N, C) of the input that each layer gets.

    Where the model slides a window, those of the last one.

    Raises:
        ValueError: there is no such layer, or there are too many tokens.
    """
    seen = {}

    def keep(path: str) -> Any:
        def hook(layer: nn.Module, args: tuple, kwargs: dict) -> None:
            tokens, valid = args[0], kwargs.get('valid')
            whole = tokens.flatten(0, -2)
            seen[path] = whole if valid is None else whole[valid.flatten()]

        return hook

    handles = [
        module.register_forward_pre_hook(keep(path), with_kwargs=True)
        for path, module in model.named_modules()
        if isinstance(module, InfSAAttention)
    ]
    if not handles:
        raise ValueError('the model has no InfSAAttention to look at')
    try:
        run(model, name)
    finally:
        for handle in handles:
            handle.remove()
    most = max(len(tokens) for tokens in seen.values())
    if most > MAX_TOKENS:
        raise ValueError(
            f'{name}: makes {most} tokens, and their N x N graph is too '
            f'large beyond {MAX_TOKENS}; use a smaller one'
        )
    return seen


def numbers(row: Tensor) -> list[str]:
    """Three decimals, a dash for NaN."""
    return ['-' if x.isnan() else f'{x:.3f}' for x in row]


def parse() -> argparse.Namespace:
    """The arguments; ``rows`` is the function that makes the table."""
    parser = ArgumentParser(
        description='Cosine of each importance with the dominant left '
        'eigenvector of ReLU(QK^T)'
    )
    kinds = parser.add_subparsers(required=True, metavar='{random,trained}')
    random = kinds.add_parser(
        'random', help='on Gaussian queries and keys that share a mean'
    )
    random.set_defaults(rows=random_rows)
    random.add_argument(
        '--tokens', type=cli.positive, default=1024, help='defaults to 1024'
    )
    random.add_argument(
        '--heads',
        type=cli.positive,
        default=4,
        help='how many are drawn and averaged over, defaults to 4',
    )
    random.add_argument('--seed', type=int, default=0, help='defaults to 0')
    trained = kinds.add_parser(
        'trained', help='on every attention layer of a model'
    )
    trained.set_defaults(rows=trained_rows)
    cli.add_config_arguments(trained)
    trained.add_argument('checkpoint', help='trained weights')
    trained.add_argument(
        'inputs',
        nargs='*',
        default=['scene:256'],
        metavar='INPUT',
        help='a picture file, a folder of them, or scene:SIZE[:NUMBER] for a '
        'synthetic scene; defaults to scene:256',
    )
    trained.add_argument(
        '--limit',
        type=cli.positive,
        default=64,
        metavar='N',
        help='pictures of a folder at most, evenly spread; defaults to 64',
    )
    return parser.parse_args()


@torch.no_grad()
def main() -> None:
    """Read the arguments, compare, and print a table in markdown."""
    args = parse()
    # The bar would take what is printed while it is shown.
    header, *rows = args.rows(args)
    for row in (header, ['---'] * len(header), *rows):
        print(f'| {" | ".join(row)} |')


if __name__ == '__main__':
    cli.run(main)
