"""What comes from elsewhere: GPT-2's weights, nanoGPT's checkpoints, data folders, config files and calls."""
import os
import pickle
import re

import numpy as np
import pytest
import torch

from conftest import SCALINGS, SCHEMES, all_logits, random_tokens, small_model
from dataset import BPETokenizer, CharTokenizer, Dataset
from harness import ROOT, TINY, assert_refused, command, make_project, ran, run, state, train, trained, write
from model import GPT, GPTConfig
from pretrained import is_gpt2, load_gpt2, load_start

transformers = pytest.importorskip('transformers')


@pytest.fixture(scope='module')
def gpt2(tmp_path_factory):
    """A small GPT-2 with random weights, in a folder as transformers writes it; and its logits."""
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_positions=32, n_embd=16, n_layer=2, n_head=2, vocab_size=22, bos_token_id=0, eos_token_id=0)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    folder = str(tmp_path_factory.mktemp('gpt2') / 'small')
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    return make_project(tmp_path_factory.mktemp('project'))


# ----------------------------------------------------------------------------------------------------------------------
# GPT-2

def test_gpt2s_logits_are_transformers(gpt2):
    folder, theirs = gpt2
    checkpoint, path = load_start(folder)
    assert is_gpt2(folder) and path == folder and not is_gpt2(os.path.dirname(folder)) and is_gpt2('gpt2-medium')
    model = GPT(GPTConfig(**checkpoint['model_args'])).eval()
    model.load_state_dict(checkpoint['model'])
    idx = random_tokens(2, 32, vocab_size=22)
    with torch.inference_mode():
        assert (all_logits(model, idx) - theirs(idx).logits).abs().max() < 1e-4
        text = theirs.generate(idx[:1, :4], max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert torch.equal(model.generate(idx[:1, :4], 20, temperature=0), text)


def test_what_is_no_gpt2_of_ours_is_one_line(tmp_path, capsys):
    odd = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_positions=8, n_embd=8, n_layer=1, n_head=2, vocab_size=9,
                                                               scale_attn_by_inverse_layer_idx=True, bos_token_id=0, eos_token_id=0))
    odd.save_pretrained(tmp_path / 'odd')
    with pytest.raises(SystemExit):
        load_gpt2(str(tmp_path / 'odd'))
    assert 'settings that this GPT does not have' in capsys.readouterr().err
    os.remove(tmp_path / 'odd' / 'model.safetensors')
    with pytest.raises(SystemExit):
        load_gpt2(str(tmp_path / 'odd'))
    assert 'cannot be read' in capsys.readouterr().err


def finetune(project, start, *flags):
    return train(project, f'--init_from={start}', '--out_dir=out/tuned', '--overwrite', '--batch_size=2', '--max_iters=10', *flags)


def characters_of(project):
    return len(Dataset(os.path.join(project, 'data', 'tiny')).tokenizer.characters)


def test_finetuning_from_gpt2(project, gpt2):
    """Its own sizes; a shorter block crops the table, a longer one is refused, and another scheme drops it and says so."""
    folder, theirs = gpt2
    assert characters_of(project) == theirs.config.vocab_size, 'the fixture has another vocabulary than the tiny text'
    sizes = [flag for flag in TINY if not re.match('--(n_|block|batch|max_iters)', flag)]

    def tuned(*flags):
        return run(project, 'train.py', *sizes, f'--init_from={folder}', '--out_dir=out/tuned', '--overwrite', '--batch_size=2',
                   '--max_iters=4', *flags)
    done = tuned('--block_size=16')
    assert done.code == 0 and 'position=learned, 2 layers, 2 heads, width 16, block 16' in done.out, done.err
    assert state(project, 'tuned')['model']['transformer.wpe.weight'].shape == (16, 16)
    assert_refused(tuned('--block_size=64'), 'table of 32 positions', 'block_size cannot be 64', '--position=rope')
    done = tuned('--position=rope', '--block_size=64')
    assert done.code == 0 and 'position rope takes the place of learned, whose 512 parameters are dropped' in done.out, done.err
    assert not any('wpe' in name for name in state(project, 'tuned')['model'])
    done = tuned('--position=t5')
    assert done.code == 0 and state(project, 'tuned')['model']['transformer.wpe.table'].shape == (32, 2)
    done = tuned('--eval_only', '--init_from=nowhere')
    assert_refused(done, "there is no nowhere/ckpt.pt for 'nowhere'", 'gpt2')
    sampled = run(project, 'sample.py', folder, '--dataset=tiny', '--max_new_tokens=5', '--start=who', '--device=cpu')
    assert sampled.code == 0 and sampled.out.startswith('who'), sampled.err


def test_runs_change_their_scheme_too(project):
    """DroPE's way: trained with RoPE, a run goes on without positions; and one with a table goes on with Shaw's."""
    trained(project, '--position=rope', '--rope_scaling=yarn', '--rope_factor=2', '--out_dir=out/rope')
    done = finetune(project, 'out/rope', '--position=none')
    assert done.code == 0 and 'position none takes the place of rope\n' in done.out, done.err
    assert state(project, 'tuned')['model_args']['rope_scaling'] == 'none'
    trained(project, '--position=learned', '--out_dir=out/learned')
    done = finetune(project, 'out/learned', '--position=shaw')
    assert done.code == 0 and 'whose 256 parameters are dropped' in done.out, done.err
    assert finetune(project, 'out/learned', '--block_size=8').code == 0
    assert state(project, 'tuned')['model']['transformer.wpe.weight'].shape == (8, 16)


# ----------------------------------------------------------------------------------------------------------------------
# nanoGPT's data folders

def nanogpts(folder, text, meta=None, dtype=np.uint16):
    """A folder as nanoGPT's prepare.py writes it."""
    characters = sorted(set(text))
    ids = np.array([characters.index(one) for one in text], dtype=dtype)
    os.makedirs(folder)
    ids[:-200].tofile(os.path.join(folder, 'train.bin'))
    ids[-200:].tofile(os.path.join(folder, 'val.bin'))
    content = {'vocab_size': len(characters), 'itos': dict(enumerate(characters)), 'stoi': {one: i for i, one in enumerate(characters)}}
    write(os.path.join(folder, 'meta.pkl'), pickle.dumps(content if meta is None else meta))
    return folder


def imported(folder, *flags):
    return command(os.path.dirname(folder), os.path.join(ROOT, 'data', 'import_nanogpt.py'), os.path.basename(folder), *flags)


TEXT = 'to be or not to be: that is the question\n' * 40


def test_a_folder_of_characters(tmp_path, project):
    folder = nanogpts(str(tmp_path / 'chars'), TEXT)
    assert_refused(train(project, f'--dataset={folder}', '--out_dir=out/nano'), f'python data/import_nanogpt.py {folder}')
    before = {name: os.stat(os.path.join(folder, name)).st_mtime_ns for name in os.listdir(folder)}
    done = imported(folder)
    assert done.code == 0 and done.err == '', done.err
    data = Dataset(folder)
    assert data.tokenizer.characters == ''.join(sorted(set(TEXT)))
    assert data.tokenizer.decode(data.tokens('train')) + data.tokenizer.decode(data.tokens('val')) == TEXT
    assert {name: os.stat(os.path.join(folder, name)).st_mtime_ns for name in before} == before
    assert trained(project, f'--dataset={folder}', '--out_dir=out/nano').code == 0
    assert ran(project, 'sample.py', 'out/nano', '--start=to be', '--max_new_tokens=5', '--device=cpu').out.startswith('to be')
    assert_refused(imported(folder), 'meta.json is there already', '--dataset=')


def test_a_folder_without_meta_is_gpt2s(tmp_path):
    folder = nanogpts(str(tmp_path / 'bpe'), TEXT)
    os.remove(os.path.join(folder, 'meta.pkl'))
    try:
        tokenizer = BPETokenizer()
    except ValueError:
        pytest.skip('there is no gpt2 vocabulary here')
    for name, part in (('train', TEXT), ('val', 'Is it? ' * 50)):
        tokenizer.encode(part).tofile(os.path.join(folder, f'{name}.bin'))
    assert imported(folder).code == 0
    data = Dataset(folder)
    assert data.meta['tokenizer'] == {'kind': 'gpt2'} and data.tokenizer.decode(data.tokens('train')) == TEXT


def test_a_folder_of_characters_without_its_meta_is_not_taken_for_gpt2s(tmp_path):
    folder = nanogpts(str(tmp_path / 'chars'), TEXT)
    os.remove(os.path.join(folder, 'meta.pkl'))
    assert_refused(imported(folder), "are not GPT-2's", 'meta.pkl')
    assert sorted(os.listdir(folder)) == ['train.bin', 'val.bin']


class Attack:
    def __reduce__(self):
        return os.system, ('touch attacked',)


@pytest.mark.parametrize('meta, words', [
    (Attack(), 'not executed'), ({'itos': Attack()}, 'not executed'), ([1, 2], 'not what nanoGPT writes'), ({'itos': {0: 'a', 2: 'b'}}, 'not what'),
    ({'itos': {0: 'ab'}}, 'not what'), ({'itos': {0: 'b', 1: 'a'}}, 'by code point'), ({'itos': {0: 'a', 1: 'b'}}, 'beyond the 2 tokens'),
    ({}, 'not what'), ({'itos': {}}, 'not what')])
def test_a_strangers_meta_is_not_executed(meta, words, tmp_path):
    folder = nanogpts(str(tmp_path / 'chars'), TEXT, meta)
    assert_refused(imported(folder), words)
    assert sorted(os.listdir(folder)) == ['meta.pkl', 'train.bin', 'val.bin'] and os.listdir(tmp_path) == ['chars']


@pytest.mark.parametrize('content', [b'', b'junk', b'\x80\x05' + b'}' * 50, b'\x80\x02}r\xff\xff\xff\x7f.', b'}p2147483647\n.', b'(' * 100_000, pickle.dumps({'itos': {0: 'a'}})[:-5]])
def test_damaged_ones_are_one_line(content, tmp_path):
    folder = nanogpts(str(tmp_path / 'chars'), TEXT)
    write(os.path.join(folder, 'meta.pkl'), content)
    assert_refused(imported(folder), 'not what nanoGPT writes')
    write(os.path.join(folder, 'meta.pkl'), pickle.dumps({'itos': dict(enumerate(sorted(set(TEXT))))}))
    write(os.path.join(folder, 'val.bin'), b'\0' * 11)
    assert_refused(imported(folder), 'val.bin')
    os.remove(os.path.join(folder, 'val.bin'))
    assert_refused(imported(folder), 'val.bin cannot be read')


# ----------------------------------------------------------------------------------------------------------------------
# nanoGPT's habits

NANOGPTS_CONFIG = '''# a config file in nanoGPT's manner: its names, all of them known or left out with a line
out_dir = 'out/nano-config'
eval_interval = 250 # often
eval_iters = 200
log_interval = 10
always_save_checkpoint = False
wandb_log = False
wandb_project = 'shakespeare-char'
wandb_run_name = 'mini-gpt'
dataset = 'tiny'
gradient_accumulation_steps = 1
batch_size = 64
block_size = 256
n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2
learning_rate = 1e-3
max_iters = 5000
lr_decay_iters = 5000
min_lr = 1e-4
beta2 = 0.99
warmup_iters = 100
'''


def test_nanogpts_config_file_runs(project):
    write(os.path.join(project, 'nano.py'), NANOGPTS_CONFIG)
    flags = [flag for flag in TINY if not flag.startswith(('--dataset', '--learning_rate'))]
    done = run(project, 'train.py', 'nano.py', *flags, '--eval_iters=20', '--always_save_checkpoint', 'True', '--lr_decay_iters=30')
    assert done.code == 0 and state(project, 'nano-config')['iter_num'] == 30, done.err
    lines = done.err.splitlines()
    assert len(lines) == 4 and all('is left out' in line for line in lines) and 'eval_windows' in lines[0]
    assert_refused(run(project, 'sample.py', '--eval_iters=20'), "no setting 'eval_iters'")


@pytest.mark.parametrize('name', [*SCHEMES, *SCALINGS])
def test_crop_block_size(name):
    length = {'rope_original_length': None} if name in SCALINGS else {}
    model, idx = small_model(name, std=0.2, **length), random_tokens(2, 16)
    before = all_logits(model, idx)
    model.crop_block_size(16)
    assert model.config.block_size == 16 and torch.equal(all_logits(model, idx), before)
    again = GPT(model.config).eval()                    # as from a checkpoint of it
    again.load_state_dict(model.state_dict())
    assert torch.equal(all_logits(again, idx), before)
    for block_size in (32, 0):
        with pytest.raises(ValueError, match='can only be cropped'):
            model.crop_block_size(block_size)


def test_one_adamw_as_nanogpt_calls_it():
    optimizer = small_model('learned').configure_optimizers(0.1, 1e-3, (0.9, 0.95), 'cpu')
    assert isinstance(optimizer, torch.optim.AdamW) and len(optimizer.param_groups) == 2


def test_end_of_text_is_one_token():
    try:
        tokenizer = BPETokenizer()
    except ValueError:
        pytest.skip('there is no gpt2 vocabulary here')
    assert tokenizer.encode('One.<|endoftext|>Two.').tolist()[2] == 50256 and len(tokenizer.encode('<|endoftext|>')) == 1


@pytest.mark.parametrize('name', [*SCHEMES, *SCALINGS])
def test_prompts_of_unequal_length_are_as_if_alone(name):
    model = small_model(name, std=0.2)
    prompts = [random_tokens(length, seed=length) for length in (3, 9, 1)]
    together = model.generate(prompts, 6, temperature=0)
    for prompt, text in zip(prompts, together, strict=True):
        assert torch.equal(text, model.generate(prompt[None], 6, temperature=0)[0])


def test_a_stop_token_ends_the_text(project):
    model, prompt = small_model('rope', std=0.2), random_tokens(2, 4)
    text = model.generate(prompt, 12, temperature=0)
    stop = text[0, 7].item()
    alone = model.generate(prompt[:1], 12, temperature=0, stop_token=stop)
    first = next(i for i in range(4, 16) if text[0, i] == stop)
    assert torch.equal(alone, text[:1, :first + 1])
    both = model.generate(prompt, 12, temperature=0, stop_token=stop)       # ends when each row has had it, or at the full length
    seen = [next((i for i in range(4, 16) if row[i] == stop), 15) for row in text]
    assert both.size(1) == max(seen) + 1 and torch.equal(both, text[:, :max(seen) + 1])
    if not os.path.exists(os.path.join(project, 'out', 'stops')):
        trained(project, '--position=rope', '--out_dir=out/stops')
    whole = ran(project, 'sample.py', 'out/stops', '--start=who', '--max_new_tokens=60', '--temperature=0', '--device=cpu').out
    piece = whole[20:22]
    cut = ran(project, 'sample.py', 'out/stops', '--start=who', '--max_new_tokens=60', '--temperature=0', '--device=cpu', f'--stop={piece}').out
    assert cut.startswith(whole[:whole.index(piece, 3) + 2]) and cut.count('\n') <= whole.count('\n') and len(cut) < len(whole)


@pytest.mark.parametrize('name', [*SCHEMES, 'dynamic'])
def test_a_model_compiles_for_dynamic_lengths(name):
    """
    By the front of torch.compile, which follows the code and needs no compiler: it is followed whole, with the same logits. Lengths stay
    symbols, and once is enough (for each number of blocks of 128 queries); but alibi and t5 unfold their distances, for each length.
    """
    model, lengths = small_model(name, std=0.2), []
    torch._dynamo.reset()

    def backend(graph, inputs):
        lengths.append(1)
        return graph.forward
    compiled = torch.compile(model, backend=backend, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for length in (9, 14, 23, 31):
            idx = random_tokens(2, length)
            torch.testing.assert_close(compiled(idx, idx)[0], all_logits(model, idx), atol=1e-5, rtol=1e-4)
    assert len(lengths) == (4 if name in ('alibi', 't5') else 1)


@pytest.mark.parametrize('name', SCHEMES)
def test_a_model_made_on_no_device_becomes_whole(name):
    torch.manual_seed(3)
    expected = small_model(name, seed=3).state_dict()
    with torch.device('meta'):
        config = small_model(name).config
        model = GPT(config)
    model.to_empty(device='cpu')
    torch.manual_seed(3)
    model.init_weights()
    model.eval()
    idx = random_tokens(2, 16)
    assert model.state_dict().keys() == expected.keys()
    whole = GPT(config).eval()
    whole.load_state_dict(model.state_dict())
    assert torch.equal(all_logits(model, idx), all_logits(whole, idx)) and model.lm_head.weight is model.transformer.wte.weight


def test_numpys_whole_numbers_are_whole_numbers():
    config = GPTConfig(n_layer=np.int64(2), n_head=np.int32(2), n_embd=np.uint8(16), vocab_size=np.int64(9), block_size=np.int16(8))
    assert type(config.n_layer) is int and GPT(config)(torch.zeros(1, 4, dtype=torch.int64))[0].shape == (1, 1, 9)
    assert isinstance(CharTokenizer('ab').vocab_size, int)
