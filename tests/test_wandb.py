"""wandb_log=True: offline, with no account and no network, wandb holds log.csv's very numbers; whatever ails wandb, training goes on."""
import glob
import json
import os
import struct
import sys
import types

import pytest

from harness import make_project, read, read_log, trained

COLUMNS = ['iter', 'tokens', 'seconds', 'lr', 'train_loss', 'val_loss']


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    return make_project(tmp_path_factory.mktemp('project'), files=False)


def records(path):
    """The records of an offline run's file, which is a log in LevelDB's format: 7 bytes of header, then blocks of 32 KB."""
    from wandb.proto import wandb_internal_pb2
    content, position, content_of_record = read(path), 7, b''
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:                # too little of the block is left for a record
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack('<IHB', content[position:position + 7])
        content_of_record += content[position + 7:position + 7 + length]
        position += 7 + length
        if kind in (1, 4):                              # a whole record, or the last piece of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(content_of_record)
            content_of_record = b''
            yield record


def logged(path):
    """What an offline run's file says: (run id, its name, rows as in log.csv)."""
    rows, run = [], None
    for record in records(path):
        kind = record.WhichOneof('record_type')
        if kind == 'run':
            run = record.run
        elif kind == 'history':
            numbers = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            assert record.history.step.num == numbers['iter']
            rows.append([numbers.get(column, '') for column in COLUMNS])
    return run.run_id, run.display_name, rows


def test_offline_it_logs_what_the_log_has_and_resumes_the_same_run(project, monkeypatch):
    wandb = pytest.importorskip('wandb')
    for name, value in dict(WANDB_MODE='offline', WANDB_DIR=project, WANDB_SILENT='true', WANDB_CONSOLE='off', HOME=project).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv('WANDB_API_KEY', raising=False)
    flags = ['--out_dir=out/watched', '--wandb_log=True']
    trained(project, *flags, '--max_iters=20', '--lr_decay_iters=30')
    first = read_log(project, 'watched')
    trained(project, *flags, '--init_from=resume', '--max_iters=30')
    whole = read_log(project, 'watched')
    wandb.teardown()

    one, two = sorted(glob.glob(os.path.join(project, 'wandb', 'offline-run-*', '*.wandb')), key=os.path.getmtime)
    id_before, name, rows_before = logged(one)
    id_after, _, rows_after = logged(two)
    assert id_before == id_after and name == 'watched'
    assert rows_before == first and [row[0] for row in first] == [0, 10, 20]
    assert rows_after == whole[2:] and [row[0] for row in rows_after] == [20, 30]


def test_without_the_setting_wandb_is_not_imported(project, monkeypatch):
    monkeypatch.setitem(sys.modules, 'wandb', None)     # importing it would be an error
    run = trained(project, '--out_dir=out/unwatched')
    assert 'wandb' not in run.out


@pytest.mark.parametrize('ailment', ['not installed', 'does not start', 'wants to end', 'fails midway', 'fails at the end'])
def test_training_goes_on_without_it(ailment, project, monkeypatch):
    def init(**options):
        raise SystemExit('no key') if ailment == 'wants to end' else RuntimeError('no route to host\nand a long story')

    def fail_at(number):
        def log(*arguments, **options):
            calls.append(None)
            if len(calls) >= number:
                raise OSError('no space left')
        return log

    calls, broken = [], types.ModuleType('wandb')
    broken.init = init
    if ailment.startswith('fails'):                     # four rows, then the end
        log = fail_at(2 if ailment == 'fails midway' else 5)
        broken.init = lambda **options: types.SimpleNamespace(id='abc', log=log, finish=log)
    monkeypatch.setitem(sys.modules, 'wandb', None if ailment == 'not installed' else broken)
    run = trained(project, f'--out_dir=out/{ailment.replace(" ", "_")}', '--wandb_log=True')
    (line,) = [line for line in run.out.splitlines() if 'wandb' in line]
    assert line.startswith('wandb does not work (') and line.endswith('): training goes on without it')
    assert run.err == '' and 'done: ' in run.out
    assert len(calls) == {'fails midway': 2, 'fails at the end': 5}.get(ailment, 0)
