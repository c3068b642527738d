# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""How far each fast form is from its plain form: print the worst errors.

``python benchmarks/exactness.py`` draws random problems (sizes, masks,
splits) and prints, per form, the largest error seen in output and gradient.
Float64 errors are absolute, on values of about one; those of other dtypes are
relative to the largest value of a float64 run on the same rounded input.
"""

import functools
import math
from argparse import ArgumentParser
from collections.abc import Callable

import torch
from torch import Tensor

from infsa_seg.apis import cli
from infsa_seg.apis.progress import progress
from infsa_seg.ops import FEATURE_MAPS, graphs, linear, neumann, reference
from infsa_seg.ops.tokens import as_discount, hide

HEADS, LANDMARKS = 2, 8
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Form = Callable[..., Tensor]


def landmark_factors(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Both factors for landmarks that are the same in every dtype."""
    generator = torch.Generator().manual_seed(0)
    landmarks = torch.randn(HEADS, LANDMARKS, q.shape[-1], generator=generator)
    landmarks = landmarks.bfloat16().half().to(q.dtype)
    tau = graphs.landmark_temperature(q.new_full((HEADS,), 2.25))
    return (
        graphs.landmark_queries(q, landmarks, tau),
        graphs.landmark_keys(k, landmarks, tau),
    )


def landmark(q, k, v, discount, valid=None, num_chunks=1, *, hops):
    phi_q, phi_k = landmark_factors(q, k)
    return neumann.neumann_chain(
        phi_q, phi_k, v, discount, hops, valid, num_chunks
    )


def plain_landmark(q, k, v, discount, valid=None, *, hops):
    phi_q, phi_k = (hide(x, valid) for x in landmark_factors(q, k))
    chain = reference.landmark_chain(phi_q, phi_k)
    gamma = as_discount(discount, v)
    return reference.neumann_series(chain, hide(v, valid), gamma, hops)


def feature(q, k, v, discount, valid=None, num_chunks=1, *, graph, op, hops):
    phi, _ = FEATURE_MAPS[graph]
    return op(phi(q), phi(k), v, discount, hops, valid, num_chunks)


def plain_frobenius(q, k, v, discount, valid=None, *, graph, hops):
    phi, _ = FEATURE_MAPS[graph]
    return reference.neumann_frobenius(
        phi(q), phi(k), v, discount, hops, valid
    )


def plain_rows(q, k, v, discount, valid=None, *, graph, hops):
    phi, _ = FEATURE_MAPS[graph]
    chain = reference.row_chain(phi(q), phi(k), valid)
    gamma = as_discount(discount, v)
    return reference.neumann_series(chain, hide(v, valid), gamma, hops)


def plain_linear(q, k, v, discount, valid=None):
    return reference.linear_infsa(q, k, v, discount, valid)[0]


def forms() -> dict[str, tuple[Form, Form]]:
    """Fast and plain form by name."""
    found: dict[str, tuple[Form, Form]] = {
        'linear': (linear.linear_infsa, plain_linear)
    }
    for hops in (1, 3, math.inf):
        fast = functools.partial(landmark, hops=hops)
        plain = functools.partial(plain_landmark, hops=hops)
        found[f'landmark, {hops:g} hops'] = fast, plain
    for graph in FEATURE_MAPS:
        for norm, op, dense in (
            ('frobenius', neumann.neumann_graph, plain_frobenius),
            ('row', neumann.neumann_rows, plain_rows),
        ):
            if (graph, norm) == ('identity', 'row'):
                continue
            for hops in (1, math.inf):
                found[f'{graph} {norm}, {hops:g} hops'] = (
                    functools.partial(feature, graph=graph, op=op, hops=hops),
                    functools.partial(dense, graph=graph, hops=hops),
                )
    return found


def draw(seed: int, num_tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys and values, rounded to ``dtype``, in float64."""
    generator = torch.Generator().manual_seed(seed)
    shape = (3, 1, HEADS, num_tokens, 16)
    x = torch.randn(shape, dtype=torch.float64, generator=generator) + 0.3
    return list(x.to(dtype).double())


def run(form: Form, tensors: list[Tensor], *args, **kwargs) -> list[Tensor]:
    """Output, and the gradients of q, k, v and the discount."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    gamma = torch.full((HEADS,), 0.75, dtype=tensors[0].dtype)
    gamma.requires_grad_()
    out = form(*leaves, gamma, *args, **kwargs)
    out.square().sum().mul(0.5).backward()
    grads = [x.grad for x in (*leaves, gamma)]
    return [out.detach(), *(g for g in grads if g is not None)]


def exact_errors(fast: Form, plain: Form, seed: int) -> tuple[float, float]:
    """Worst errors of output and gradient in float64, mask and chunks too."""
    generator = torch.Generator().manual_seed(seed)
    size, chunks = torch.randint(1, 60, (2,), generator=generator).tolist()
    valid = torch.rand(1, size, generator=generator) < 0.8
    valid[:, 0] = True
    tensors = draw(seed, size, torch.float64)
    pairs = list(
        zip(
            run(fast, tensors, valid, chunks),
            run(plain, tensors, valid),
            strict=True,
        )
    )
    errors = [(a - b).abs().max().item() for a, b in pairs]
    return errors[0], max(errors[1:])


def dtype_error(
    fast: Form, seed: int, dtype: torch.dtype, num_tokens: int
) -> float:
    """Worst error of the output, relative to its largest value."""
    tensors = draw(seed, num_tokens, dtype)
    gamma = torch.full((HEADS,), 0.75, dtype=torch.float64)
    with torch.no_grad():
        exact = fast(*tensors, gamma)
        rough = fast(*(x.to(dtype) for x in tensors), gamma.to(dtype))
    return ((rough.double() - exact).abs().max() / exact.abs().max()).item()


def main() -> None:
    """Read the arguments and print the table."""
    parser = ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--problems', type=int, default=100)
    parser.add_argument('--tokens', type=int, default=4096)
    parser.add_argument('--many', type=int, default=331_776)
    args = parser.parse_args()
    header = ['form', 'float64, output', 'float64, gradient']
    header += [f'{str(d)[6:]}, N={args.tokens:,}' for d in DTYPES]
    header += [f'float32, N={args.many:,}']
    rows = [header, ['---'] * len(header)]
    for name, (fast, plain) in progress(forms().items(), 'forms'):
        exact = [exact_errors(fast, plain, i) for i in range(args.problems)]
        worst = [max(column) for column in zip(*exact, strict=True)]
        worst += [
            max(dtype_error(fast, i, d, args.tokens) for i in range(3))
            for d in DTYPES
        ]
        worst.append(dtype_error(fast, 0, torch.float32, args.many))
        rows.append(
            [
                name.replace('inf hops', '∞ hops').replace('1 hops', '1 hop'),
                *worst,
            ]
        )
    for row in rows:
        cells = [x if isinstance(x, str) else f'{x:.0e}' for x in row]
        print(f'| {" | ".join(cells)} |')


if __name__ == '__main__':
    cli.run(main)
