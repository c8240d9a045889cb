"""What the comparison promises: right statistics, losses as a slow computation finds them, only runs that can be compared."""
import contextlib
import csv
import io
import json
import math
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import compare
import dataset
import measure
import plots
import runs
import tables
from conftest import random_tokens, small_model
from tiny_runs import ROOT, assert_refused, make_project

CPU = torch.device('cpu')


# ----------------------------------------------------------------------------------------------------------------------
# statistics, on made-up numbers with known answers

def test_t_quantiles_cut_off_a_fortieth():
    for freedom, quantile in enumerate(tables.T_QUANTILES, start=1):
        logarithm = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(freedom * math.pi) / 2
        shares = []                                     # below the two numbers that round to the quantile at the least and the most
        for end in (quantile - 0.0005, quantile + 0.0005):
            x = np.linspace(0, end, 100_001)
            shares.append(0.5 + np.trapezoid(np.exp(logarithm - (freedom + 1) / 2 * np.log1p(x ** 2 / freedom)), x))
        assert shares[0] < 0.975 < shares[1], freedom


def test_mean_and_standard_error():
    assert tables.mean_and_error([1.0, 2.0, 3.0, 6.0]) == (3.0, pytest.approx(math.sqrt(14 / 3) / 2))
    mean, error = tables.mean_and_error([1.5])
    assert mean == 1.5 and math.isnan(error)


def test_paired_difference():
    base = {1: 2.0, 2: 5.0, 3: 9.0, 7: 0.0}             # seeds far apart: only pairs tell that the differences are 0.1, 0.2 and 0.3
    mean, half = tables.paired_difference({1: 2.1, 2: 5.2, 3: 9.3, 8: 100.0}, base)
    assert mean == pytest.approx(0.2) and half == pytest.approx(4.303 * 0.1 / math.sqrt(3))
    assert tables.paired_difference({1: 3.0, 9: 4.0}, base) == (1.0, pytest.approx(math.nan, nan_ok=True))
    assert all(map(math.isnan, tables.paired_difference({9: 4.0}, base)))


def test_interval_covers_the_truth_in_95_of_100_cases():
    generator = np.random.default_rng(0)
    covered = 0
    for differences in generator.normal(0.3, 0.01, size=(4000, 3)):
        mean, half = tables.paired_difference(dict(enumerate(differences)), {0: 0.0, 1: 0.0, 2: 0.0})
        covered += abs(mean - 0.3) <= half
    assert covered / 4000 == pytest.approx(0.95, abs=0.015)


def group(losses_by_seed, windows_by_seed=None, **more):
    runs = {seed: SimpleNamespace(result=dict(val_loss=loss, by_window=(windows_by_seed or {}).get(seed)))
            for seed, loss in losses_by_seed.items()}
    return SimpleNamespace(runs=runs, **more)


def test_window_spread_is_that_of_the_difference():
    windows = np.array([1.0, 5.0, 2.0, 9.0])            # windows differ much, the schemes' difference little: 0.1, 0.2, 0.3, 0.4
    base = group({1: 0.0, 2: 0.0}, {1: windows, 2: windows + 1})
    other = group({1: 0.0, 2: 0.0}, {1: windows + [0.0, 0.2, 0.2, 0.4], 2: windows + 1 + [0.2, 0.2, 0.4, 0.4]})
    assert tables.window_spread(other, base) == pytest.approx(np.std([0.1, 0.2, 0.3, 0.4], ddof=1))
    assert math.isnan(tables.window_spread(other, group({3: 0.0}, {3: windows})))


# ----------------------------------------------------------------------------------------------------------------------
# losses, against a slow computation that predicts one token after the other

def slow_loss(model, tokens, start, i):
    """The loss at tokens[i + 1], predicted from tokens[start..i] in one pass without a cache."""
    with torch.inference_mode():
        idx = torch.from_numpy(tokens[start:i + 1].astype(np.int64))[None]
        return F.cross_entropy(model(idx)[0][0, -1:], torch.tensor([int(tokens[i + 1])])).item()


def text(n_tokens, vocab_size=17):
    return random_tokens(n_tokens, vocab_size=vocab_size).numpy().astype(np.uint16)


def test_losses_side_by_side_equal_one_pass_per_token():
    model, tokens = small_model('rope', std=0.2), text(75)
    losses = measure.token_losses(model, tokens, 16, CPU, contextlib.nullcontext())
    slow = [slow_loss(model, tokens, i // 16 * 16, i) for i in range(74)]       # four whole windows, and one of 10 tokens
    np.testing.assert_allclose(losses, slow, atol=1e-5)
    total, count = measure.sum_of_losses(model, tokens, measure.window_starts(75, 16), 16, 3, CPU, contextlib.nullcontext())
    assert count == 74 and total == pytest.approx(losses.sum(), rel=1e-5)       # train.py's figure is the same


@pytest.mark.parametrize('length, stride', [(16, 4), (16, 1), (16, 5), (16, 15), (12, 30)])
def test_sliding_losses_equal_one_pass_per_token(length, stride):
    model, tokens = small_model('alibi', std=0.2), text(61)
    losses = measure.token_losses(model, tokens, length, CPU, contextlib.nullcontext(), stride)
    stride = min(stride, length)
    for i in range(60):
        start = math.ceil(max(i + 1 - length, 0) / stride) * stride             # the first window that reaches token i + 1
        assert i < length or i + 1 - start >= length - stride + 1
        assert losses[i] == pytest.approx(slow_loss(model, tokens, start, i), abs=1e-5), i


@pytest.mark.parametrize('name', ['none', 'sinusoidal', 'shaw', 'rope', 'alibi', 't5', 'tupe', 'linear', 'ntk', 'dynamic', 'yarn',
                                  'llama3'])
def test_windows_read_in_pieces_equal_one_pass(name):
    model, tokens = small_model(name, std=0.2), text(1301)
    losses = measure.token_losses(model, tokens, 600, CPU, contextlib.nullcontext())       # pieces of 256, 256, 88; a window of 100
    with torch.inference_mode():
        for start, end in ((0, 600), (600, 1200), (1200, 1300)):
            window = torch.from_numpy(tokens[start:end + 1].astype(np.int64))
            whole = F.cross_entropy(model(window[None, :-1], window[None, 1:])[0][0], window[1:], reduction='none')
            np.testing.assert_allclose(losses[start:end], whole, atol=2e-4)


def test_evaluation_leaves_the_model_as_it_was():
    model = small_model('learned', dropout=0.5).train()
    once, twice = (measure.token_losses(model, text(70), 32, CPU, contextlib.nullcontext()) for _ in range(2))
    assert model.training and np.array_equal(once, twice)       # without dropout


def test_16384_tokens_take_less_than_2_gb():
    script = '''if True:
        import contextlib, resource, numpy, torch
        from model import GPT, GPTConfig
        from measure import token_losses
        torch.set_num_threads(2)
        model = GPT(GPTConfig(block_size=128, vocab_size=65, n_layer=1, n_head=4, n_embd=16, position='alibi'))
        tokens = numpy.arange(16385) % 65
        losses = token_losses(model, tokens, 16384, torch.device('cpu'), contextlib.nullcontext())
        print(len(losses), numpy.isfinite(losses).all(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    '''
    done = subprocess.run([sys.executable, '-c', script], cwd=ROOT, capture_output=True, text=True)
    count, finite, peak = done.stdout.split()
    assert (count, finite) == ('16384', 'True') and int(peak) < 2e9


@pytest.mark.parametrize('n_tokens, block_size, sweep_tokens', [(400_000, 128, 65536), (45_000, 128, 65536), (300, 64, 1000),
                                                                (111_540, 100, 65536)])
def test_sweep_scores_the_same_tokens_in_whole_windows(n_tokens, block_size, sweep_tokens):
    lengths, begin, count = measure.sweep_plan(block_size, n_tokens, sweep_tokens, (1 / 4, 1 / 2, 1, 2, 4, 8, 16))
    assert block_size in lengths and all(count % length == 0 for length in lengths)
    assert begin >= max(lengths) and begin + count + 1 <= n_tokens and 0 < count <= sweep_tokens


def test_losses_at_length():
    model, tokens = small_model('rope', std=0.2), text(200)
    everything, last_quarter, sliding = measure.losses_at_length(model, tokens, 16, 40, 96, 4, CPU)
    side_by_side = [slow_loss(model, tokens, 40 + (i - 40) // 16 * 16, i) for i in range(40, 136)]
    assert everything == pytest.approx(np.mean(side_by_side), abs=1e-5)
    assert last_quarter == pytest.approx(np.mean([loss for i, loss in enumerate(side_by_side) if i % 16 >= 12]), abs=1e-5)
    # each window of 16 scores its last 4 tokens, the very first one too: it begins 12 tokens before the part that is scored
    slow = [slow_loss(model, tokens, 40 + (i - 40) // 4 * 4 - 12, i) for i in range(40, 136)]
    assert sliding == pytest.approx(np.mean(slow), abs=1e-5)
    assert measure.losses_at_length(small_model('learned'), tokens, 64, 64, 64, None, CPU) == (None, None, None)


def test_dynamic_with_factor_1_is_ntk_at_the_factor_that_the_length_calls_for():
    tokens = text(129)
    options = dict(std=0.2, rope_original_length=16)
    dynamic = measure.token_losses(small_model('dynamic', rope_factor=1.0, **options), tokens, 64, CPU, contextlib.nullcontext())
    ntk = measure.token_losses(small_model('ntk', rope_factor=4.0, **options), tokens, 64, CPU, contextlib.nullcontext())
    np.testing.assert_allclose(dynamic, ntk, atol=1e-5)
    assert not np.allclose(dynamic, measure.token_losses(small_model('dynamic', rope_factor=4.0, **options), tokens, 64, CPU,
                                                      contextlib.nullcontext()), atol=1e-3)


# ----------------------------------------------------------------------------------------------------------------------
# the training step

def test_a_check_that_ends_the_training_leaves_the_weights_as_they_were():
    model, batch, seen = small_model('rope'), [(random_tokens(2, 8), random_tokens(2, 8))] * 2, []
    optimizers, before = model.configure_optimizers(0.1, 1e-2, (0.9, 0.99), 'cpu'), model.state_dict()
    before = {name: tensor.clone() for name, tensor in before.items()}

    def check(loss, norm):
        seen.append((loss.item(), norm.item()))
        raise FloatingPointError
    with pytest.raises(FloatingPointError):
        measure.training_step(model, optimizers, batch, contextlib.nullcontext(), 1.0, check=check)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    model.zero_grad()
    loss, norm = measure.training_step(model, optimizers, batch, contextlib.nullcontext(), 1.0)
    assert (loss.item(), norm.item()) == seen[0] and all(parameter.grad is None for parameter in model.parameters())
    assert not all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_where_compiling_fails_the_model_is_left_and_the_reason_said(monkeypatch):
    def broken(model):
        def call(*_):
            raise RuntimeError('no compiler')
        return call
    monkeypatch.setattr(torch, 'compile', broken)
    model, said, tokens = small_model('rope'), [], random_tokens(2, 8)
    assert measure.compiled_or_not(model, tokens, tokens, contextlib.nullcontext(), said.append) is model
    assert said == ['torch.compile does not work here (RuntimeError)']


# ----------------------------------------------------------------------------------------------------------------------
# word_order's answers

@pytest.fixture(scope='module')
def sentences():
    sys.path.append(os.path.join(ROOT, 'data', 'word_order'))
    import sentences
    return sentences


def test_answer_accuracy_counts_right_answers(sentences):
    tokenizer = dataset.WordTokenizer(sentences.VOCABULARY)
    model = small_model('rope', std=0.2, vocab_size=tokenizer.vocab_size)
    examples, right = [], 0
    for number, (prompt, _) in enumerate(sentences.examples(40, 1, 0) + sentences.examples(60, 3, 0)):
        idx = torch.from_numpy(tokenizer.encode('\n' + ' '.join(prompt)).astype(np.int64))[None]
        guess = tokenizer.decode([model(idx)[0].argmax().item()])
        answer = guess if number % 4 and guess.startswith(' ') else ' cow' if guess != ' cow' else ' pig'
        examples.append((prompt, answer[1:]))
        right += answer == guess
    assert 20 < right < 80 and measure.answer_accuracy(model, tokenizer, examples, CPU) == right / 100


# ----------------------------------------------------------------------------------------------------------------------
# which runs can be compared

def run(folder='out/rope', data='text', finished=True, **settings):
    settings = {'position': 'rope', 'seed': 1, 'n_layer': 4, 'max_iters': 100, 'dataset': 'tiny', 'init_from': 'scratch', 'rope_base': 1e4,
                'device': 'cpu', 'out_dir': folder, 'learning_rate': 1e-3, **settings}
    log = [SimpleNamespace(iteration=100 if finished else 40)]
    return SimpleNamespace(folder=folder, settings=settings, data={'text': data}, finished=finished, log=log)


def refused(capsys, function, *words):
    with pytest.raises(SystemExit) as stop:
        function()
    error = capsys.readouterr().err
    assert stop.value.code == 2 and len(error.splitlines()) == 1 and all(word in error for word in words), error


def test_runs_that_differ_in_scheme_and_seed_alone_are_compared():
    runs.check_comparable([run(), run('out/alibi', position='alibi', seed=2), run('out/base', rope_base=500.0),
                              run('out/resumed', init_from='resume', device='cuda')], force=False)


@pytest.mark.parametrize('change, words', [
    (dict(data='other text'), ['two versions of the data set tiny']), (dict(data='other', dataset='plays'), ['data tiny against plays']),
    (dict(n_layer=6), ['n_layer 4 against 6']), (dict(max_iters=50), ['max_iters 100 against 50']),
    (dict(learning_rate=2e-3), ['learning_rate 0.001 against 0.002']),
    (dict(init_from='out/rope'), ['init_from scratch against out/rope']),
    (dict(finished=False), ['is not finished', 'step 40 of 100', '--init_from=resume'])])
def test_others_are_refused_with_the_difference(capsys, change, words):
    other = run('out/other', position='alibi', **change)
    refused(capsys, lambda: runs.check_comparable([run(), other], force=False), 'out/other', *words)
    if other.finished:
        runs.check_comparable([run(), other], force=True)


def test_groups_are_runs_that_differ_in_their_seed_alone(capsys):
    groups = runs.group_runs([run('a/rope-seed1'), run('a/alibi-seed1', position='alibi'), run('a/rope-seed2', seed=2)])
    assert [(group.label, list(group.runs)) for group in groups] == [('rope', [1, 2]), ('alibi', [1])]
    groups = runs.group_runs([run('a/rope-seed1'), run('a/far-seed1', rope_base=1e6)])
    assert [group.label for group in groups] == ['rope', 'far']                 # one scheme twice: called by their folders
    refused(capsys, lambda: runs.group_runs([run('a'), run('b')]), 'a and b are the same run', 'seed 1')


# ----------------------------------------------------------------------------------------------------------------------
# training what is missing, with a stand-in for train.py that takes a moment

STAND_IN = '''
import json, os, signal, sys, time
flags = dict(word[2:].split('=', 1) for word in sys.argv[1:])
folder = flags['out_dir']
with open(os.path.join(folder, 'calls.txt'), 'a') as file:
    file.write(' '.join(sys.argv[1:]) + f' threads={os.environ.get("OMP_NUM_THREADS")}\\n')
def stop(*_):
    open(os.path.join(folder, 'saved'), 'w').close()
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
if flags['position'] == 'alibi' and flags.get('fail'):
    print('train.py: the loss is nan', file=sys.stderr)
    sys.exit(2)
with open(os.path.join(folder, 'config.json'), 'w') as file:
    json.dump(dict(settings=dict(max_iters=2, position='rope'), model_args=dict(block_size=8), data={}), file)
for step in range(3):
    with open(os.path.join(folder, 'part'), 'w') as file:
        file.write('iter,tokens,seconds,val_loss\\n' + ''.join(f'{i},{i},1.0,2.0\\n' for i in range(step + 1)))
    os.replace(os.path.join(folder, 'part'), os.path.join(folder, 'log.csv'))
    time.sleep(60 if flags.get('fail') else 0.1)
open(os.path.join(folder, 'last.pt'), 'w').close()
'''


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    (tmp_path / 'train.py').write_text(STAND_IN)
    monkeypatch.setattr(compare, 'HERE', str(tmp_path))
    bar = SimpleNamespace(steps=[], write=lambda text, file: None)
    bar.update = bar.steps.append
    return tmp_path, bar


def planned(folder, **asked):
    return SimpleNamespace(folder=str(folder), asked={**asked, 'out_dir': str(folder)})


def test_training_goes_side_by_side_and_resumes(stand_in):
    folder, bar = stand_in
    (folder / 'rope-seed2').mkdir()
    (folder / 'rope-seed2' / 'last.pt').touch()         # a run that was interrupted at step 1
    missing = [(planned(folder / f'rope-seed{seed}', n_layer=1, position='rope', seed=seed), 1 if seed == 2 else 0)
               for seed in (1, 2, 3)]
    compare.train_missing(missing, 2, bar)
    calls = [(folder / f'rope-seed{seed}' / 'calls.txt').read_text() for seed in (1, 2, 3)]
    assert [('--init_from=resume' in call) for call in calls] == [False, True, False]
    assert all('--n_layer=1 --position=rope' in call and f'threads={max(1, os.cpu_count() // 2)}' in call for call in calls)
    assert sum(bar.steps) == 2 + 1 + 2
    assert all(runs.read_run(run.folder).finished for run, _ in missing)


def test_a_run_that_fails_stops_the_others(stand_in, capsys):
    folder, bar = stand_in
    missing = [(planned(folder / scheme, fail=1, position=scheme, seed=1), 0) for scheme in ('rope', 'alibi')]
    started = time.monotonic()
    refused(capsys, lambda: compare.train_missing(missing, 2, bar), 'alibi failed: the loss is nan')
    assert time.monotonic() - started < 30 and (folder / 'rope' / 'saved').exists()     # asked to save, and waited for


# ----------------------------------------------------------------------------------------------------------------------
# pictures

def test_labels_stand_apart_and_in_order():
    heights = np.array([0.5, 0.51, 0.1, 0.505, 0.9, 0.12])
    moved = plots.spread(heights, 0.06)
    assert np.array_equal(np.argsort(moved), np.argsort(heights)) and np.diff(np.sort(moved)).min() > 0.06 - 1e-6
    assert moved[4] == 0.9 and np.abs(moved - heights).max() < 0.07
    assert np.array_equal(plots.spread(np.array([0.1, 0.5]), 0.06), [0.1, 0.5])


def test_training_losses_stand_in_the_middle_of_their_interval_and_bounds_are_drawn(monkeypatch):
    rows, figures = [[0, 0, 0.0, 0.1, '', 4.0], [10, 1000, 1.0, 0.1, 3.5, 3.0], [30, 3000, 3.0, 0.1, 2.5, 2.0]], []
    monkeypatch.setattr(plots, 'write_figure', lambda figure, path: figures.append(figure))
    plots.draw_loss(rows, 'loss.png', 'a $ run', {'best_loss': 1.25, 'bag_of_words_loss': 1.5})
    validation, training, *bounds = figures[0].axes[0].lines
    assert validation.get_xdata().tolist() == [0, 1000, 3000] and validation.get_ydata().tolist() == [4.0, 3.0, 2.0]
    assert training.get_xdata().tolist() == [500, 2000] and training.get_ydata().tolist() == [3.5, 2.5]
    assert [bound.get_ydata()[0] for bound in bounds] == [1.5, 1.25]


def test_tables_and_plots_need_no_torch():
    script = 'import sys, tables, plots; sys.exit("torch" in sys.modules)'
    assert subprocess.run([sys.executable, '-c', script], cwd=ROOT).returncode == 0


def test_schemes_have_styles_of_their_own():
    assert plots.STYLES.keys() == compare.SCHEMES.keys()
    for what in ('color', 'marker'):
        assert len({style[what] for style in [*plots.STYLES.values(), plots.OTHER_STYLE]}) == len(plots.STYLES) + 1


# ----------------------------------------------------------------------------------------------------------------------
# the command, from end to end

FLAGS = ['--dataset=word_order', '--schemes=learned,rope', '--seeds=2', '--max_iters=6', '--eval_interval=2', '--eval_windows=8',
         '--n_layer=1', '--n_head=2', '--n_embd=16', '--block_size=16', '--batch_size=4', '--optimizer=adamw', '--warmup_iters=1',
         '--learning_rate=1e-2', '--sweep_tokens=256', '--stride=4', '--device=cpu']


def run_compare(project, *flags):
    """Runs the project's compare.py within this process: code, out, err."""
    script, stdout, stderr, code = os.path.join(project, 'compare.py'), io.StringIO(), io.StringIO(), 0
    before, handler = (sys.argv, os.getcwd(), dataset.DATA), signal.getsignal(signal.SIGTERM)
    try:
        sys.argv, dataset.DATA = [script, *flags], os.path.join(project, 'data')
        os.chdir(project)
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            runpy.run_path(script, run_name='__main__')
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        sys.argv, folder, dataset.DATA = before
        os.chdir(folder)
        signal.signal(signal.SIGTERM, handler)
    return SimpleNamespace(code=code, out=stdout.getvalue(), err=stderr.getvalue())


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    """A project with a small word_order, and out/compare as `compare.py` leaves it."""
    folder = make_project(tmp_path_factory.mktemp('project'))
    source, target = (os.path.join(root, 'data', 'word_order') for root in (ROOT, folder))
    os.makedirs(target)
    for name in ('prepare.py', 'sentences.py'):
        shutil.copy(os.path.join(source, name), target)
    subprocess.run([sys.executable, os.path.join(target, 'prepare.py'), '--train_lines=2000', '--val_lines=90'], check=True,
                   stdout=subprocess.DEVNULL)
    done = run_compare(folder, *FLAGS, '--jobs=2')
    assert done.code == 0, done.err
    return SimpleNamespace(folder=folder, out=os.path.join(folder, 'out', 'compare'), first=done)


def read_results(project):
    with open(os.path.join(project.out, 'results.csv'), newline='') as file:
        return list(csv.DictReader(file))


def read_table(project):
    with open(os.path.join(project.out, 'table.md'), encoding='utf-8') as file:
        return file.read()


def without_step_times(text):
    return re.sub(r'(\|[^|]*){4}\|( +\d+\.\d\d) \|', lambda match: match[0].replace(match[2], 'TIME'), text)


def test_results_agree_with_the_runs_and_the_table_with_the_results(project):
    rows, table = read_results(project), read_table(project)
    assert table in project.first.out
    assert [(row['scheme'], row['seed']) for row in rows if row['scheme'] == 'rope'] == [('rope', '1337'), ('rope', '1338')]
    losses = {}
    for row in rows:
        log = runs.read_run(os.path.join(project.folder, row['run'])).log
        assert float(row['val_loss']) == pytest.approx(log[-1].val_loss, abs=1e-5)      # two computations of the same figure
        losses[row['scheme'], row['seed']] = float(row['val_loss'])
        assert row['own_parameters'] == ('256' if row['scheme'] == 'learned' else '0')
    differences = [losses['rope', seed] - losses['learned', seed] for seed in ('1337', '1338')]
    mean, half = np.mean(differences), 12.706 * abs(differences[0] - differences[1]) / 2
    assert f'{mean:+.4f} ({mean - half:+.4f} to {mean + half:+.4f})' in table
    rope = [losses['rope', seed] for seed in ('1337', '1338')]
    assert f'{np.mean(rope):.4f} ± {abs(rope[0] - rope[1]) / 2:.4f}' in table
    assert 'table ends at 16' in table and 'bag of words' in table and '0.167' in table
    for name in ('curves.png', 'length.png', 'position.png'):
        with open(os.path.join(project.out, name), 'rb') as file:
            assert file.read(4) == b'\x89PNG'


def test_evaluation_agrees_with_a_slow_one(project):
    row = next(row for row in read_results(project) if row['scheme'] == 'rope')
    path = os.path.join(project.folder, row['run'], 'last.pt')
    model = runs.make_model(runs.load_checkpoint(path), path).eval()
    tokens = np.fromfile(os.path.join(project.folder, 'data', 'word_order', 'val.bin'), dtype='<u2')
    count = 256
    for length in (4, 32):
        slow = [slow_loss(model, tokens, 256 + i // length * length, 256 + i) for i in range(count)]
        assert float(row[f'loss_at_{length}']) == pytest.approx(np.mean(slow), abs=1e-4)


def test_same_command_gives_the_same_table_and_finishes_what_is_not(project):
    before = read_table(project)
    shutil.rmtree(os.path.join(project.out, 'evaluations'))     # so that everything is evaluated anew
    log = os.path.join(project.out, 'rope-seed1338', 'log.csv')
    with open(log) as file:
        rows = file.readlines()
    with open(log, 'w') as file:                                # as if that run had been killed while it was scored at its end
        file.writelines(rows[:-1])
    weights = os.path.join(project.out, 'learned-seed1337', 'last.pt')
    written = os.path.getmtime(weights)
    done = run_compare(project.folder, *FLAGS)
    assert done.code == 0, done.err
    assert '3 of 4 runs are finished already' in done.out and '1 run of 6 steps to train' in done.out
    assert os.path.getmtime(weights) == written
    assert without_step_times(read_table(project)) == without_step_times(before) and 'TIME' in without_step_times(before)


def test_finished_runs_are_compared_by_name_and_others_refused(project, tmp_path):
    learned, rope = (os.path.join('out', 'compare', f'{name}-seed1337') for name in ('learned', 'rope'))
    done = run_compare(project.folder, rope, learned, '--sweep_tokens=256', f'--out_dir={tmp_path}')
    assert done.code == 0 and 'difference to learned' in done.out and '1 seed each' in done.out, done.err
    longer = os.path.join(project.folder, 'out', 'longer')
    shutil.copytree(os.path.join(project.folder, rope), longer, dirs_exist_ok=True)
    with open(os.path.join(longer, 'config.json')) as file:
        config = json.load(file)
    config['settings']['learning_rate'] = 0.5
    with open(os.path.join(longer, 'config.json'), 'w') as file:
        json.dump(config, file)
    assert_refused(run_compare(project.folder, learned, 'out/longer'), 'learning_rate 0.01 against 0.5', '--force')
    done = run_compare(project.folder, learned, 'out/longer', '--force', '--sweep_tokens=256', f'--out_dir={tmp_path}')
    assert done.code == 0, done.err
    assert_refused(run_compare(project.folder, *FLAGS, '--max_iters=8'), 'holds another run', 'max_iters 6 against 8', '--out_dir')


def test_scalings_of_a_rope_run(project, tmp_path):
    rope = os.path.join('out', 'compare', 'rope-seed1337')
    done = run_compare(project.folder, rope, '--scalings=none,linear,ntk,dynamic,yarn', '--sweep_tokens=256', f'--out_dir={tmp_path}')
    assert done.code == 0, done.err
    path = os.path.join(project.folder, rope, 'last.pt')
    tokens = np.fromfile(os.path.join(project.folder, 'data', 'word_order', 'val.bin'), dtype='<u2')
    table = (tmp_path / 'scaling.md').read_text()
    for scaling in ('none', 'linear', 'ntk', 'dynamic', 'yarn'):
        cells = re.search(rf'^\| {scaling} +\|(.*)\|$', table, re.M)[1].split('|')
        for cell, length in zip(cells, (16, 32, 64, 128), strict=True):
            factor = 1.0 if scaling == 'none' else length / 16
            model = runs.make_model(runs.load_checkpoint(path), path, rope_scaling=scaling, rope_factor=factor,
                                    rope_original_length=16).eval()
            windows = torch.from_numpy(tokens[128:128 + 257].astype(np.int64))
            with torch.inference_mode():
                loss = model(windows[:-1].view(-1, length), windows[1:].view(-1, length))[1].item()
            assert float(cell) == pytest.approx(loss, abs=1e-4)
    learned = os.path.join('out', 'compare', 'learned-seed1337')
    assert_refused(run_compare(project.folder, learned, '--scalings=yarn'), '--scalings is for RoPE runs', 'position learned')


@pytest.mark.parametrize('flags, words', [
    (['--schemes=learned,rotary'], ["scheme 'rotary'", 'alibi']), (['--schemes=rope,rope'], ['twice']),
    (['--seeds=0'], ['seeds must be']),
    (['--position=rope'], ['--schemes']), (['--init_from=resume'], ['--init_from']), (['--scalings=yarn'], ['name one or more']),
    (['out/rope', '--scalings=yarm'], ["scaling 'yarm'", 'yarn']), (['out/nothing'], ['holds no run']),
    (['train.py'], ['holds no run']),
    (['out/rope', '--n_layer=3'], ['--n_layer', 'leave it out']), (['--no_such=1'], ['no_such']), (['--stride=0'], ['stride']),
    (['--device=gpu'], ['gpu'])])
def test_mistakes_are_answered_in_one_line(project, flags, words):
    assert_refused(run_compare(project.folder, *flags), *words)
