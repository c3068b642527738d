# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
"""Checkpoints of which a good one is there at any time."""

import shutil
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mmengine.dist import barrier, is_main_process
from mmengine.hooks import CheckpointHook
from mmengine.runner import Runner
from mmseg.registry import HOOKS

from ..files import atomic_path
from ..zero_checkpoint import CONVERTER

_GONE = '.gone'


@HOOKS.register_module()
class SafeCheckpointHook(CheckpointHook):
    """mmengine's ``CheckpointHook``, which removes nothing too early.

    Upstream removes the oldest checkpoint, and the best so far, and then
    writes the new one: with ``max_keep_ckpts=1`` an interrupt leaves none.
    Here

    * the new one is complete and has its name before ``last_checkpoint``
      names it, and only then old ones go; all of that survives a kill at any
      moment;
    * folders of ZeRO are pruned like files, what earlier runs left half done
      too;
    * a checkpoint that is written after validation, with the best score in
      it, says the iteration that it was written at under ``FlexibleRunner``
      too. Upstream's (mmengine 0.10.7) says one more, and training that goes
      on from it leaves one out.

    Args:
        **kwargs: As for mmengine's ``CheckpointHook``.
    """

    keep_ckpt_ids: deque[int]

    def before_train(self, runner: Runner) -> None:
        """As the base's; finish what an interrupt left undone."""
        super().before_train(runner)
        if is_main_process():
            for path in Path(self.out_dir).glob(f'.*{_GONE}'):
                shutil.rmtree(path, ignore_errors=True)
        barrier()

    def _save_checkpoint_with_step(
        self, runner: Runner, step: int, meta: dict
    ) -> None:
        hub, keep = runner.message_hub, self.max_keep_ckpts
        # Upstream's `meta` has been through a runner that has changed it.
        where = (
            dict(epoch=step, iter=runner.iter)
            if self.by_epoch
            else dict(epoch=runner.epoch, iter=step)
        )
        steps = list(self.keep_ckpt_ids) if keep > 0 else []
        if keep > 0:
            if step not in steps:
                steps.append(step)
            # Saved with the oldest: who goes on from here removes it, if an
            # interrupt has prevented that below.
            hub.update_info('keep_ckpt_ids', steps)
        name = self.filename_tmpl.format(step)
        self.last_ckpt = self._path(name)
        hub.update_info('last_ckpt', self.last_ckpt)
        with _counted_as(runner, where, self.by_epoch):
            runner.save_checkpoint(
                self.out_dir,
                name,
                self.file_client_args,
                save_optimizer=self.save_optimizer,
                save_param_scheduler=self.save_param_scheduler,
                meta=where,
                by_epoch=self.by_epoch,
                backend_args=self.backend_args,
                **self.args,
            )
        if is_main_process():
            with atomic_path(Path(runner.work_dir, 'last_checkpoint')) as part:
                part.write_text(self.last_ckpt)
        if keep > 0:
            for old in steps[:-keep]:
                self._remove(self._path(self.filename_tmpl.format(old)))
            self.keep_ckpt_ids = deque(steps[-keep:], keep)
            hub.update_info('keep_ckpt_ids', steps[-keep:])

    def _save_best_checkpoint(self, runner: Runner, metrics: dict) -> None:
        if not self.save_best:
            return
        # Upstream removes what it knows of before it saves.
        before = self._best
        self._best = dict.fromkeys(before)
        super()._save_best_checkpoint(runner, metrics)
        after = self._best
        self._best = {
            key: path or before.get(key) for key, path in after.items()
        }
        for key, path in before.items():
            if path and after.get(key) not in (None, path):
                self._remove(path)

    @property
    def _best(self) -> dict[str, str | None]:
        """The best checkpoint by score."""
        if len(self.key_indicators) == 1:
            return {'': self.best_ckpt_path}
        return dict(self.best_ckpt_path_dict)

    @_best.setter
    def _best(self, paths: dict[str, str | None]) -> None:
        if len(self.key_indicators) == 1:
            (self.best_ckpt_path,) = paths.values()
        else:
            self.best_ckpt_path_dict = paths

    def _publish_model(self, runner: Runner, ckpt_path: str) -> None:
        if Path(ckpt_path).is_dir():
            runner.logger.warning(
                f'{ckpt_path}: a folder, not published; make a plain file of '
                f'it with {CONVERTER}'
            )
            return
        super()._publish_model(runner, ckpt_path)

    def _path(self, name: str) -> str:
        return self.file_backend.join_path(self.out_dir, name)

    def _remove(self, path: str) -> None:
        """Remove a checkpoint; half of a folder never bears its name."""
        if not is_main_process():
            return
        if self.file_backend.isdir(path):
            gone = Path(path).with_name(f'.{Path(path).name}{_GONE}')
            shutil.rmtree(gone, ignore_errors=True)
            Path(path).replace(gone)
            shutil.rmtree(gone, ignore_errors=True)
        elif self.file_backend.isfile(path):
            self.file_backend.remove(path)


@contextmanager
def _counted_as(runner: Runner, meta: dict, by_epoch: bool) -> Iterator[None]:
    """Let a runner that counts for itself come to what ``meta`` says.

    ``FlexibleRunner`` adds one to where its loop is, which after validation
    has gone on already.
    """
    loop = runner.train_loop
    saved = loop._epoch, loop._iter
    loop._epoch = meta['epoch'] - int(by_epoch)
    loop._iter = meta['iter'] - int(not by_epoch)
    try:
        yield
    finally:
        loop._epoch, loop._iter = saved
