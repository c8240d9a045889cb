"""What sample.py promises beyond model.py's generate: seeds, padding, a prompt that its vocabulary has."""
import os

import pytest
import torch

from harness import make_data, make_project, ran, read, state, trained
from dataset import WordTokenizer, write_dataset


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    folder = make_project(tmp_path_factory.mktemp('project'), files=False)
    trained(folder, '--max_iters=1', '--out_dir=out/a')
    return folder


def texts(project, *flags, run='out/a'):
    """The texts that sample.py writes."""
    printed = ran(project, 'sample.py', run, '--device=cpu', '--max_new_tokens=40', *flags).out
    return printed.split('\n' + '-' * 15 + '\n')[:-1]


def test_no_seed_repeats_anothers_text(project):
    found = [text for seed in range(4) for text in texts(project, '--num_samples=4', f'--seed={seed}')]
    assert len(found) == 16 and len(set(found)) == 16
    assert texts(project, '--num_samples=4', '--seed=2') == found[8:12] and texts(project, '--seed=2') == found[8:9]


def test_ids_of_padding_are_not_sampled(project):
    """A model with more ids than its tokenizer, all of them as likely: each text has as many tokens as were asked for."""
    checkpoint = state(project, 'a', 'ckpt.pt')
    weight = checkpoint['model']['transformer.wte.weight']
    padded = torch.cat([weight, weight[:1].repeat(40, 1)])
    checkpoint['model'].update({'transformer.wte.weight': padded, 'lm_head.weight': padded})
    checkpoint['model_args']['vocab_size'] = len(padded)
    del checkpoint['digests']                                               # which are those of other weights
    os.makedirs(os.path.join(project, 'out', 'padded'))
    torch.save(checkpoint, os.path.join(project, 'out', 'padded', 'ckpt.pt'))
    assert all(len(text) == len('who') + 40 for text in texts(project, '--num_samples=5', '--start=who', run='out/padded'))


@pytest.mark.parametrize('name, first', [('dna', 'A'), ('words', ' a')])
def test_the_default_prompt_is_in_every_vocabulary(name, first, project):
    """A text without line breaks; a lone surrogate in a vocabulary of words, too, is no traceback."""
    folder = os.path.join(project, 'data', name)
    if name == 'dna':
        make_data(folder, 'ACGT' * 500, 1000)
    else:
        write_dataset(folder, ' a b' * 100, ' a b' * 100, WordTokenizer([' a', ' b']), 'made up')
    trained(project, f'--dataset={name}', '--max_iters=1', f'--out_dir=out/{name}')
    if name == 'words':
        path = os.path.join(project, 'out', name, 'ckpt.pt')
        checkpoint = torch.load(path, weights_only=True)
        checkpoint['tokenizer']['words'] = [' a', '\udc80']
        torch.save(checkpoint, path)
    [text] = texts(project, run=f'out/{name}')
    assert text.startswith(first) and len(text) > 40
