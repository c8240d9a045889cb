"""bench.py's numbers: turns that alternate, medians and ratios of made-up times, each part in small, what it writes. (test_bad_input.py has what it refuses.)"""
import json
import math
import os

import numpy as np
import pytest
import torch

import bench
import model as ours
from bench import take_turns
from dataset import Dataset
from harness import assert_refused, make_project, ran, run

CPU = torch.device('cpu')
TINY = dict(n_layer=1, n_head=2, n_embd=16)

# What --peer needs of nanoGPT's model.py, as small as can be. Its targets must lie in one piece, as nanoGPT's must.
PEER = '''
from dataclasses import dataclass
import torch
from torch.nn import functional as F

@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.table = config, torch.nn.Embedding(config.vocab_size, config.vocab_size)
        print('number of parameters: many')

    def forward(self, idx, targets):
        assert idx.size(1) <= self.config.block_size and not self.config.bias
        logits = self.table(idx)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        print('using fused AdamW: False')
        return torch.optim.AdamW(self.parameters(), lr=learning_rate, betas=betas, weight_decay=weight_decay)

    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        for _ in range(max_new_tokens):
            idx = torch.cat([idx, self.table(idx[:, -1:]).argmax(-1)], dim=1)
        return idx
'''


@pytest.fixture
def peer(tmp_path):
    folder = tmp_path / 'nanoGPT'
    folder.mkdir()
    (folder / 'model.py').write_text(PEER)
    return str(folder)


class Clock:
    """A clock that moves only when it is told to."""

    def __init__(self):
        self.now, self.turns = 0.0, []

    def __call__(self):
        return self.now

    def work(self, name, *seconds):
        """A callable that takes so many seconds at its first turn, so many at its second, ..."""
        left = list(seconds)

        def act():
            self.turns.append(name)
            self.now += left.pop(0)
        return act


# ----------------------------------------------------------------------------------------------------------------------
# measuring

def test_candidates_take_turns_and_warming_up_does_not_count():
    clock, waits = Clock(), []
    candidates = {'a': clock.work('a', 100.0, 100.0, 1.0, 2.0, 3.0), 'b': clock.work('b', 100.0, 100.0, 10.0, 20.0, 30.0)}
    seconds = take_turns(candidates, 3, wait=lambda: waits.append(len(clock.turns)), clock=clock)
    assert seconds == {'a': [1.0, 2.0, 3.0], 'b': [10.0, 20.0, 30.0]}
    assert ''.join(clock.turns) == 'abab' + 'ab' + 'ba' + 'ab'
    assert waits == [4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10]               # before and after every turn that counts


def test_the_wait_for_the_device_is_part_of_a_turn():
    clock = Clock()

    def wait():
        clock.now += 1.0                                # what the device still had to do
    assert take_turns({'a': clock.work('a', 5.0)}, 1, wait, clock, warm_up=0) == {'a': [6.0]}


def test_medians_ratios_and_quartiles(capsys):
    seconds = {'base': [1.0, 2.0, 4.0, 1.0, 1.0], 'other': [3.0, 4.0, 4.0, 9.0, 2.0]}       # ratios of the rounds: 3 2 1 9 2
    result = bench.report('a title', seconds, 'base', 100, 'tokens')
    assert result['other'] == dict(seconds=4.0, per_second=25.0, ratio=4.0, low=2.0, high=3.0)
    assert result['base'] == dict(seconds=1.0, per_second=100.0, ratio=1.0, low=1.0, high=1.0)
    assert all(type(value) is float for row in result.values() for value in row.values())
    header, rule, *rows = capsys.readouterr().out.strip().splitlines()
    assert 'a title' in header and 'tokens/s' in header and 'time / base' in header and set(rule) == set('|-:')
    assert [cell.strip() for cell in rows[1].strip('|').split('|')] == ['other', '4,000.00', '25', '4.00', '2.00 .. 3.00']


def test_when_a_loss_was_passed():
    rows = [(0.0, 4.0), (10.0, 2.0), (20.0, 3.0), (30.0, 1.0)]
    assert bench.time_of_passing(rows, 2.5) == 7.5      # the first time, not the last
    assert bench.time_of_passing(rows, 2.0) == 10.0
    assert bench.time_of_passing(rows, 1.5) == 27.5
    assert bench.time_of_passing(rows, 0.9) is None
    assert bench.time_of_passing(rows, 5.0) == 0.0


# ----------------------------------------------------------------------------------------------------------------------
# the parts, in small

def test_every_step_trains(peer, monkeypatch):
    losses, cross_entropy = [], torch.nn.functional.cross_entropy

    def record(*arguments, **options):
        losses.append(cross_entropy(*arguments, **options))
        return losses[-1]

    monkeypatch.setattr(torch.nn.functional, 'cross_entropy', record)
    steps = bench.training_steps(2, 8, TINY, CPU, 1, nanogpt=bench.load_peer(peer), variants=[(False, 'bfloat16')])
    assert list(steps) == [*ours.SCHEMES, 'nanoGPT', 'rope, bfloat16', 'nanoGPT, bfloat16']
    for name, step in steps.items():
        losses.clear()
        for _ in range(6):
            step()
        assert len(losses) == 6 and losses[-1] < losses[0], name        # always on the same tokens


def test_steps_are_measured_over_their_base(peer, capsys):
    sizes = [(2, 8, TINY), (1, 16, TINY)]
    results = bench.measure_steps(sizes, CPU, 2, 1, 'nanoGPT', nanogpt=bench.load_peer(peer), schemes=['none', 'rope'])
    assert list(results) == ['B2 T8, 1 layers, 2 heads, width 16', 'B1 T16, 1 layers, 2 heads, width 16']
    for rows in results.values():
        assert list(rows) == ['none', 'rope', 'nanoGPT'] and rows['nanoGPT']['ratio'] == 1.0
        assert rows['rope']['ratio'] == pytest.approx(rows['rope']['seconds'] / rows['nanoGPT']['seconds'])
        assert rows['rope']['per_second'] == pytest.approx(16 / rows['rope']['seconds'])
    assert 'many' not in capsys.readouterr().out        # the peer's own messages are left out


def test_every_size_of_the_schemes_has_as_many_tokens():
    assert {batch_size * block_size for batch_size, block_size, _ in bench.SCHEME_STEPS} == {4096}


def test_sampling_beside_an_extrapolated_peer(peer, monkeypatch, capsys):
    def made_up_times(candidates, rounds, wait, warm_up):
        for act in candidates.values():
            act()
        return {name: dict(first=[3.0, 5.0], full=[2.0, 4.0]).get(name, [1.0, 1.0]) for name in candidates}
    monkeypatch.setattr(bench, 'take_turns', made_up_times)
    results = bench.measure_sample(CPU, 2, 1, bench.load_peer(peer), models=[TINY], block_size=8, tokens=40, full=4)
    (rows,) = results.values()
    extrapolated = 'nanoGPT, extrapolated'
    assert list(rows) == ['rope', 'learned', extrapolated]
    assert rows[extrapolated]['seconds'] == np.median([3.0 + 2.0 / 4 * 32, 5.0 + 4.0 / 4 * 32])
    assert rows['rope']['ratio'] == pytest.approx(1 / 28) and rows['rope']['first_quarter'] > 0 and rows['rope']['last_quarter'] > 0
    printed = capsys.readouterr().out
    assert 'from its first 8 tokens and 4 more' in printed and 'from 4 to 8 tokens' in printed


def test_both_ways_of_drawing_batches_give_the_same(tmp_path):
    path = str(tmp_path / 'train.bin')
    np.random.default_rng(0).integers(65, size=1000, dtype=np.uint16).tofile(path)
    batches = []
    for draw in (bench.gathered_batch, bench.stacked_batch):
        torch.manual_seed(3)
        batches.append(draw(path, 4, 16, CPU))
    assert all(torch.equal(*pair) for pair in zip(*batches)) and batches[0][0].shape == (4, 16)
    assert torch.equal(batches[0][0][:, 1:], batches[0][1][:, :-1])


def test_a_long_window_in_a_process_of_its_own(capsys):
    results = bench.measure_long(CPU, 1, 1, schemes=['learned'], lengths=[512])         # and rope, dynamic, which always runs
    assert list(results) == ['rope, dynamic, 512', 'learned'] and results['learned'] == 'table ends'
    row = results['rope, dynamic, 512']
    assert 0 < row['seconds'] < 60 and 50 < row['before_mb'] <= row['peak_mb'] < 5000
    assert 'table ends' in capsys.readouterr().out


def test_the_peer_of_the_race_learns(peer, tmp_path):
    data = Dataset(os.path.join(make_project(tmp_path / 'project', files=False), 'data', 'tiny'))
    seconds, loss = bench.train_peer(bench.load_peer(peer), data, 1, steps=60, warm_up=5)
    _, untrained = bench.train_peer(bench.load_peer(peer), data, 1, steps=2, warm_up=1)
    assert seconds > 0 and loss < untrained - 0.02


def test_the_race_gives_both_the_same_time(peer, monkeypatch, capsys):
    called = []

    def train_ours(steps, eval_interval, seed, block_size=None):        # a step takes 0.1 s, an evaluation 0.5 s
        called.append((steps, eval_interval, block_size))
        rows = [(0.0, 4.0)] + [(0.1 * step + 0.5 * number, 4.0 - step / 100) for number, step in
                               enumerate([*range(eval_interval, steps, eval_interval), steps], start=1)]
        return rows, block_size and 2.5
    monkeypatch.setattr(bench, 'prepare_if_missing', lambda name: name)
    monkeypatch.setattr(bench, 'Dataset', lambda folder: folder)
    monkeypatch.setattr(bench, 'train_peer', lambda module, data, seed: (25.0, 3.0))
    monkeypatch.setattr(bench, 'train_ours', train_ours)
    result = bench.measure_race(bench.load_peer(peer), 1)
    assert called == [(100, 80, None), (200, 20, 64)] and result['ours']['loss_at_64'] == 2.5
    assert result['time_ratio'] == pytest.approx(1.0) and result['ours']['val_loss'] == pytest.approx(2.0)
    assert result['seconds_to_pass'] == pytest.approx(12.5)
    assert "passed nanoGPT's last loss after 12.5 s" in capsys.readouterr().out


def test_our_run_is_scored_in_the_peers_windows_too(tmp_path, monkeypatch):
    project = make_project(tmp_path / 'project')
    os.rename(os.path.join(project, 'data', 'tiny'), os.path.join(project, 'data', 'tinyshakespeare'))
    monkeypatch.setattr(bench, 'HERE', project)
    monkeypatch.setattr('dataset.DATA', os.path.join(project, 'data'))
    flags = ['--n_layer=1', '--n_head=2', '--n_embd=16', '--block_size=32']
    rows, at_32 = bench.train_ours(20, 10, 1, *flags, block_size=32)
    _, at_4 = bench.train_ours(20, 10, 1, *flags, block_size=4)
    assert at_32 == pytest.approx(rows[-1][1], abs=1e-5) and at_4 > at_32


def test_the_gpus_part_rehearsed_on_a_cpu(tmp_path, monkeypatch, capsys):
    """The code of `--parts=gpu` with a tiny model, and a run that is really trained; there is no time for compiling."""
    project = make_project(tmp_path / 'project')
    os.rename(os.path.join(project, 'data', 'tiny'), os.path.join(project, 'data', 'tinyshakespeare'))
    monkeypatch.setattr(bench, 'HERE', project)
    tiny = dict(TINY, block_size=16, batch_size=2, eval_windows=4, eval_interval=10)
    result = bench.measure_gpu(CPU, 1, enough=0, loss=3.0, **tiny)
    assert list(result['steps']) == list(ours.SCHEMES)
    for row in result['steps'].values():
        assert row['seconds'] > 0 and row['per_second'] == pytest.approx(32 / row['seconds']) and row['peak_mb'] > 50 and row['mfu'] is None
    assert len(result['log']) > 2 and 0 <= result['seconds_to_loss'] <= result['log'][-1][0] and result['log'][-1][1] < 3.0
    printed = capsys.readouterr().out
    assert 'rope, 20 steps in' in printed and '3.0 was reached after' in printed and printed.count('no time left') == len(ours.SCHEMES)


def test_the_gpus_part_wants_a_gpu(tmp_path):
    assert_refused(run(tmp_path, 'bench.py', '--parts=gpu', '--device=cpu'), 'finds none')


# ----------------------------------------------------------------------------------------------------------------------
# the command

def test_a_part_is_written_and_the_others_are_kept(tmp_path, peer):
    (tmp_path / 'bench.json').write_text(json.dumps({'step': {'results': 'from before'}, 'data': {'results': 'old'}}))
    done = ran(tmp_path, 'bench.py', '--parts=data', '--repetitions=2', f'--peer={peer}', '--device=cpu')
    assert done.err == ''
    assert '## data' in done.out and 'batches/s' in done.out and 'written to bench.json' in done.out
    content = json.loads((tmp_path / 'bench.json').read_text())
    assert list(content) == ['step', 'data'] and content['step'] == {'results': 'from before'}
    machine = content['data']['machine']
    assert {'cpu', 'cores', 'threads', 'python', 'torch', 'numpy', 'git_commit', 'peer_commit', 'date', 'command'} <= machine.keys()
    assert machine['command'].startswith('python bench.py --parts=data') and machine['threads'] == 1
    assert content['data']['repetitions'] == 2 and len(content['data']['results']) == 3
    for rows in content['data']['results'].values():
        assert list(rows) == ['ours', 'nanoGPT'] and all(math.isfinite(value) for row in rows.values() for value in row.values())
    assert sorted(os.listdir(tmp_path)) == ['bench.json', 'nanoGPT']
