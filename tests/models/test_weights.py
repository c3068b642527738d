# Copyright (c) infsa_seg contributors. SPDX-License-Identifier: Apache-2.0
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn.functional import interpolate

from infsa_seg.models.utils import check_checkpoint, load_pretrained


class Grid(nn.Module):
    """Resamples a grid of another size, as a position embedding does."""

    def __init__(self, size):
        super().__init__()
        self.grid = nn.Parameter(torch.zeros(1, 2, size, size))

    def _load_from_state_dict(self, state, prefix, *args):
        grid = state.get(prefix + 'grid')
        if grid is not None and grid.ndim == 4:
            state[prefix + 'grid'] = interpolate(grid, self.grid.shape[2:])
        super()._load_from_state_dict(state, prefix, *args)


class Net(nn.Module):
    def __init__(self, width=3, size=4):
        super().__init__()
        self.proj = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.position = Grid(size)


class Code:
    def __reduce__(self):
        return print, ('this must never be printed',)


@pytest.fixture
def save(tmp_path):
    def _save(content):
        path = tmp_path / 'weights.pth'
        torch.save(content, path)
        return str(path)

    return _save


def weights(prefix='', **kwargs):
    state = Net(**kwargs).state_dict()
    return OrderedDict(
        (prefix + name, torch.full_like(value, 7.0))
        for name, value in state.items()
    )


@pytest.mark.parametrize('key', ['state_dict', 'model', None])
@pytest.mark.parametrize(
    'prefix',
    ['', 'backbone.', 'module.', 'model.', 'module.model.backbone.'],
)
def test_layouts_and_prefixes(save, key, prefix):
    content = weights(prefix)
    net = Net()
    report = load_pretrained(net, save({key: content} if key else content))
    assert report.complete
    assert report.prefix == prefix
    assert set(report.loaded) == set(net.state_dict())
    assert all((value == 7).all() for value in net.state_dict().values())


def test_wrapper_name_inside_the_module(save):
    """A module that has a `backbone` itself keeps that part of its names."""
    net = nn.ModuleDict({'backbone': Net()})
    report = load_pretrained(net, save(weights('module.backbone.')))
    assert report.prefix == 'module.'
    assert report.complete


def test_backbone_out_of_a_whole_segmentor(save):
    state = weights('backbone.')
    state['decode_head.conv_seg.weight'] = torch.ones(2)
    report = load_pretrained(Net(), save({'state_dict': state}))
    assert report.complete
    assert report.outside == 1
    assert '1 under other names left out' in report.summary()


def test_report_names_every_kind_of_trouble(save):
    state = weights('backbone.')
    del state['backbone.norm.bias']
    state['backbone.extra'] = torch.ones(1)
    state['backbone.proj.bias'] = torch.ones(5)
    net = Net()
    report = load_pretrained(net, save(state))
    assert report.missing == ('norm.bias',)
    assert report.unexpected == ('extra',)
    assert report.mismatched == {'proj.bias': ((5,), (3,))}
    assert set(report.loaded) == {'proj.weight', 'norm.weight'} | {
        'position.grid'
    }
    assert (net.proj.weight == 7).all()
    assert not (net.proj.bias == 1).any()
    assert not report.complete
    for text in ('loaded 3 of 5', 'norm.bias', 'extra', '(5,) into (3,)'):
        assert text in report.summary()


def test_own_adaptation_counts_as_loaded(save):
    net = Net(size=8)
    report = load_pretrained(net, save(weights(size=4)))
    assert report.complete
    assert (net.position.grid == 7).all()


def test_meta_is_handed_on(save):
    meta = {'dataset_meta': {'classes': ('a', 'b')}}
    path = save({'state_dict': weights(), 'meta': meta})
    assert load_pretrained(Net(), path).meta == meta
    assert load_pretrained(Net(), save(weights())).meta == {}


def test_given_prefix(save):
    state = weights('student.') | weights('teacher.')
    path = save(state)
    for prefix in ('teacher', 'teacher.'):
        report = load_pretrained(Net(), path, prefix=prefix)
        assert report.complete
        assert report.outside == 5


@pytest.mark.parametrize(
    'content',
    [
        {'layer1.conv.weight': torch.ones(1)},
        {'state_dict': {}},
        {'proj.weight': torch.ones(9)},
    ],
)
def test_nothing_fits(save, content):
    path = save(content)
    with pytest.raises(ValueError, match='nothing in it fits Net') as error:
        load_pretrained(Net(), path)
    assert path in str(error.value)
    assert 'proj.weight' in str(error.value)


def test_foreign_pickle_is_refused_and_not_run(save, capsys):
    path = save({'state_dict': weights(), 'extra': Code()})
    with pytest.raises(ValueError, match=r'refused.*print') as error:
        load_pretrained(Net(), path)
    assert path in str(error.value)
    assert '\n' not in str(error.value)
    assert 'never be printed' not in capsys.readouterr().out


def test_legacy_format_is_checked_too(tmp_path):
    """The format of before torch 1.6 is no zip archive."""
    path = tmp_path / 'old.pth'
    torch.save(weights(), path, _use_new_zipfile_serialization=False)
    assert load_pretrained(Net(), str(path)).complete
    path.write_bytes(pickle.dumps(Code()))
    with pytest.raises(ValueError, match=r'old\.pth'):
        check_checkpoint(path)


def test_unreadable_files(tmp_path, save):
    with pytest.raises(FileNotFoundError, match=r'none\.pth'):
        load_pretrained(Net(), str(tmp_path / 'none.pth'))
    with pytest.raises(FileNotFoundError, match='no such checkpoint file'):
        check_checkpoint(tmp_path)
    whole = (tmp_path / save(weights())).read_bytes()
    for name, content in {
        'empty.pth': b'',
        'text.pth': b'hello world, this is no checkpoint',
        'half.pth': whole[: len(whole) // 2],
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f'{name}: not a checkpoint'):
            check_checkpoint(tmp_path / name)
    with pytest.raises(ValueError, match='holds a list'):
        check_checkpoint(save([1, 2]))
