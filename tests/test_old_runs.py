"""
What was trained before the code was put in order goes on: stored_run/ is a run folder, with its data set, that commit cdb05d2 wrote, and
expected.json what that commit made of it.
"""
import csv
import json
import os
import shutil

import pytest
import torch

from harness import HERE, ran, read, read_log, state
from model import GPT, GPTConfig

STORED = os.path.join(HERE, 'stored_run')
EXPECTED = json.loads(read(os.path.join(STORED, 'expected.json')))

# Bit for bit on one machine; on another the order of additions within a matrix product may be another: 1e-7 a step.
SAME = dict(rel=0, abs=1e-6)


@pytest.fixture
def project(tmp_path):
    shutil.copytree(os.path.join(STORED, 'data'), tmp_path / 'data')
    shutil.copytree(os.path.join(STORED, 'run'), tmp_path / 'out' / 'rope')
    return str(tmp_path)


def test_an_old_run_resumes_as_the_old_code_would(project):
    before = read_log(project, 'rope')
    resumed = ran(project, 'train.py', '--out_dir=out/rope', '--init_from=resume', '--max_iters=30')
    log = read_log(project, 'rope')
    assert 'going on from step 20' in resumed.out and 'with muon' in resumed.out
    assert log[:2] == before[:2] and [row[0] for row in log] == [0, 10, 20, 30]     # 20 was the end, scored on all windows
    assert log[-1][4] == pytest.approx(EXPECTED['resumed']['train_loss'], **SAME)
    assert log[-1][5] == pytest.approx(EXPECTED['resumed']['val_loss'], **SAME)
    assert state(project, 'rope', 'ckpt.pt')['best_val_loss'] == pytest.approx(EXPECTED['best_val_loss'], **SAME)


def test_an_old_run_samples_the_same_text(project):
    assert ran(project, 'sample.py', 'out/rope', '--start=who', '--max_new_tokens=80', '--device=cpu').out == EXPECTED['sample']


def test_an_old_run_is_compared_with_the_same_losses(project):
    ran(project, 'compare.py', 'out/rope', '--sweep_tokens=512', '--longest=16', '--device=cpu', picture=True)
    with open(os.path.join(project, 'out', 'compare', 'results.csv'), newline='') as file:
        (row,) = csv.DictReader(file)
    for name, loss in EXPECTED['compared'].items():
        assert float(row[name]) == pytest.approx(loss, **SAME), name


def test_an_old_run_is_started_from(project):
    ran(project, 'train.py', '--init_from=out/rope', '--out_dir=out/longer', '--dataset=wind', '--device=cpu', '--rope_scaling=linear',
        '--rope_factor=2', '--max_iters=2')
    arguments = state(project, 'longer')['model_args']
    assert (arguments['n_embd'], arguments['block_size'], arguments['rope_original_length']) == (16, 32, 16)


@pytest.mark.parametrize('name', EXPECTED['own_parameters'])
def test_weights_have_the_names_and_shapes_that_they_had(name):
    """Of every scheme: so that the weights of all old runs fit."""
    sizes = dict(n_layer=1, n_head=2, n_embd=16, block_size=16, vocab_size=22, bias=False)
    model = GPT(GPTConfig(**sizes, position=name.removesuffix('_values'), shaw_values=name == 'shaw_values'))
    found = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    assert found == {**EXPECTED['parameters'], **EXPECTED['own_parameters'][name]}


def test_old_checkpoints_hold_settings_that_the_model_knows():
    arguments = torch.load(os.path.join(STORED, 'run', 'last.pt'), weights_only=True)['model_args']
    assert vars(GPTConfig(**arguments)).items() >= arguments.items()
