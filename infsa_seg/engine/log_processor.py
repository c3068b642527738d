# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Lines of the log that people can read."""

import re
from typing import Any

from mmengine.runner import LogProcessor, Runner
from mmseg.registry import LOG_PROCESSORS


@LOG_PROCESSORS.register_module()
class ShortLogProcessor(LogProcessor):
    """Leaves what there is one of for each layer out of the line.

    It is in the JSON log, in TensorBoard and wherever else scalars go.

    Args:
        hidden (str): Pattern of names that are left out, from their start.
        **kwargs: As for mmengine's ``LogProcessor``.
    """

    def __init__(self, hidden: str = 'gamma/', **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._hidden = re.compile(rf'(?<= )(?:{hidden})\S*: \S+(?:  |$)')

    def get_log_after_iter(
        self, runner: Runner, batch_idx: int, mode: str
    ) -> tuple[dict, str]:
        """The scalars of an iteration by name, and the line."""
        tag, line = super().get_log_after_iter(runner, batch_idx, mode)
        return tag, self._hidden.sub('', line).rstrip()
