"""What train.py promises of one run: what it sees, what it steps by, what it measures, what it leaves behind, what it says."""
import functools
import hashlib
import json
import math
import os
import subprocess
import shutil

import numpy as np
import pytest
import torch
import torch._dynamo
from torch.nn import functional as F

import measure
from configurator import declared_settings, scheme_options
from dataset import Dataset
from settle import settle
from machine import git_commit
from model import GPT, SCHEMES, GPTConfig
from harness import (ROOT, Terminal, assert_refused, command, contents, differences, differences_of_runs, make_project, read, read_log,
                     state, train, trained, without_times)


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    return make_project(tmp_path_factory.mktemp('project'), files=False)


# ----------------------------------------------------------------------------------------------------------------------
# the data sets

@pytest.mark.parametrize('name', ['shakespeare_char', 'shakespeare_bpe', 'tinyshakespeare', 'word_order', 'text'])
def test_thirty_steps_lower_the_loss(name, tmp_path):
    make_project(tmp_path)                              # the prepare scripts import from two folders up
    for folder in {name, 'shakespeare_char'}:           # shakespeare_bpe takes its text from shakespeare_char's
        shutil.copytree(os.path.join(ROOT, 'data', folder), tmp_path / 'data' / folder)
    folder = tmp_path / 'data' / name
    if not (folder / 'meta.json').exists():
        done = command(tmp_path, folder / 'prepare.py', *[f'--input={os.path.join(ROOT, "model.py")}'] * (name == 'text'))
        if done.code and name != 'text':
            pytest.skip(done.err.strip() or done.out.strip())               # no network
        assert done.code == 0, done.err
    # Scoring all of a validation text takes longer than the 30 steps, so only its first 2,000 tokens are kept.
    meta = json.loads((folder / 'meta.json').read_text())
    content = (folder / 'val.bin').read_bytes()[:4000]
    (folder / 'val.bin').write_bytes(content)
    meta['val_tokens'], meta['sha256']['val.bin'] = 2000, hashlib.sha256(content).hexdigest()
    (folder / 'meta.json').write_text(json.dumps(meta))

    trained(str(tmp_path), f'--dataset={name}', '--out_dir=out/run')
    losses = [row[5] for row in read_log(tmp_path, 'run')]
    assert abs(losses[0] - math.log(meta['vocab_size'])) < 0.1          # untrained: every token is as likely
    assert losses[-1] < losses[0] - 0.2


# ----------------------------------------------------------------------------------------------------------------------
# batches and steps

def recorded_batches(project, monkeypatch, *flags):
    """The starts of all batches that a run draws: (steps, accumulation, batch) in one tensor."""
    drawn, randint = [], torch.randint

    def randint_and_record(*arguments, **options):
        result = randint(*arguments, **options)
        drawn.append(result)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(torch, 'randint', randint_and_record)
        trained(project, '--overwrite', '--out_dir=out/batches', *flags)
    return torch.stack([starts for starts in drawn if starts.dim() == 2])


def test_same_seed_same_batches(project, monkeypatch):
    expected = recorded_batches(project, monkeypatch, '--max_iters=6', '--eval_interval=2')
    assert expected.shape == (6, 1, 4)
    for position in SCHEMES:
        assert torch.equal(recorded_batches(project, monkeypatch, '--max_iters=6', '--eval_interval=6', f'--position={position}'), expected)
    for flag in ('--eval_interval=1', '--eval_windows=3', '--dropout=0.3', '--n_layer=2', '--optimizer=muon', '--log_interval=1'):
        assert torch.equal(recorded_batches(project, monkeypatch, '--max_iters=6', flag), expected)
    assert not torch.equal(recorded_batches(project, monkeypatch, '--max_iters=6', '--seed=1'), expected)


def test_data_on_the_device_and_on_the_disk_give_the_same_run(project, monkeypatch):
    """Few tokens are kept on the device, many are read from the disk batch by batch."""
    trained(project, '--out_dir=out/on_device', '--gradient_accumulation_steps=2')
    with monkeypatch.context() as patch:
        patch.setattr(measure, 'MOST_KEPT', 100)
        patch.setattr(measure, 'send', lambda array, device, send=measure.send: send(array, device) if len(array) < 100 else 1 / 0)
        trained(project, '--out_dir=out/read', '--gradient_accumulation_steps=2')
    assert not differences_of_runs(project, 'on_device', 'read')


@pytest.mark.parametrize('emulated', [True, False])
def test_a_gpu_that_only_emulates_bfloat16_trains_in_float16(emulated, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_bf16_supported', lambda including_emulation=True: including_emulation or not emulated)
    settings = {name: setting.value for name, setting in declared_settings(os.path.join(ROOT, 'train.py')).items()}
    settled = settle({**settings, **{name: option.value for name, option in scheme_options().items()}}, {}, torch.device('cuda'))
    assert settled.settings['dtype'] == ('float16' if emulated else 'bfloat16')


def test_evaluation_leaves_training_alone(project):
    for number, interval in enumerate((3, 10, 30)):
        trained(project, f'--eval_interval={interval}', '--dropout=0.2', f'--out_dir=out/interval{number}')
    one, two, three = (state(project, f'interval{number}') for number in range(3))
    assert not differences(one['model'], two['model']) and not differences(one['model'], three['model'])
    assert read_log(project, 'interval0')[-1][5] == read_log(project, 'interval1')[-1][5] == read_log(project, 'interval2')[-1][5]


def test_same_command_same_log(project):
    logs = []
    for name in ('first', 'second'):
        trained(project, '--dropout=0.1', '--optimizer=muon', f'--out_dir=out/{name}')
        logs.append(without_times(read_log(project, name)))
    assert logs[0] == logs[1] and not differences(state(project, 'first'), state(project, 'second'))
    trained(project, '--dropout=0.1', '--optimizer=muon', '--deterministic', '--out_dir=out/third')
    assert without_times(read_log(project, 'third')) == logs[0]
    trained(project, '--dropout=0.1', '--optimizer=muon', '--seed=2', '--out_dir=out/fourth')
    assert without_times(read_log(project, 'fourth')) != logs[0]


def test_four_times_one_is_one_times_four(project, monkeypatch):
    norms, clip = [], torch.nn.utils.clip_grad_norm_

    def clip_and_record(*arguments):
        norms.append(clip(*arguments))
        return norms[-1]

    monkeypatch.setattr(torch.nn.utils, 'clip_grad_norm_', clip_and_record)
    flags = ['--max_iters=10', '--eval_interval=2', '--learning_rate=1e-3', '--grad_clip=0.5']
    trained(project, *flags, '--batch_size=4', '--gradient_accumulation_steps=1', '--out_dir=out/one_by_four')
    trained(project, *flags, '--batch_size=1', '--gradient_accumulation_steps=4', '--out_dir=out/four_by_one')
    one, four = (np.array([row[4:] for row in read_log(project, name)[1:]]) for name in ('one_by_four', 'four_by_one'))
    assert np.abs(one - four).max() < 1e-5
    torch.testing.assert_close(norms[:10], norms[10:], rtol=1e-4, atol=0)   # AdamW would not mind a gradient four times as large
    for key, tensor in state(project, 'one_by_four')['model'].items():
        torch.testing.assert_close(tensor, state(project, 'four_by_one')['model'][key], atol=1e-4, rtol=0)
    # and it is no accident of a learning rate too low to tell: other batches give other losses
    trained(project, *flags, '--seed=3', '--out_dir=out/others')
    assert np.abs(one - np.array([row[4:] for row in read_log(project, 'others')[1:]])).max() > 1e-3


def test_learning_rate_warms_up_decays_and_never_falls_under_min_lr(project, monkeypatch):
    used, step = [], torch.optim.AdamW.step

    def step_and_record(self, *arguments, **options):
        used.append(self.param_groups[0]['lr'])
        return step(self, *arguments, **options)

    monkeypatch.setattr(torch.optim.AdamW, 'step', step_and_record)
    flags = ['--max_iters=40', '--lr_decay_iters=30', '--warmup_iters=9', '--learning_rate=1e-3', '--min_lr=1.7e-4']
    trained(project, *flags, '--optimizer=muon', '--out_dir=out/schedule')
    expected = [1e-3 * (i + 1) / 10 for i in range(9)]
    expected += [1.7e-4 + 8.3e-4 * (1 + math.cos(math.pi * (i - 9) / 21)) / 2 for i in range(9, 30)] + [1.7e-4] * 10
    expected = [max(rate, 1.7e-4) for rate in expected]                 # the first step would be 1e-4
    np.testing.assert_allclose(used, expected, rtol=1e-12)
    assert min(used) >= 1.7e-4 * (1 - 1e-12) and max(used) == pytest.approx(1e-3)
    muon = state(project, 'schedule')['optimizer'][1]['param_groups'][0]['lr']
    assert muon == pytest.approx(0.02 * 0.17)                           # decays in proportion
    log = read_log(project, 'schedule')
    assert [row[3] for row in log[:-1]] == [used[int(row[0])] for row in log[:-1]] and log[-1][3] == pytest.approx(1.7e-4)

    used.clear()
    trained(project, '--decay_lr=False', '--max_iters=12', '--out_dir=out/constant')
    assert used == pytest.approx([1e-2 * (i + 1) / 6 for i in range(5)] + [1e-2] * 7)


# ----------------------------------------------------------------------------------------------------------------------
# the loss that runs are compared by

def test_last_row_is_the_loss_over_all_validation_windows(project):
    run = trained(project, '--position=rope', '--out_dir=out/scored', '--eval_windows=3', '--max_iters=33')
    checkpoint = state(project, 'scored')
    model = GPT(GPTConfig(**checkpoint['model_args'])).double().eval()
    model.load_state_dict(checkpoint['model'])
    ids = np.fromfile(os.path.join(project, 'data', 'tiny', 'val.bin'), dtype='<u2').astype(np.int64)

    def losses_from(start):
        window = torch.from_numpy(ids[start:start + 17])[None]
        with torch.no_grad():
            logits, _ = model(window[:, :-1], window[:, :-1])
        probability = F.softmax(logits[0], dim=-1)
        return [-math.log(probability[t, window[0, t + 1]]) for t in range(window.size(1) - 1)]

    losses = [loss for start in range(0, len(ids) - 1, 16) for loss in losses_from(start)]
    assert len(losses) == len(ids) - 1 == 3000          # every token but the first, once; the last window has 8
    log = read_log(project, 'scored')
    assert log[-1][:2] == [33, 33 * 64] and abs(log[-1][5] - sum(losses) / len(losses)) < 1e-5
    assert f'validation loss {log[-1][5]:.4f} over all of the validation text' in run.out

    # During the run: three whole windows, evenly spaced, the same ones every time.
    some = [loss for start in (0, 93 * 16, 186 * 16) for loss in losses_from(start)]
    assert f'step 33: validation loss {sum(some) / len(some):.4f}' in run.out
    scored = trained(project, '--init_from=resume', '--eval_only', '--max_iters=33', '--out_dir=out/scored', '--position=rope',
                     '--eval_windows=3')
    assert f'{log[-1][5]:.4f} over all' in scored.out


def test_best_and_last_are_kept_apart(project):
    trained(project, '--learning_rate=3', '--decay_lr=False', '--max_iters=60', '--eval_interval=5', '--out_dir=out/best')
    log = read_log(project, 'best')[:-1]
    best, last = state(project, 'best', 'ckpt.pt'), state(project, 'best')
    losses = [row[5] for row in log]
    assert best['iter_num'] == log[np.argmin(losses)][0] < 55           # it overshoots, or this test shows nothing
    assert best['best_val_loss'] == last['best_val_loss'] == min(losses) and last['iter_num'] == 60


def test_training_loss_is_the_mean_since_the_last_row(project, monkeypatch):
    losses, forward = [], GPT.forward

    def forward_and_record(self, *arguments, **options):
        result = forward(self, *arguments, **options)
        if self.training:
            losses.append(result[1].item())
        return result

    monkeypatch.setattr(GPT, 'forward', forward_and_record)
    trained(project, '--max_iters=25', '--out_dir=out/means')
    log = read_log(project, 'means')
    assert [row[0] for row in log] == [0, 10, 20, 25] and log[0][4] == ''
    assert [row[4] for row in log[1:]] == pytest.approx([np.mean(losses[:10]), np.mean(losses[10:20]), np.mean(losses[20:])], abs=1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# what a run leaves behind

def test_what_a_run_leaves_behind(project):
    trained(project, '--out_dir=out/left', picture=True)
    folder = os.path.join(project, 'out', 'left')
    assert sorted(os.listdir(folder)) == ['ckpt.pt', 'config.json', 'last.pt', 'log.csv', 'loss.png']
    for file in ('ckpt.pt', 'last.pt'):
        checkpoint = state(project, 'left', file)
        assert {'model', 'optimizer', 'model_args', 'iter_num', 'best_val_loss', 'config'} <= checkpoint.keys()     # nanoGPT's
    content = json.loads(read(os.path.join(folder, 'config.json')))
    assert content['settings']['learning_rate'] == 1e-2 and content['settings']['weight_decay'] == 0.1
    assert content['versions']['torch'] == torch.__version__ and 'git_commit' in content['versions']
    assert content['data'] == Dataset(os.path.join(project, 'data', 'tiny')).meta['sha256']
    assert read(os.path.join(folder, 'loss.png')).startswith(b'\x89PNG\r\n\x1a\n')
    log = read_log(project, 'left')
    assert [row[:2] for row in log] == [[0, 0], [10, 640], [20, 1280], [30, 1920]]
    assert all(later[2] >= earlier[2] for earlier, later in zip(log, log[1:]))


@pytest.mark.skipif(shutil.which('git') is None, reason='needs git')
def test_a_commit_is_that_of_the_repositorys_own_top_or_none(tmp_path):
    """Unpacked inside another repository, the code has no commit of its own: the outer one's would be wrong."""
    inner = tmp_path / 'inner'
    inner.mkdir()
    (tmp_path / 'file').write_text('x')
    for words in (['init', '-q'], ['add', 'file'], ['-c', 'user.name=a', '-c', 'user.email=a@b', 'commit', '-qm', 'one']):
        subprocess.run(['git', *words], cwd=tmp_path, check=True)
    commit = subprocess.run(['git', 'rev-parse', 'HEAD'], cwd=tmp_path, capture_output=True, text=True).stdout.strip()
    assert git_commit(tmp_path) == commit and git_commit(inner) == ''
    (tmp_path / 'file').write_text('y')
    assert git_commit(tmp_path) == commit + '-dirty'


def test_a_run_is_not_overwritten(project):
    folder = os.path.join(project, 'out', 'kept')
    trained(project, '--out_dir=out/kept')
    before = contents(folder)
    assert_refused(train(project, '--out_dir=out/kept'), 'already holds a run', '--overwrite=True', '--init_from=resume')
    assert contents(folder) == before
    os.remove(os.path.join(folder, 'last.pt'))          # half a run is a run, too
    assert_refused(train(project, '--out_dir=out/kept'), 'already holds a run')
    trained(project, '--out_dir=out/kept', '--overwrite=True', '--seed=5', '--max_iters=10')
    assert state(project, 'kept', 'ckpt.pt')['config']['seed'] == 5 and len(read_log(project, 'kept')) == 2


# ----------------------------------------------------------------------------------------------------------------------
# settings, and what is said

def test_later_config_files_win_and_flags_win_over_them(project, tmp_path):
    (tmp_path / 'one.py').write_text("# a comment\nposition = 'alibi'\nmax_iters = 3\nn_layer = 2\nbeta2 = 0.9\n")
    (tmp_path / 'two.py').write_text("position = 'rope'\nn_layer = 1 + 2\n")
    trained(project, str(tmp_path / 'one.py'), str(tmp_path / 'two.py'), '--beta2=0.5')
    chosen = state(project, 'two')['config']
    assert (chosen['position'], chosen['beta2']) == ('rope', 0.5)
    assert (chosen['n_layer'], chosen['max_iters']) == (1, 30)          # TINY's flags, wherever they stand
    assert os.path.exists(os.path.join(project, 'out', 'two', 'ckpt.pt'))       # the last file names the run


def test_says_what_fits_the_machine(project, tmp_path):
    make_project(tmp_path / 'fits', files=False)
    none = [f'--{key}=None' for key in ('n_layer', 'n_head', 'n_embd', 'block_size', 'batch_size', 'optimizer', 'learning_rate',
                                        'warmup_iters', 'eval_interval')]
    run = trained(str(tmp_path / 'fits'), *none, '--max_iters=1', '--out_dir=out/fits', '--n_head=8')
    fits = state(str(tmp_path / 'fits'), 'fits')['config']
    assert not [flag for flag in none if fits[flag[2:].partition('=')[0]] is None] and fits['n_head'] == 8 != fits['n_layer']
    assert '{n_layer} layers, 8 heads, width {n_embd}, block {block_size}'.format(**fits) in run.out
    assert f'1 steps of {fits["batch_size"] * fits["block_size"]:,} tokens on tiny with {fits["optimizer"]}; cpu, float32' in run.out


def test_plain_lines_without_a_terminal(project):
    run = trained(project, '--out_dir=out/plain')
    assert run.err == '' and '\r' not in run.out
    lines = [line for line in run.out.splitlines() if line.startswith('step ')]
    assert [line.split(':')[0] for line in lines] == ['step 0', 'step 10', 'step 20', 'step 30']
    log = read_log(project, 'plain')
    assert f'step 20: validation loss {log[2][5]:.4f}, training {log[2][4]:.4f}' in lines[2]


def test_a_bar_on_a_terminal(project):
    terminal = Terminal()
    run = trained(project, '--out_dir=out/bar', '--log_interval=1', '--max_iters=200', stderr=terminal)
    assert 'step 200: ' in run.out                      # which is no terminal: see test_streams.py
    bar = terminal.getvalue().split('\r')[-1]
    for word in ('200/200', 'loss ', 'validation ', 'tokens/s', 'step/s', '<00:00'):
        assert word in bar


def test_compile_falls_back_with_one_line(project, monkeypatch):
    def no_compiler(model):
        def fails(*arguments):
            raise RuntimeError('no C++ compiler')
        return fails

    monkeypatch.setattr(torch, 'compile', no_compiler)
    run = trained(project, '--compile=True', '--out_dir=out/compiled')
    assert run.out.count('torch.compile does not work here (RuntimeError)') == 1 and ', compiled' not in run.out
    trained(project, '--out_dir=out/plainly')
    assert not differences(state(project, 'compiled')['model'], state(project, 'plainly')['model'])


def test_compiles_once(project, monkeypatch):
    monkeypatch.setattr(torch, 'compile', functools.partial(torch.compile, backend='eager'))       # traces, and leaves out the compiler
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run = trained(project, '--compile=True', '--gradient_accumulation_steps=2', '--max_iters=12', '--out_dir=out/traced')
    assert ', compiled' in run.out and torch._dynamo.utils.counters['frames']['total'] == 1
    trained(project, '--gradient_accumulation_steps=2', '--max_iters=12', '--out_dir=out/untraced')
    assert not differences(state(project, 'traced')['model'], state(project, 'untraced')['model'])
