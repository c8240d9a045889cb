"""Checkpoints that are damaged, made up, or of another run: one line each, nothing is read otherwise than it was written, and nothing large is made."""
import copy
import errno
import os
import random
import shutil
import zipfile

import pytest
import torch

import checkpoints
from checkpoints import load_checkpoint, make_model
from harness import assert_refused, make_project, read, run, state, train, trained, write

INFINITE = float('inf')


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    folder = make_project(tmp_path_factory.mktemp('project'))
    trained(folder, '--out_dir=out/rope', '--position=rope', '--max_iters=10')
    trained(folder, '--out_dir=out/t5', '--position=t5', '--max_iters=10', '--optimizer=muon')
    trained(folder, '--out_dir=out/seed', '--position=rope', '--max_iters=10', '--seed=5')
    return folder


@pytest.fixture
def copied(project):
    """A copy of the run out/rope to spoil: its folder."""
    folder = os.path.join(project, 'out', 'copied')
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(os.path.join(project, 'out', 'rope'), folder)
    return folder


def sample(project, name='copied', *flags):
    return run(project, 'sample.py', f'out/{name}', '--max_new_tokens=3', '--start=who', *flags)


def resume(project, *flags):
    return train(project, '--out_dir=out/copied', '--position=rope', '--init_from=resume', '--max_iters=20', *flags)


def spoil(folder, change, files=('last.pt', 'ckpt.pt')):
    """Changes what both checkpoints of a run hold, as somebody might who knows the digests."""
    for file in files:
        path = os.path.join(folder, file)
        content = torch.load(path, weights_only=True)
        change(content)
        content.pop('digests', None)
        torch.save(content, path)


# ----------------------------------------------------------------------------------------------------------------------
# what is read is what was written

def same(one, other):
    """Whether two parts of a checkpoint hold the same."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize('where', ['anywhere', 'in the directory'])
def test_a_flipped_bit_is_refused_or_changes_nothing(where, project, copied, capsys):
    """Of a checkpoint, and of its zip directory alone, whose marks decide how torch reads the weights, and no check sum covers."""
    path = os.path.join(copied, 'last.pt')
    whole, content = read(path), load_checkpoint(path)
    with zipfile.ZipFile(path) as archive:
        begin = archive.start_dir if where == 'in the directory' else 0
    chance, refused = random.Random(3), 0
    for _ in range(150):
        flipped = bytearray(whole)
        flipped[chance.randrange(begin, len(whole))] ^= 1 << chance.randrange(8)
        write(path, bytes(flipped))
        try:
            found = load_checkpoint(path)
        except SystemExit as stop:
            refused += 1
            assert stop.code == 2
        else:
            assert all(same(found[part], content[part]) for part in ('model', 'optimizer', 'batch_generator'))
    assert refused > 20
    assert all(line.startswith(('pytest', '__main__')) or ': ' in line for line in capsys.readouterr().err.splitlines())


def test_changed_weights_are_seen_by_their_digest(project, copied):
    path = os.path.join(copied, 'ckpt.pt')
    content = torch.load(path, weights_only=True)
    content['model']['lm_head.weight'][0, 0] += 1e-6
    torch.save(content, path)
    assert_refused(sample(project), 'ckpt.pt is damaged', 'its model')


def test_checkpoints_without_digests_still_load(project, copied):
    spoil(copied, lambda content: content.pop('run'))
    assert sample(project).code == 0 and resume(project).code == 0


# ----------------------------------------------------------------------------------------------------------------------
# of one run

@pytest.mark.parametrize('other, words', [('t5', 'different models'), ('seed', 'different')])
def test_a_folder_put_together_from_two_runs_is_refused(other, words, project, copied):
    for file in ('last.pt', 'ckpt.pt'):
        shutil.copy(os.path.join(project, 'out', other, file), copied)
    assert_refused(sample(project), 'config.json', words)
    assert_refused(resume(project), 'config.json', words)
    assert_refused(run(project, 'compare.py', 'out/copied', 'out/rope', '--out_dir=out/table'), 'copied')


# ----------------------------------------------------------------------------------------------------------------------
# fields that are none

@pytest.mark.parametrize('field, value', [
    ('best_val_loss', 'low'), ('best_val_loss', None), ('best_val_loss', float('nan')), ('iter_num', -5), ('iter_num', 'ten'), ('log', 3),
    ('log', [[1, 2]]), ('log', ['row']), ('log', [[0, 0, 0.0, 0.1, '', 'x']]), ('seconds', 'long'), ('seconds', -INFINITE), ('config', {}),
    ('config', []), ('optimizer', [1]), ('optimizer', {}), ('loss_sum', None), ('loss_count', -1), ('data', 'x'), ('batch_generator', [1]),
    ('scaler', {'scale': 'x'}), ('model', {'lm_head.weight': 3}), ('model', {1: torch.zeros(2)}), ('model_args', {'n_layer': 'x'}), ('tokenizer', 3)])
def test_fields_that_are_none_are_one_line(field, value, project, copied):
    spoil(copied, lambda content: content.update({field: value}))
    result = resume(project)
    assert_refused(result, 'out/copied')
    if field in ('best_val_loss', 'model', 'model_args', 'tokenizer'):
        assert_refused(run(project, 'sample.py', 'out/copied', 'out/rope', '--max_new_tokens=3', '--start=who'), 'out/copied')


def test_an_optimizers_state_of_another_shape_is_one_line(project, copied):
    spoil(copied, lambda content: content['optimizer'][0]['state'][0].update(exp_avg=torch.zeros(2)))
    assert_refused(resume(project), 'last.pt', 'damaged', 'optimizer')


def test_settings_that_are_none_are_one_line(project, copied):
    for name, value in (('learning_rate', 'fast'), ('batch_size', 0), ('n_layer', 'x'), ('dropout', 7.0), ('seed', None)):
        spoil(copied, lambda content: content['config'].update({name: value}))
        assert_refused(resume(project), 'out/copied')
        shutil.copy(os.path.join(project, 'out', 'rope', 'last.pt'), copied)
        shutil.copy(os.path.join(project, 'out', 'rope', 'ckpt.pt'), copied)


def cyclic(content):
    content['log'].append(content['log'])


def with_weights(function):
    def change(content):
        content['model'] = {name: function(tensor) for name, tensor in content['model'].items()}
    return change


@pytest.mark.parametrize('change, words', [
    (with_weights(lambda tensor: tensor * float('nan')), 'not finite'), (with_weights(lambda tensor: tensor + INFINITE), 'not finite'),
    (with_weights(lambda tensor: tensor.to(torch.int8)), 'floating-point'), (with_weights(lambda tensor: tensor.to(torch.complex64)), 'floating-point'),
    (lambda content: content['model_args'].update(causal=False), 'causal'), (lambda content: content.pop('model_args'), 'model_args'),
    (lambda content: content['model_args'].update(rope_scaling='ntk', rope_factor=1e290), 'rope_factor'), (cyclic, 'nested'),
    (lambda content: content['model_args'].update(unknown=1), 'unknown'), (lambda content: content['model'].pop('lm_head.weight'), 'fit')])
def test_models_that_are_none_are_one_line(change, words, project, copied):
    spoil(copied, change)
    assert_refused(sample(project), 'out/copied', words)
    assert_refused(resume(project), 'out/copied', words)


def test_a_strangers_escapes_and_long_texts_do_not_reach_the_screen(project, copied):
    spoil(copied, lambda content: content['model_args'].update({'\x1b]0;title\x07' + 'x' * 10 ** 6: 1}))
    result = sample(project)
    assert_refused(result, 'out/copied')
    assert '\x1b' not in result.err and '\x07' not in result.err


# ----------------------------------------------------------------------------------------------------------------------
# size

def test_a_small_file_that_describes_a_large_model_makes_none(project, copied, monkeypatch):
    """200 layers of width 4096 would take 160 GB: the weights are few, and that is seen before a model is made."""
    spoil(copied, lambda content: content['model_args'].update(n_layer=200, n_embd=4096))
    os.remove(os.path.join(copied, 'config.json'))                          # which would tell them apart
    monkeypatch.setattr(checkpoints, 'GPT', lambda config: pytest.fail('a model was made') if
                        torch.get_default_device().type != 'meta' else type('Fits', (), {'load_state_dict': int, 'parameters': list}))
    assert_refused(sample(project), 'out/copied', 'do not fit')


def test_a_zip_bomb_is_not_unpacked(project, copied):
    path = os.path.join(copied, 'ckpt.pt')
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as archive:
        archive.writestr('archive/data.pkl', b'\0' * 50_000_000)
    assert os.path.getsize(path) < 100_000
    assert_refused(sample(project), 'ckpt.pt cannot be read')


# ----------------------------------------------------------------------------------------------------------------------
# what is not the file's fault

@pytest.mark.parametrize('error, word', [
    (MemoryError(), 'memory'), (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 'memory'),
    (OSError(errno.EMFILE, 'x'), 'Too many open files'), (OSError(errno.EIO, 'x'), 'Input/output error'),
    (OSError(errno.ESTALE, 'x'), 'Stale'), (OSError(errno.EACCES, 'x'), 'Permission denied')])
@pytest.mark.parametrize('place', ['torch.load', 'open'])
def test_a_healthy_checkpoint_is_never_called_damaged(place, error, word, project, monkeypatch, capsys):
    def broken(*arguments, **options):
        raise copy.copy(error) if not isinstance(error, OSError) else OSError(*error.args)
    path = os.path.join(project, 'out', 'rope', 'last.pt')
    if place == 'open':
        monkeypatch.setattr(checkpoints, 'open', broken, raising=False)
    else:
        monkeypatch.setattr(torch, 'load', broken)
    with pytest.raises(SystemExit) as stop:
        load_checkpoint(path)
    line = capsys.readouterr().err
    assert stop.value.code == 2 and word in line and 'damaged' not in line and 'delete' not in line


def test_a_whole_checkpoint_makes_its_model(project):
    path = os.path.join(project, 'out', 't5', 'last.pt')
    model = make_model(load_checkpoint(path), path)
    assert all(torch.equal(tensor, state(project, 't5')['model'][name]) for name, tensor in model.state_dict().items())
