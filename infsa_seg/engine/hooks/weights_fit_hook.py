# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""A guard against the checkpoint of another model."""

from mmengine.hooks import Hook
from mmengine.runner import Runner, get_state_dict
from mmseg.registry import HOOKS


@HOOKS.register_module()
class WeightsFitHook(Hook):
    """Stops where a checkpoint has nothing in common with the model.

    Upstream warns of every name and goes on with random weights.
    """

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Compare the names of a file with those of the model.

        Raises:
            ValueError: They have none in common.
        """
        names = checkpoint.get('state_dict', checkpoint)
        # What wraps the model says `module.`, and upstream takes it off.
        own = [
            name.removeprefix('module.')
            for name in get_state_dict(runner.model)
        ]
        if not {name.removeprefix('module.') for name in names} & set(own):
            raise ValueError(
                f'{runner.cfg.load_from}: nothing in it fits the model; the '
                f'file has {next(iter(names), "nothing")}, the model expects '
                f'{own[0]}'
            )
