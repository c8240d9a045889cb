"""The tables in README.md and RESULTS.md say what the runs in results/ found."""
import csv
import glob
import json
import os
import re
from types import SimpleNamespace

import numpy as np
import pytest

from harness import ROOT
from runs import read_run
from tables import intervals, mean_and_error

RESULTS = os.path.join(ROOT, 'results')
README, REPORT = (open(os.path.join(ROOT, name), encoding='utf-8').read() for name in ('README.md', 'RESULTS.md'))


def groups_of(path):
    """The runs of a results.csv by scheme, as tables.intervals() wants them."""
    groups = {}
    with open(os.path.join(RESULTS, path), newline='') as file:
        for row in csv.DictReader(file):
            group = groups.setdefault(row['scheme'], SimpleNamespace(label=row['scheme'], runs={}, rows=[]))
            group.runs[int(row['seed'])] = SimpleNamespace(result=dict(report_loss=float(row.get('loss', row['val_loss']))))
            group.rows.append(row)
    return groups


def test_readmes_table_is_what_the_runs_found():
    groups = groups_of('results.csv')
    differences = intervals(list(groups.values()), groups['learned'])
    section = README[README.index('**Eight schemes'):]
    lines = dict(re.findall(r'^\| (\w+) \| (.*) \|$', section, re.M)[:9])
    assert lines.keys() - {'scheme'} == groups.keys()
    for name, group in groups.items():
        loss, against, far = (cell.strip() for cell in lines[name].split('|'))
        mean, error = mean_and_error([run.result['report_loss'] for run in group.runs.values()])
        assert loss == f'{mean:.4f} ± {error:.4f}', name
        if name == 'learned':
            assert (against, far) == ('base', 'table ends')
            continue
        mean, half = differences[name]
        found = [float(number) for number in re.findall(r'[+-]\d\.\d{3}', against)]
        assert found == pytest.approx([mean, mean - half, mean + half], abs=1.6e-3), name     # Dunnett's bounds are approximate
        assert far == f'{np.mean([float(row["loss_at_512"]) for row in group.rows]):.2f}', name


def test_resultss_tables_are_those_of_the_comparison():
    with open(os.path.join(RESULTS, 'tuned', 'table.md'), encoding='utf-8') as file:
        rows = [line for line in file.read().splitlines() if line.startswith('| ')]
    missing = [row for row in rows if row not in REPORT]
    assert not missing, missing


def test_the_runs_are_whole_and_of_the_configs():
    """Each kept run has its end, and the settings that config/ gives its scheme now."""
    folders = glob.glob(os.path.join(RESULTS, 'tuned', '*-seed*'))
    assert len(folders) >= 8
    rows = [row for group in groups_of('tuned/results.csv').values() for row in group.rows]
    for folder in folders:
        run = read_run(folder)
        assert run.finished and run.log[-1].iteration == 1300, folder
        with open(os.path.join(ROOT, 'config', f'{run.settings["position"]}.py')) as file:
            for name, value in re.findall(r'^(\w+) = ([\d.]+)', file.read(), re.M):
                assert run.settings[name] == float(value), (folder, name)
        with open(os.path.join(folder, 'evaluation.json'), 'rb') as file:
            found = json.loads(file.read().split(b'\n', 1)[1])
        row = next(row for row in rows if row['run'].endswith(os.path.basename(folder)))
        assert float(row['val_loss']) == found['val_loss'] == pytest.approx(run.log[-1].val_loss, abs=1e-5)
