"""An exported run is the same model to transformers: its logits, its tokens, and the text that it writes."""
import os

import pytest
import torch

import export
from conftest import SCALINGS, SCHEMES, random_tokens, small_model
from dataset import BPETokenizer, CharTokenizer, WordTokenizer
from harness import assert_refused, command, make_project, run, trained
from model import GPT

transformers = pytest.importorskip('transformers')
EXPORTED = [name for name in SCHEMES if SCHEMES[name]['position'] in export.WRITERS]


def theirs(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits_of(model, idx):
    with torch.inference_mode():
        return model(idx).logits


@pytest.mark.parametrize('options', [dict(bias=False), dict(bias=True), dict(bias=False, gelu='tanh')])
@pytest.mark.parametrize('name', [*EXPORTED, *SCALINGS])
def test_logits_and_the_likeliest_text_are_ours(name, options, tmp_path, capsys):
    """Random weights, biases and norms too; the largest difference of logits below 1e-4, and generate() token by token."""
    model = small_model(name, std=0.2, n_head=4, **options)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    folder = str(tmp_path / 'folder')
    if name == 'alibi' and options != dict(bias=False):
        with pytest.raises(SystemExit):
            export.write_folder(model, None, folder)
        assert 'ALiBi in MPT only' in capsys.readouterr().err
        return
    export.write_folder(model, None, folder)
    loaded, idx = theirs(folder), random_tokens(3, 32)
    with torch.inference_mode():
        ours = model(idx, idx)[0]
    assert (logits_of(loaded, idx) - ours).abs().max() < 1e-4
    if name in SCALINGS and name != 'dynamic':          # beyond the length that was trained, too
        idx = random_tokens(2, 64)
        with torch.inference_mode():
            assert (logits_of(loaded, idx) - model(idx, idx)[0]).abs().max() < 1e-4
    prompt = random_tokens(1, 8)
    text = loaded.generate(prompt, max_new_tokens=16, do_sample=False, pad_token_id=0)
    assert torch.equal(text, model.generate(prompt, 16, temperature=0))


def test_dynamic_scaling_beyond_its_length(tmp_path):
    model = small_model('dynamic', std=0.2)
    export.write_folder(model, None, str(tmp_path / 'folder'))
    idx = random_tokens(2, 64)
    with torch.inference_mode():
        assert (logits_of(theirs(str(tmp_path / 'folder')), idx) - model(idx, idx)[0]).abs().max() < 1e-4


def test_a_padded_vocabulary_is_cut(tmp_path):
    tokenizer = CharTokenizer('abcdefghijklm')
    model = small_model('rope', std=0.2)                # 17 rows for 13 characters
    export.write_folder(model, tokenizer, str(tmp_path / 'folder'))
    idx = random_tokens(2, 16, vocab_size=13)
    loaded = theirs(str(tmp_path / 'folder'))
    assert loaded.config.vocab_size == 13
    with torch.inference_mode():
        assert (logits_of(loaded, idx) - model(idx, idx)[0][..., :13]).abs().max() < 1e-4


@pytest.mark.parametrize('make, text', [
    (lambda: CharTokenizer('\n the cat"ä😀'), 'the cat\n\n"ä😀 tha'),
    (lambda: WordTokenizer(['\n', 'a', ' cat', ' sat', '  ']), 'a cat sat\n cat  \n'),
    (BPETokenizer, 'Zwölf Boxkämpfer, isn\'t it?\n\n  42 <|endoftext|> next 猫')])
def test_tokenizers_are_ours(make, text, tmp_path):
    try:
        tokenizer = make()
    except ValueError:
        pytest.skip('there is no gpt2 vocabulary here')
    assert export.write_tokenizer(tokenizer, str(tmp_path))
    loaded = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    ids = loaded(text)['input_ids']
    assert ids == tokenizer.encode(text).tolist()
    assert loaded.decode(ids) == text and len(loaded) == tokenizer.vocab_size


def test_characters_that_are_no_text_are_left_out(tmp_path):
    assert not export.write_tokenizer(CharTokenizer('ab\ud83d'), str(tmp_path))


def test_the_command(tmp_path):
    project = make_project(tmp_path / 'project')
    trained(project, '--position=rope', '--out_dir=out/rope')
    done = command(project, 'export.py', 'out/rope', '--to=folder')
    assert done.code == 0 and 'a GPTNeoXForCausalLM' in done.out, done.err
    folder = os.path.join(project, 'folder')
    assert {'config.json', 'model.safetensors', 'tokenizer.json'} <= set(os.listdir(folder))
    tokenizer, loaded = transformers.AutoTokenizer.from_pretrained(folder), theirs(folder)
    prompt = tokenizer('the wind', return_tensors='pt')['input_ids']
    text = tokenizer.decode(loaded.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)[0])
    sampled = run(project, 'sample.py', 'out/rope', '--start=the wind', '--max_new_tokens=8', '--temperature=0', '--device=cpu')
    assert sampled.out.startswith(text) and len(text) == 16
    before = sorted(os.listdir(project))
    assert_refused(command(project, 'export.py', 'out/rope', '--to=folder'), 'is there already')
    assert_refused(run(project, 'export.py', 'out/rope'), 'where to?')
    assert_refused(run(project, 'export.py', '--to=other'), 'which run?')
    assert_refused(run(project, 'export.py', 'out/none', '--to=other'), 'there is no checkpoint')
    trained(project, '--position=t5', '--out_dir=out/t5')
    assert_refused(run(project, 'export.py', 'out/t5', '--to=other'), 'position t5', 'no model of transformers')
    assert sorted(os.listdir(project)) == before


def test_what_cannot_be_exported_is_what_has_no_model_there():
    assert {SCHEMES[name]['position'] for name in SCHEMES} - set(export.WRITERS) == {'shaw', 't5', 'tupe'}
    assert isinstance(small_model('rope'), GPT)
