"""What the comparison promises: right statistics, only runs that can be compared, no run lost or trained twice."""
import csv
import glob
import json
import math
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import compare
from tables import intervals, mean_and_error, own_settings, window_spread
from plots import OTHER_STYLE, STYLES, spread
from runs import check_comparable, group_runs
from harness import ROOT, assert_fails, assert_refused, command, make_project, read, read_log, run, state, without_times, write
from model import SCHEMES
from runs import load_checkpoint, make_model
from test_measure import slow_loss

sys.path.append(os.path.join(ROOT, 'data', 'shakespeare_char'))
from plays import pip_command


# ----------------------------------------------------------------------------------------------------------------------
# statistics, on made-up numbers with known answers

def test_mean_and_standard_error():
    assert mean_and_error([1.0, 2.0, 3.0, 6.0]) == (3.0, pytest.approx(math.sqrt(14 / 3) / 2))
    mean, error = mean_and_error([1.5])
    assert mean == 1.5 and math.isnan(error)


def test_intervals_are_dunnetts():
    """With one scheme beside the base the method is Student's t test; with more, intervals are wider by a known factor."""
    base = group({1: 2.0, 2: 2.2, 3: 2.4}, label='learned')
    one = group({1: 1.9, 2: 2.1, 3: 2.0}, label='one')
    (mean, half), = intervals([base, one], base).values()
    error = math.sqrt((0.04 + 0.01) / 2 * (1 / 3 + 1 / 3))
    assert mean == pytest.approx(-0.2) and half == pytest.approx(2.776 * error, rel=2e-3)       # t, 4 degrees of freedom
    others = [group({1: 2.0 + shift, 2: 2.2 + shift, 3: 2.4 + shift}, label=str(shift)) for shift in (0.1, 0.2, 0.3)]
    found = intervals([base, *others], base)
    error = math.sqrt(0.04 * 2 / 3)
    for shift, (mean, half) in zip((0.1, 0.2, 0.3), found.values(), strict=True):
        assert mean == pytest.approx(shift)
        assert half == pytest.approx(2.88 * error, rel=5e-3)    # Dunnett 1955, table 2a: 3 treatments, 8 degrees of freedom
    assert math.isnan(intervals([base, group({1: 3.0}, label='x')], base)['x'][1])


def test_intervals_hold_together_in_95_of_100_cases():
    generator, held = np.random.default_rng(0), 0
    for draw in generator.normal(0.0, 0.01, size=(200, 4, 4)):
        groups = [group(dict(enumerate(losses)), label=str(number)) for number, losses in enumerate(draw)]
        held += all(abs(mean) <= half for mean, half in intervals(groups, groups[0]).values())
    assert held / 200 == pytest.approx(0.95, abs=0.04)


def group(losses_by_seed, windows_by_seed=None, **more):
    runs = {seed: SimpleNamespace(result=dict(report_loss=loss, by_window=(windows_by_seed or {}).get(seed)))
            for seed, loss in losses_by_seed.items()}
    return SimpleNamespace(runs=runs, **more)


def test_window_spread_is_that_of_the_difference():
    windows = np.array([1.0, 5.0, 2.0, 9.0])            # windows differ much, the schemes' difference little: 0.1, 0.2, 0.3, 0.4
    base = group({1: 0.0, 2: 0.0}, {1: windows, 2: windows + 1})
    other = group({1: 0.0, 2: 0.0}, {1: windows + [0.0, 0.2, 0.2, 0.4], 2: windows + 1 + [0.2, 0.2, 0.4, 0.4]})
    assert window_spread(other, base) == pytest.approx(np.std([0.1, 0.2, 0.3, 0.4], ddof=1))
    assert math.isnan(window_spread(other, group({3: 0.0}, {3: windows})))


# ----------------------------------------------------------------------------------------------------------------------
# which runs can be compared

def a_run(folder='out/rope', data='text', finished=True, **settings):
    settings = {'position': 'rope', 'seed': 1, 'n_layer': 4, 'max_iters': 100, 'dataset': 'tiny', 'init_from': 'scratch', 'rope_base': 1e4,
                'device': 'cpu', 'out_dir': folder, 'learning_rate': 1e-3, **settings}
    log = [SimpleNamespace(iteration=100 if finished else 40)]
    return SimpleNamespace(folder=folder, settings=settings, data={'text': data}, finished=finished, log=log)


def test_runs_that_differ_in_scheme_and_seed_alone_are_compared():
    check_comparable([a_run(), a_run('out/alibi', position='alibi', seed=2), a_run('out/base', rope_base=500.0), a_run('out/fast', learning_rate=2e-3, position_rate=10.0),
                              a_run('out/resumed', init_from='resume', device='cuda')], force=False)


@pytest.mark.parametrize('change, words', [
    (dict(data='other text'), ['two versions of the data set tiny']), (dict(data='other', dataset='plays'), ['data tiny against plays']),
    (dict(n_layer=6), ['n_layer 4 against 6']), (dict(max_iters=50), ['max_iters 100 against 50']),
    (dict(weight_decay=0.2), ['weight_decay 0.1 against 0.2']),
    (dict(init_from='out/rope'), ['init_from scratch against out/rope']),
    (dict(finished=False), ['is not finished', 'step 40 of 100', '--init_from=resume'])])
def test_others_are_refused_with_the_difference(capsys, change, words):
    other = a_run('out/other', position='alibi', **change)
    assert_fails(capsys, lambda: check_comparable([a_run(), other], force=False), 'out/other', *words)
    if other.finished:
        check_comparable([a_run(), other], force=True)


def test_groups_are_runs_that_differ_in_their_seed_alone(capsys):
    groups = group_runs([a_run('a/rope-seed1'), a_run('a/alibi-seed1', position='alibi'), a_run('a/rope-seed2', seed=2)])
    assert [(group.label, list(group.runs)) for group in groups] == [('rope', [1, 2]), ('alibi', [1])]
    groups = group_runs([a_run('a/rope-seed1'), a_run('a/far-seed1', rope_base=1e6)])
    assert [group.label for group in groups] == ['rope', 'far']                 # one scheme twice: called by their folders
    assert_fails(capsys, lambda: group_runs([a_run('a'), a_run('b')]), 'a and b are the same run', 'seed 1')


# ----------------------------------------------------------------------------------------------------------------------
# pictures

def test_labels_stand_apart_and_in_order():
    heights = np.array([0.5, 0.51, 0.1, 0.505, 0.9, 0.12])
    moved = spread(heights, 0.06)
    assert np.array_equal(np.argsort(moved), np.argsort(heights)) and np.diff(np.sort(moved)).min() > 0.06 - 1e-6
    assert moved[4] == 0.9 and np.abs(moved - heights).max() < 0.07
    assert np.array_equal(spread(np.array([0.1, 0.5]), 0.06), [0.1, 0.5])


def test_schemes_have_styles_of_their_own():
    assert STYLES.keys() == SCHEMES.keys()
    for what in ('color', 'marker'):
        assert len({style[what] for style in [*STYLES.values(), OTHER_STYLE]}) == len(STYLES) + 1


# ----------------------------------------------------------------------------------------------------------------------
# the command, from end to end

FLAGS = ['--dataset=word_order', '--schemes=learned,rope', '--seeds=2', '--max_iters=6', '--eval_interval=2', '--eval_windows=8',
         '--n_layer=1', '--n_head=2', '--n_embd=16', '--block_size=16', '--batch_size=4', '--optimizer=adamw', '--warmup_iters=1',
         '--learning_rate=1e-2', '--sweep_tokens=256', '--stride=4', '--device=cpu']


def run_compare(project, *flags, **options):
    """Runs the project's own compare.py, which starts the project's train.py."""
    return run(project, os.path.join(project, 'compare.py'), *flags, picture=True, **options)


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    """A project with a small word_order, and out/compare as `compare.py` leaves it."""
    folder = make_project(tmp_path_factory.mktemp('project'))
    words = os.path.join(folder, 'data', 'word_order')
    shutil.copytree(os.path.join(ROOT, 'data', 'word_order'), words, ignore=shutil.ignore_patterns('*.bin', 'meta.json', 'input.txt'))
    assert command(folder, os.path.join(words, 'prepare.py'), '--train_lines=2000', '--val_lines=90').code == 0
    done = run_compare(folder, *FLAGS, '--jobs=2')
    assert done.code == 0, done.err
    return SimpleNamespace(folder=folder, out=os.path.join(folder, 'out', 'compare'), first=done)


def read_results(project):
    with open(os.path.join(project.out, 'results.csv'), newline='') as file:
        return list(csv.DictReader(file))


def read_table(project):
    return read(os.path.join(project.out, 'table.md')).decode()


def last_checkpoint(project, folder):
    path = os.path.join(project.folder, folder, 'last.pt')
    return load_checkpoint(path), path


def without_step_times(text):
    return re.sub(r'(\|[^|]*){4}\|( +\d+\.\d\d) \|', lambda match: match[0].replace(match[2], 'TIME'), text)


def test_results_agree_with_the_runs_and_the_table_with_the_results(project):
    rows, table = read_results(project), read_table(project)
    assert table in project.first.out
    assert [(row['scheme'], row['seed']) for row in rows if row['scheme'] == 'rope'] == [('rope', '1337'), ('rope', '1338')]
    losses = {}
    for row in rows:
        logged = read_log(project.folder, os.path.relpath(row['run'], 'out'))[-1][5]
        assert float(row['val_loss']) == pytest.approx(logged, abs=1e-5)                # two computations of the same figure
        losses[row['scheme'], row['seed']] = float(row['val_loss'])
        assert row['own_parameters'] == ('256' if row['scheme'] == 'learned' else '0')
    rope, learned = ([losses[name, seed] for seed in ('1337', '1338')] for name in ('rope', 'learned'))
    mean, half = np.mean(rope) - np.mean(learned), 4.303 * math.sqrt((np.var(rope, ddof=1) + np.var(learned, ddof=1)) / 2)
    found = re.search(r'\| ([+-]\d\.\d{4}) \(([+-]\d\.\d{4}) to ([+-]\d\.\d{4})\) \|', table)     # t, 2 degrees of freedom
    assert [float(number) for number in found.groups()] == pytest.approx([mean, mean - half, mean + half], abs=1e-3)
    assert f'{np.mean(rope):.4f} ± {abs(rope[0] - rope[1]) / 2:.4f}' in table
    assert 'table ends at 16' in table and 'bag of words' in table and '0.167' in table
    for name in ('curves.png', 'length.png', 'position.png'):
        assert read(os.path.join(project.out, name)).startswith(b'\x89PNG')


def test_evaluation_agrees_with_a_slow_one(project):
    row = next(row for row in read_results(project) if row['scheme'] == 'rope')
    model = make_model(*last_checkpoint(project, row['run'])).eval()
    tokens = np.fromfile(os.path.join(project.folder, 'data', 'word_order', 'val.bin'), dtype='<u2')
    count = 256
    for length in (4, 32):
        slow = [slow_loss(model, tokens, 128 + i // length * length, 128 + i) for i in range(count)]
        assert float(row[f'loss_at_{length}']) == pytest.approx(np.mean(slow), abs=1e-4)


def test_same_command_gives_the_same_table_and_finishes_what_is_not(project):
    before = read_table(project)
    for name in glob.glob(os.path.join(project.out, '*', 'evaluation.json')):
        os.remove(name)                                         # so that everything is evaluated anew
    log = os.path.join(project.out, 'rope-seed1338', 'log.csv')
    rows = read(log).splitlines(keepends=True)
    write(log, b''.join(rows[:-1]))                             # as if that run had been killed while it was scored at its end
    weights = os.path.join(project.out, 'learned-seed1337', 'last.pt')
    written = os.path.getmtime(weights)
    done = run_compare(project.folder, *FLAGS, '--jobs=2')
    assert done.code == 0, done.err
    assert '3 of 4 runs are finished already' in done.out and '1 run of 6 steps to train' in done.out
    assert os.path.getmtime(weights) == written
    assert without_step_times(read_table(project)) == without_step_times(before) and 'TIME' in without_step_times(before)


def test_changed_code_trains_its_own_scheme_anew_and_no_other(project, tmp_path):
    folder = str(tmp_path / 'project')
    shutil.copytree(project.folder, folder)
    source = read(os.path.join(folder, 'model.py')).decode()
    compared = lambda *more: command(folder, os.path.join(folder, 'compare.py'), *FLAGS, '--stride=16', *more)    # noqa: E731
    weights = {name: os.path.join(folder, 'out', 'compare', f'{name}-seed1337', 'last.pt') for name in ('learned', 'rope')}
    before = {name: read(path) for name, path in weights.items()}

    write(os.path.join(folder, 'model.py'), source.replace('    def turn(', '    # prose\n    def turn('))
    done = compared()
    assert done.code == 0 and '4 of 4 runs are finished already' in done.out, done.err
    turned = 'return rotate(q, *angles, self.rope_layout), rotate(k, *angles, self.rope_layout)'
    write(os.path.join(folder, 'model.py'), source.replace(turned, 'return rotate(q, *angles, self.rope_layout), k'))
    assert_refused(compared(), 'rope-seed1337 is of other code', 'position rope', '--retrain', '--keep')
    done = compared('--keep')
    assert done.code == 0 and 'has changed since**: out/compare/rope-seed1337, out/compare/rope-seed1338.' in done.out, done.err
    assert_refused(compared('--keep', '--retrain'), 'leave out --keep')
    done = compared('--retrain')
    assert done.code == 0 and '2 of 4 runs are finished already' in done.out, done.err
    assert 'out/compare/rope-seed1338 is trained anew' in done.out and 'changed since' not in done.out
    assert read(weights['learned']) == before['learned'] and read(weights['rope']) != before['rope']


def test_schemes_are_trained_by_their_config_files(project, tmp_path, monkeypatch):
    monkeypatch.setattr(compare, 'config_file', lambda scheme: str(tmp_path / f'{scheme}.py'))
    monkeypatch.setattr(compare, 'prepared', lambda dataset: SimpleNamespace(meta={'sha256': {}}, vocab_size=9))
    write(str(tmp_path / 't5.py'), "position = 't5'\nposition_rate = 10.0\nlearning_rate = 0.006\n")
    plan = lambda *more, asked={}: compare.planned_run('t5', 3, 'out/t5', asked, torch.device('cpu'), *more).settings  # noqa: E731
    assert (plan()['position_rate'], plan()['learning_rate'], plan()['seed']) == (10.0, 0.006, 3)
    assert plan(asked={'learning_rate': 0.001})['learning_rate'] == 0.001               # what is asked for comes first
    assert (plan(False)['position_rate'], plan(False)['learning_rate']) == (1.0, 0.003)     # as published
    assert compare.planned_run('none', 1, 'out/none', {}, torch.device('cpu')).settings['position_rate'] == 1.0
    write(str(tmp_path / 't5.py'), "position = 't5'\ncpu_rate = 2.0\n")       # times the rates that are left open, and no others
    assert (plan()['learning_rate'], plan()['muon_learning_rate'], plan()['min_lr']) == (0.006, 0.04, 0.0)
    asked = plan(asked={'learning_rate': 0.001})
    assert (asked['learning_rate'], asked['muon_learning_rate']) == (0.001, 0.04)


def test_own_settings_are_said():
    def trained(position, **settings):
        return SimpleNamespace(label=position, first=a_run(position=position, muon_learning_rate=0.02, **settings))
    t5, rope, alibi = trained('t5', position_rate=10.0), trained('rope', learning_rate=0.006), trained('alibi')
    assert own_settings([t5, rope, alibi]) == {'t5': 'learning_rate 0.001, position_rate 10', 'rope': 'learning_rate 0.006',
                                               'alibi': 'learning_rate 0.001'}
    assert own_settings([t5, alibi]) == {'t5': 'position_rate 10', 'alibi': ''}


def test_finished_runs_are_compared_by_name_and_others_refused(project, tmp_path):
    learned, rope = (os.path.join('out', 'compare', f'{name}-seed1337') for name in ('learned', 'rope'))
    done = run_compare(project.folder, rope, learned, '--sweep_tokens=256', f'--out_dir={tmp_path}')
    assert done.code == 0 and 'difference to learned' in done.out and 'Seeds of all: 1337' in done.out, done.err
    longer = os.path.join(project.folder, 'out', 'longer')
    shutil.copytree(os.path.join(project.folder, rope), longer, dirs_exist_ok=True)
    config = json.loads(read(os.path.join(longer, 'config.json')))
    config['settings']['weight_decay'] = 0.5
    write(os.path.join(longer, 'config.json'), json.dumps(config))
    assert_refused(run_compare(project.folder, learned, 'out/longer'), 'weight_decay 0.1 against 0.5', '--force')
    assert_refused(run_compare(project.folder, learned, 'out/longer', '--force'), 'is of other code', 'position rope', '--keep')
    done = run_compare(project.folder, learned, 'out/longer', '--force', '--keep', '--sweep_tokens=256', f'--out_dir={tmp_path}')
    assert 'has changed since**: out/longer.' in done.out
    assert done.code == 0 and 'out/longer: weight_decay 0.1 against 0.5' in done.out and ' to ' not in done.out.split('\n\n')[3], done.err
    assert_refused(run_compare(project.folder, *FLAGS, '--max_iters=8'), 'holds another run', 'max_iters 6 against 8', '--out_dir')


def test_scalings_of_a_rope_run(project, tmp_path):
    rope = os.path.join('out', 'compare', 'rope-seed1337')
    done = run_compare(project.folder, rope, '--scalings=none,linear,ntk,dynamic,yarn', '--sweep_tokens=256', f'--out_dir={tmp_path}')
    assert done.code == 0, done.err
    tokens = np.fromfile(os.path.join(project.folder, 'data', 'word_order', 'val.bin'), dtype='<u2')
    table = (tmp_path / 'scaling.md').read_text()
    table = table[table.index('## Windows side by side'):]
    for scaling in ('none', 'linear', 'ntk', 'dynamic', 'yarn'):
        name = 'ntk, dynamic' if scaling in ('ntk', 'dynamic') else scaling
        cells = re.search(rf'^\| {name} \(1\) +\|(.*)\|$', table, re.M)[1].split('|')
        for cell, length in zip(cells, (16, 32, 64, 128), strict=True):
            factor = 1.0 if scaling in ('none', 'dynamic') else length / 16
            model = make_model(*last_checkpoint(project, rope), rope_scaling=scaling, rope_factor=factor,
                               rope_original_length=16).eval()
            windows = torch.from_numpy(tokens[128:128 + 257].astype(np.int64))
            with torch.inference_mode():
                loss = model(windows[:-1].view(-1, length), windows[1:].view(-1, length))[1].item()
            assert float(cell) == pytest.approx(loss, abs=1e-4)
    learned = os.path.join('out', 'compare', 'learned-seed1337')
    assert_refused(run_compare(project.folder, learned, '--scalings=yarn'), '--scalings is for RoPE runs', 'position learned')


# ----------------------------------------------------------------------------------------------------------------------
# its own files, damaged

def set_in(part, **values):
    """An edit of config.json: entries of settings or model_args are changed, or where the value is ... removed."""
    def edit(text):
        config = json.loads(text)
        config[part] = {key: value for key, value in {**config[part], **values}.items() if value is not ...}
        return json.dumps(config)
    return edit


RESUME = '--init_from=resume` writes it again'


@pytest.mark.parametrize('file, edit, words', [
    ('config.json', lambda text: 'junk', ['is damaged', RESUME]),
    ('config.json', lambda text: '[' * 100_000, ['is damaged', RESUME]),
    ('config.json', lambda text: '[1, 2]', ['is damaged', RESUME]),
    ('config.json', lambda text: '{"settings": 1, "model_args": 2, "data": 3}', ['is damaged', RESUME]),
    ('config.json', set_in('settings', batch_size=...), ['lacks the setting batch_size', RESUME]),
    ('config.json', set_in('settings', eval_windows='many'), ["eval_windows cannot be 'many'", RESUME]),
    ('config.json', set_in('settings', learning_rate=math.nan), ['learning_rate cannot be nan', RESUME]),
    ('config.json', set_in('settings', dtype='odd'), ['dtype must be one of', "'odd'"]),
    ('config.json', set_in('model_args', n_layer='2'), ['settings and model_args differ in n_layer', RESUME]),
    ('config.json', set_in('model_args', wings=2), ["no setting 'wings'", RESUME]),
    ('config.json', set_in('model_args', vocab_size=-1), ['vocab_size must be positive', RESUME]),
    ('log.csv', lambda text: text.replace(text.splitlines()[2].split(',')[-1], 'nan'), ['log.csv is damaged', 'resume the run']),
    ('log.csv', lambda text: text + 'x' * 200_000, ['log.csv is damaged', 'resume the run']),
    ('log.csv', lambda text: text + text.splitlines()[1], ['log.csv is damaged', 'resume the run']),
    ('log.csv', lambda text: 'iter,tokens\n1,2\n', ['log.csv is damaged', 'resume the run']),
    ('last.pt', None, ['last.pt cannot be read (Is a directory)', 'another copy']),
    ('log.csv', None, ['log.csv cannot be read (Is a directory)']),
    ('config.json', None, ['config.json cannot be read (Is a directory)'])])
def test_a_damaged_run_is_one_line(project, tmp_path, file, edit, words):
    folder = str(tmp_path / 'run')
    shutil.copytree(os.path.join(project.out, 'rope-seed1337'), folder)
    path = os.path.join(folder, file)
    if edit:
        write(path, edit(read(path).decode()))
    else:
        os.remove(path)
        os.mkdir(path)
    assert_refused(run_compare(project.folder, folder, f'--out_dir={tmp_path}', '--sweep_tokens=256'), *words)


def test_resuming_mends_what_the_line_says_it_mends(project, tmp_path):
    run_folder = os.path.join(project.folder, 'out', 'mended')
    shutil.copytree(os.path.join(project.out, 'rope-seed1337'), run_folder)
    rows = read_log(project.folder, 'mended')
    for file in ('config.json', 'log.csv'):
        write(os.path.join(run_folder, file), 'junk')
    flags = ['out/mended', f'--out_dir={tmp_path}', '--sweep_tokens=256']
    refused = run_compare(project.folder, *flags)
    assert_refused(refused, 'config.json is damaged')
    remedy = re.search('`python (train.py .*)`', refused.err)[1].split()
    assert run(project.folder, os.path.join(project.folder, remedy[0]), *remedy[1:]).code == 0
    assert run_compare(project.folder, *flags).code == 0
    assert without_times(read_log(project.folder, 'mended')) == without_times(rows)


def test_kept_evaluations_that_were_changed_are_made_anew(project, tmp_path):
    folder = str(tmp_path / 'rope')
    shutil.copytree(os.path.join(project.out, 'rope-seed1337'), folder)

    def compared(*more):
        done = run_compare(project.folder, folder, '--sweep_tokens=256', f'--out_dir={tmp_path / "table"}', *more)
        assert done.code == 0, done.err
        return without_step_times((tmp_path / 'table' / 'table.md').read_text())

    before, path = compared(), os.path.join(folder, 'evaluation.json')
    whole = read(path)
    digit = whole.rindex(b'.') + 1
    for damaged in (whole[:-20], b'', b'null', whole.replace(b'val_loss', b'val_lost'),
                    whole[:digit] + bytes([whole[digit] ^ 1]) + whole[digit + 1:]):
        write(path, damaged)
        assert compared() == before and read(path) == whole
    os.remove(os.path.join(folder, 'last.pt'))                  # runs that are published without their weights
    assert compared() == before
    refused = run_compare(project.folder, folder, '--sweep_tokens=128', f'--out_dir={tmp_path / "table"}')
    assert_refused(refused, 'has no last.pt', 'of other windows')
    write(path, whole[:-20])
    assert_refused(run_compare(project.folder, folder, '--sweep_tokens=256', f'--out_dir={tmp_path / "table"}'), 'has no last.pt')


def test_a_folder_that_cannot_be_is_one_line(project, tmp_path):
    rope = os.path.join('out', 'compare', 'rope-seed1337')
    for flags in ([*FLAGS, '--out_dir=out/' + 'x' * 300], [rope, '--out_dir=new/' + 'x' * 300],
                  [rope, '--scalings=none', '--out_dir=' + 'x' * 300]):
        assert_refused(run_compare(project.folder, *flags), 'cannot be made (File name too long); choose another')
    assert_refused(run_compare(project.folder, 'x' * 300), 'File name too long')


def test_nothing_in_the_current_folder_is_run(project, tmp_path):
    """Modules of these names there would end every Python that imports them."""
    for name in ('hashlib', 'json', 'numpy', 'torch', 'configurator', 'dataset', 'plots', 'data', 'pip'):
        (tmp_path / f'{name}.py').write_text('raise SystemExit(99)')
    compare = os.path.join(project.folder, 'compare.py')
    done = command(str(tmp_path), compare, *FLAGS, '--schemes=none', '--seeds=1')
    assert done.code == 0, done.err
    assert subprocess.run([*pip_command(), '--version'], cwd=tmp_path, capture_output=True).returncode == 0


# ----------------------------------------------------------------------------------------------------------------------
# training what is missing

FAULT = """
if position == 'alibi' and os.path.exists('fail'):      # once the other training has saved something
    while not os.path.exists('out/compare/rope-seed1337/last.pt'):
        time.sleep(0.05)
    fail('the loss is nan')
"""


def test_trainings_go_side_by_side_stop_together_and_go_on(tmp_path):
    """train.py is the real one, but that alibi's training fails as long as there is a file called fail."""
    project = make_project(tmp_path / 'project')
    source = read(os.path.join(project, 'train.py')).decode()
    write(os.path.join(project, 'train.py'), source.replace('\nimport torch\n', '\nimport torch\n' + FAULT, 1))
    write(os.path.join(project, 'fail'), '')
    flags = [*FLAGS, '--dataset=tiny', '--schemes=rope,alibi', '--seeds=1', '--jobs=2', '--max_iters=3000', '--eval_interval=1000']
    out = os.path.join(project, 'out', 'compare')
    done = run_compare(project, *flags)
    assert done.code == 2 and 'alibi-seed1337 failed: the loss is nan' in done.err, done.err
    assert 0 < state(project, 'compare/rope-seed1337')['iter_num'] < 3000
    assert 'and saved' in read(os.path.join(out, 'rope-seed1337', 'output.txt')).decode()       # asked to save, and waited for

    os.remove(os.path.join(project, 'fail'))
    done = run_compare(project, *flags)
    assert done.code == 0, done.err
    assert 'going on from step' in read(os.path.join(out, 'rope-seed1337', 'output.txt')).decode()
    for name in ('rope', 'alibi'):
        assert read_log(project, f'compare/{name}-seed1337')[-1][0] == 3000
        versions = json.loads(read(os.path.join(out, f'{name}-seed1337', 'config.json')))['versions']
        assert versions['threads'] == max(1, os.cpu_count() // 2)       # each its share of the cores
