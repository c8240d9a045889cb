"""The notebooks run from top to bottom, are stored with outputs, and leave no claim or question unanswered."""
import glob
import os
import re

import nbformat
import pytest
from nbclient import NotebookClient

from conftest import HERE

FOLDER = os.path.join(os.path.dirname(HERE), 'notebooks')
NOTEBOOKS = sorted(os.path.basename(path) for path in glob.glob(os.path.join(FOLDER, '*.ipynb')))
LARGEST = 400 * 1024                                    # bytes
WANTED = [str(number) for number in range(1, 40)] + [f'Q{number}' for number in range(1, 11)]
MACHINE_PATH = re.compile(r'/(home|root|tmp|work|Users|var|mnt|opt|usr|private)/|[A-Z]:\\|site-packages')


def read(name):
    return nbformat.read(os.path.join(FOLDER, name), as_version=4)


def table_rows():
    """The rows of the table in notebooks/README.md: a list of (number, claim, notebooks, verdict)."""
    with open(os.path.join(FOLDER, 'README.md'), encoding='utf-8') as file:
        lines = [line.strip() for line in file if re.match(r'\| *Q?\d+ *\|', line)]
    return [tuple(cell.strip() for cell in re.split(r'(?<!\\)\|', line.strip('|'))) for line in lines]


def texts(cell):
    """What a reader sees of a cell but pictures: its source and its outputs' texts."""
    yield cell.source
    for output in cell.get('outputs', []):
        yield output.get('text', '')
        yield '\n'.join(output.get('traceback', []))
        for kind, value in output.get('data', {}).items():
            if not kind.startswith('image/png'):
                yield str(value)


def test_there_are_eight():
    assert [name.split('_')[0] for name in NOTEBOOKS] == [str(number) for number in range(1, 9)]


@pytest.mark.parametrize('name', NOTEBOOKS)
def test_runs_from_top_to_bottom_in_a_clean_kernel(name):
    there = {'metadata': {'path': FOLDER}}
    NotebookClient(read(name), timeout=600, kernel_name='python3', resources=there).execute()


@pytest.mark.parametrize('name', NOTEBOOKS)
def test_is_stored_small_and_with_clean_outputs(name):
    assert os.path.getsize(os.path.join(FOLDER, name)) <= LARGEST
    cells = read(name).cells
    code = [cell for cell in cells if cell.cell_type == 'code']
    in_one_go = list(range(1, len(code) + 1))
    assert [cell.execution_count for cell in code] == in_one_go, 'it was not run from top to bottom in one go'
    outputs = [output for cell in code for output in cell.outputs]
    pictures = [output for output in outputs if 'image/png' in output.get('data', {})]
    assert pictures, 'it is stored without its pictures'
    assert not [output for output in outputs if output.output_type == 'error']
    assert not [output for output in outputs if output.get('name') == 'stderr'], 'warnings are stored'
    for cell in cells:
        for text in texts(cell):
            assert not MACHINE_PATH.search(text), MACHINE_PATH.search(text)


@pytest.mark.parametrize('name', NOTEBOOKS)
def test_has_assertions_and_an_exercise_with_a_hidden_solution(name):
    cells = read(name).cells
    assert any('assert ' in cell.source for cell in cells if cell.cell_type == 'code')
    exercises = [cell.source for cell in cells if cell.cell_type == 'markdown' and '<details>' in cell.source]
    assert exercises and all('</details>' in text and '<summary>' in text for text in exercises)


def test_every_claim_and_question_has_one_row():
    assert [number for number, *_ in table_rows()] == WANTED


@pytest.mark.parametrize('number', WANTED)
def test_row_names_a_notebook_that_treats_it_and_a_verdict(number):
    rows = [row for row in table_rows() if row[0] == number]
    assert len(rows) == 1 and len(rows[0]) == 4, rows
    _, claim, notebooks, verdict = rows[0]
    assert claim
    assert re.match('answer: .' if number.startswith('Q') else r'holds\b|corrected: .|cited: .', verdict), verdict
    named = re.findall(r'\]\(([^)]+)\)', notebooks)
    assert named and not set(named) - set(NOTEBOOKS), f'{notebooks} does not exist'
    mention = rf'\b{number}\b' if number.startswith('Q') else rf'[Cc]laims?\b[^.\n]*\b{number}\b'
    for name in named:
        texts = [cell.source for cell in read(name).cells if cell.cell_type == 'markdown']
        assert any(re.search(mention, text) for text in texts), f'{name} does not mention it'
