# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import math
from types import SimpleNamespace

import pytest
import torch
from mmengine.optim import OptimWrapper, OptimWrapperDict
from torch import nn

from infsa_seg.apis import cli, train
from infsa_seg.engine import NonFiniteError, NonFiniteHook
from tests.apis.conftest import project

from .toy import build_runner

__all__ = ['project']

GOOD = (1.0, 1.0)
# Its loss is no number.
BAD = (math.nan, 1.0)
# Its loss is 1, and its gradient infinite.
STEEP = (1.0, 0.0)


def run(work_dir, pairs, batch_size=1, interval=1, **kwargs):
    hooks = {
        'checkpoint': {
            'type': 'SafeCheckpointHook',
            'by_epoch': False,
            'interval': 2,
        },
    }
    runner = build_runner(
        work_dir,
        pairs,
        batch_size,
        default_hooks=hooks,
        custom_hooks=[{'type': 'NonFiniteHook', 'interval': interval}],
        **kwargs,
    )
    with pytest.raises(NonFiniteError) as error:
        runner.train()
    return runner, str(error.value)


@pytest.mark.parametrize(
    ('pair', 'what'),
    [
        (BAD, 'a loss is not finite: loss=nan, loss_fit=nan with the batch'),
        ((math.inf, 1.0), 'loss=inf, loss_fit=inf with the batch: '),
        (STEEP, 'gradient is not finite, though the losses are: with the'),
    ],
)
def test_one_line_says_what_where_and_from_where_to_go_on(
    tmp_path, pair, what
):
    pairs = [GOOD] * 8
    pairs[5] = pair
    _, message = run(tmp_path, pairs, batch_size=2)
    assert message.startswith('iteration 3: ')
    assert what in message
    assert (
        'image4.tif (32x64 at row 4, column 16), '
        'image5.tif (32x64 at row 5, column 16)'
    ) in message
    assert message.endswith(
        f'the last good checkpoint is {tmp_path / "iter_2.pth"}'
    )
    assert '\n' not in message


@pytest.mark.parametrize('pair', [BAD, STEEP])
def test_weights_are_those_of_the_last_good_step(tmp_path, pair):
    runner, _ = run(tmp_path, [GOOD, GOOD, pair])
    saved = torch.load(tmp_path / 'iter_2.pth', weights_only=True)
    assert torch.equal(runner.model.weight, saved['state_dict']['weight'])


@pytest.mark.parametrize('pair', [BAD, STEEP])
def test_nothing_is_saved_after_a_bad_step(tmp_path, pair):
    """Though a checkpoint is due in that iteration, and at the end."""
    _, message = run(tmp_path, [GOOD, pair, GOOD])
    assert not list(tmp_path.glob('*.pth'))
    assert message.endswith('there is no good checkpoint yet')


def test_clipping_hides_nothing(tmp_path):
    wrapper = {
        'optimizer': {'type': 'SGD', 'lr': 0.1},
        'clip_grad': {'max_norm': 1.0},
    }
    runner, message = run(tmp_path, [GOOD, STEEP], optim_wrapper=wrapper)
    assert message.startswith('iteration 2: the gradient')
    assert runner.model.weight.isfinite().all()


def test_gradients_that_are_gathered_over_steps(tmp_path):
    """The loss ends it before anything is done with the sum."""
    wrapper = {
        'optimizer': {'type': 'SGD', 'lr': 0.1},
        'accumulative_counts': 3,
    }
    runner, message = run(tmp_path, [GOOD, BAD, GOOD], optim_wrapper=wrapper)
    assert message.startswith('iteration 2: a loss')
    assert torch.equal(runner.model.weight, torch.ones(2))


def test_interval_of_the_gradient(tmp_path):
    """In between, the next loss tells."""
    _, message = run(tmp_path, [GOOD, STEEP, GOOD], interval=3)
    assert message.startswith('iteration 3: a loss is not finite: loss=nan')
    with pytest.raises(ValueError, match='interval=0: give 1 or more'):
        NonFiniteHook(interval=0)


def test_numbers_that_are_no_losses_may_be_anything(tmp_path):
    """The accuracy of the toy is no number."""
    runner = build_runner(
        tmp_path, [GOOD] * 3, custom_hooks=[{'type': 'NonFiniteHook'}]
    )
    runner.train()
    assert runner.iter == 3
    assert not runner.optim_wrapper.optimizer._optimizer_step_pre_hooks


def test_a_scaler_that_skips_steps_is_left_alone():
    """Fused optimizers are called by it whatever the gradient is."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], 0.1, fused=True)
    hook = NonFiniteHook()
    runner = SimpleNamespace(optim_wrapper=OptimWrapper(optimizer))
    hook.before_train(runner)
    weight.grad = torch.tensor([math.inf])
    optimizer.found_inf = torch.ones(1)
    optimizer.step()
    assert weight.grad is not None
    del optimizer.found_inf
    optimizer.step()
    assert weight.grad is None
    assert weight.item() == 1


def test_several_optimizers():
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    wrappers = {
        name: OptimWrapper(torch.optim.SGD([weight], 1.0))
        for name, weight in zip('ab', weights, strict=True)
    }
    runner = SimpleNamespace(optim_wrapper=OptimWrapperDict(**wrappers))
    NonFiniteHook().before_train(runner)
    for weight, value in zip(weights, (1.0, math.nan), strict=True):
        weight.grad = torch.tensor([value])
        wrappers['ab'[int(value != 1.0)]].step()
    assert [weight.item() for weight in weights] == [0.0, 1.0]


def test_large_gradients_are_no_infinite_ones():
    weight = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], 1e-15)
    NonFiniteHook().before_train(
        SimpleNamespace(optim_wrapper=OptimWrapper(optimizer))
    )
    weight.grad = torch.full((4,), 1e15)
    optimizer.step()
    assert torch.allclose(weight, -torch.ones(4))


@pytest.mark.parametrize('adapts', [True, False])
def test_deepspeed_that_skips_steps(adapts):
    """With a scale that adapts itself that is its way of finding one."""
    optimizer = SimpleNamespace(overflow=True, dynamic_loss_scale=adapts)
    runner = SimpleNamespace(
        iter=0,
        optim_wrapper=SimpleNamespace(optimizer=optimizer),
        message_hub=SimpleNamespace(runtime_info={}),
    )
    hook = NonFiniteHook()
    hook.before_train(runner)
    outputs = {'loss': torch.ones(())}
    if adapts:
        hook.after_train_iter(runner, 0, {}, outputs)
        with pytest.raises(NonFiniteError, match='a loss is not finite'):
            hook.after_train_iter(runner, 0, {}, {'loss': math.inf})
    else:
        with pytest.raises(NonFiniteError, match='though the losses are'):
            hook.after_train_iter(runner, 0, {}, outputs)


def test_images_without_a_file():
    runner = SimpleNamespace(
        iter=0,
        optim_wrapper=SimpleNamespace(optimizer=SimpleNamespace(overflow=1)),
        message_hub=SimpleNamespace(runtime_info={'last_ckpt': 'gone.pth'}),
    )
    hook = NonFiniteHook()
    samples = [
        SimpleNamespace(metainfo={'sample_idx': 7}),
        SimpleNamespace(),
    ]
    with pytest.raises(NonFiniteError) as error:
        hook.after_train_iter(runner, 0, {'data_samples': samples}, {})
    assert 'with the batch: sample 7, sample without a name' in str(
        error.value
    )
    # One that was saved and has been removed is none to go on from.
    assert str(error.value).endswith('there is no good checkpoint yet')
    with pytest.raises(NonFiniteError, match='with the batch: unknown'):
        hook.after_train_iter(runner, 0, (1, 2), {})


def test_the_tool_ends_with_one_line(project, tmp_path, capsys):
    options = {
        'optim_wrapper': {'optimizer': {'lr': 1e30}},
        'param_scheduler': None,
    }
    with pytest.raises(SystemExit) as end:
        cli.run(
            lambda: train(
                project / 'tiny.py', str(tmp_path), False, False, options
            )
        )
    assert end.value.code == 1
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert 'error: iteration 2: a loss is not finite: loss=' in line
    assert str(project / 'data' / 'image') in line
    assert not list(tmp_path.glob('*.pth'))
