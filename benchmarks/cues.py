# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Which operators carry context: train each on both cues, print a table.

``python benchmarks/cues.py`` trains the demo network with each operator under
one recipe and measures it on test scenes that it has not seen. Without context
neither cue can be used, so ``none`` is the control.
"""

import tempfile
from argparse import ArgumentParser
from pathlib import Path

from infsa_seg.apis import cli, evaluate, train

CONFIGS = Path(__file__).parents[1] / 'configs'
CUES = {
    'scene': CONFIGS / 'infvit_seg_demo.py',
    'legend': CONFIGS / 'infvit_seg_demo_legend.py',
}
VARIANTS = ('neumann', 'linear', 'softmax', 'none')


def measure(cue: str, variant: str, options: dict) -> dict[str, float]:
    """Train one variant on one cue; its metrics on test scenes, in percent."""
    options = {**options, 'model.backbone.attn_cfg.variant': variant}
    with tempfile.TemporaryDirectory() as work_dir:
        train(CUES[cue], work_dir, cfg_options=options)
        checkpoint = Path(work_dir, 'last_checkpoint').read_text()
        return evaluate(CUES[cue], checkpoint, work_dir, cfg_options=options)


def main() -> None:
    """Read the arguments and print a row per run, as it ends."""
    parser = ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--cues', nargs='+', choices=CUES, default=[*CUES])
    parser.add_argument(
        '--variants', nargs='+', choices=VARIANTS, default=[*VARIANTS]
    )
    parser.add_argument(
        '--cfg-options', nargs='+', action=cli.CfgOptions, default={}
    )
    args = parser.parse_args()
    rows = ['| cue | variant | pixel accuracy | mIoU |', '|---|---|---|---|']
    for cue in args.cues:
        for variant in args.variants:
            metrics = measure(cue, variant, args.cfg_options)
            rows.append(
                f'| {cue} | {variant} | {metrics["aAcc"]:.1f} '
                f'| {metrics["mIoU"]:.1f} |'
            )
    print('\n'.join(rows))


if __name__ == '__main__':
    cli.run(main)
