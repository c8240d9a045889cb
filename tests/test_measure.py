"""Losses, sweeps and answers are as a slow computation finds them, which predicts one token after the other."""
import contextlib
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from configurator import training_settings
from conftest import random_tokens, small_model
from dataset import WordTokenizer
from harness import HERE, ROOT
from measure import (answer_accuracy, fingerprint, keep_on_device, losses_at_length, peak_flops, read_windows, sum_of_losses, sweep_plan,
                     token_losses, training_step, utilisation, window_starts)
from model import GPT, SCHEMES, GPTConfig, rotate, t5_bucket, waves
from optim import make_optimizers
from settle import FITS

CPU = torch.device('cpu')
FLOAT32 = contextlib.nullcontext()


def slow_loss(model, tokens, start, i):
    """The loss at tokens[i + 1], predicted from tokens[start..i] in one pass without a cache."""
    with torch.inference_mode():
        idx = torch.from_numpy(tokens[start:i + 1].astype(np.int64))[None]
        return F.cross_entropy(model(idx)[0][0, -1:], torch.tensor([int(tokens[i + 1])])).item()


def text(n_tokens, vocab_size=17):
    return random_tokens(n_tokens, vocab_size=vocab_size).numpy().astype(np.uint16)


@pytest.mark.parametrize('value', [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize('name', ['transformer.wte.weight', 'transformer.h.0.attn.c_attn.weight', 'transformer.ln_f.weight'])
def test_where_one_gradient_overflows_no_optimizer_steps(name, value):
    """float16's scaler looks at each optimizer's gradients; clipping spreads an overflow in one of them over all."""
    model = small_model('learned').train()
    optimizers = make_optimizers(model, 0.1, 1e-3, (0.9, 0.99), 'cpu', 'muon')
    scaler, tokens = torch.amp.GradScaler('cpu', init_scale=1024.0), random_tokens(2, 8)
    step = lambda: training_step(model, optimizers, [(tokens, tokens)], FLOAT32, 1.0, scaler)       # noqa: E731
    step()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    spoil = dict(model.named_parameters())[name].register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([1]), value))
    _, norm = step()
    assert not norm.isfinite() and scaler.get_scale() == 512.0
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    spoil.remove()
    _, norm = step()
    assert norm.isfinite() and scaler.get_scale() == 512.0
    assert all(tensor.isfinite().all() and not torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


def test_a_scaler_changes_no_step():
    ends = []
    for scaler in (torch.amp.GradScaler(enabled=False), torch.amp.GradScaler('cpu', init_scale=1024.0)):
        model = small_model('learned').train()
        optimizers, tokens = make_optimizers(model, 0.1, 1e-3, (0.9, 0.99), 'cpu', 'muon'), random_tokens(2, 8)
        for _ in range(3):
            training_step(model, optimizers, [(tokens, tokens)], FLOAT32, 1.0, scaler)
        ends.append(model.state_dict())
    for key in ends[0]:
        torch.testing.assert_close(ends[0][key], ends[1][key], atol=1e-6, rtol=0)


def test_windows_are_the_same_from_the_device_and_from_the_disk(monkeypatch):
    tokens, starts = np.array([0, 65535, 7, *range(100, 200)], dtype=np.uint16), np.array([[0, 3], [50, 92]])
    windows = read_windows(keep_on_device(tokens, CPU), starts, 10, CPU)
    assert windows.dtype == torch.int64 and windows[0, 0].tolist()[:4] == [0, 65535, 7, 100] and windows.shape == (2, 2, 11)
    assert torch.equal(windows, read_windows(tokens, starts, 10, CPU))
    monkeypatch.setattr('measure.MOST_KEPT', 102)
    assert keep_on_device(tokens, CPU) is None and keep_on_device(tokens[1:], CPU) is not None


def test_losses_side_by_side_equal_one_pass_per_token():
    model, tokens = small_model('rope', std=0.2), text(75)
    losses = token_losses(model, tokens, 16, CPU, FLOAT32)
    slow = [slow_loss(model, tokens, i // 16 * 16, i) for i in range(74)]       # four whole windows, and one of 10 tokens
    np.testing.assert_allclose(losses, slow, atol=1e-5)
    total, count = sum_of_losses(model, tokens, window_starts(75, 16), 16, 3, CPU, FLOAT32)
    assert count == 74 and total == pytest.approx(losses.sum(), rel=1e-5)       # train.py's figure is the same


@pytest.mark.parametrize('length, stride', [(16, 4), (16, 1), (16, 5), (16, 15), (12, 30)])
def test_sliding_losses_equal_one_pass_per_token(length, stride):
    model, tokens = small_model('alibi', std=0.2), text(61)
    losses = token_losses(model, tokens, length, CPU, FLOAT32, stride)
    stride = min(stride, length)
    for i in range(60):
        start = math.ceil(max(i + 1 - length, 0) / stride) * stride             # the first window that reaches token i + 1
        assert i < length or i + 1 - start >= length - stride + 1
        assert losses[i] == pytest.approx(slow_loss(model, tokens, start, i), abs=1e-5), i


@pytest.mark.parametrize('name', ['none', 'sinusoidal', 'shaw', 'rope', 'alibi', 't5', 'tupe', 'linear', 'ntk', 'dynamic', 'yarn',
                                  'llama3'])
def test_windows_read_in_pieces_equal_one_pass(name):
    model, tokens = small_model(name, std=0.2), text(1301)
    losses = token_losses(model, tokens, 600, CPU, FLOAT32)       # pieces of 256, 256, 88; a window of 100
    with torch.inference_mode():
        for start, end in ((0, 600), (600, 1200), (1200, 1300)):
            window = torch.from_numpy(tokens[start:end + 1].astype(np.int64))
            whole = F.cross_entropy(model(window[None, :-1], window[None, 1:])[0][0], window[1:], reduction='none')
            np.testing.assert_allclose(losses[start:end], whole, atol=2e-4)


def test_evaluation_leaves_the_model_as_it_was():
    model = small_model('learned', dropout=0.5).train()
    once, twice = (token_losses(model, text(70), 32, CPU, FLOAT32) for _ in range(2))
    assert model.training and np.array_equal(once, twice)       # without dropout


def test_16384_tokens_take_less_than_2_gb():
    """In a process of its own, whose peak is this pass alone."""
    script = '''if True:
        import numpy, resource
        from conftest import small_model
        from test_measure import CPU, FLOAT32, token_losses
        model = small_model('alibi', block_size=128, vocab_size=65, n_layer=1, n_head=4, n_embd=16)
        losses = token_losses(model, numpy.arange(16385) % 65, 16384, CPU, FLOAT32)
        print(len(losses), numpy.isfinite(losses).all(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    '''
    done = subprocess.run([sys.executable, '-c', script], cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    count, finite, peak = done.stdout.split()
    assert (count, finite) == ('16384', 'True') and int(peak) < 2e9


@pytest.mark.parametrize('n_tokens, block_size, sweep_tokens', [(400_000, 128, 65536), (45_000, 128, 65536), (300, 64, 1000),
                                                                (111_540, 100, 65536)])
def test_sweep_scores_the_same_tokens_in_whole_windows(n_tokens, block_size, sweep_tokens):
    lengths, begin, count = sweep_plan(block_size, n_tokens, sweep_tokens, (1 / 4, 1 / 2, 1, 2, 4, 8, 16))
    assert block_size in lengths and all(count % length == 0 for length in lengths)
    assert begin >= max(lengths) and begin + count + 1 <= n_tokens and 0 < count <= sweep_tokens


@pytest.mark.parametrize('name', SCHEMES)
def test_a_fingerprint_stands_for_a_schemes_code(name, monkeypatch):
    """The same with other thread counts and after other random numbers; another by one changed line, another for other options."""
    settings = {key: setting.value for key, setting in training_settings().items()} | FITS['cpu']
    arguments = vars(GPTConfig(position=name, n_layer=2, n_head=2, n_embd=32))

    def made():
        return np.array(fingerprint(settings, arguments))

    before, state = made(), torch.get_rng_state()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.rand(5)
    assert np.abs(made() - before).max() < 1e-5 and len(before) == 3
    torch.set_num_threads(threads)
    torch.set_rng_state(state)
    made()
    assert torch.equal(torch.get_rng_state(), state)                # leaves a training's random numbers alone
    slower = np.array(fingerprint({**settings, 'position_rate': 0.1}, arguments))
    assert (np.abs(slower - before).max() > 1e-4) == bool(GPT(GPTConfig(**arguments)).get_num_position_params())
    fault = {'none': ('choose_nothing', None), 'learned': ('embedding', lambda self, queries: self.weight[queries] * 1.05),
             'sinusoidal': ('embedding', lambda self, queries: waves(queries, self.frequencies) * self.sinusoidal_scale * 1.05),
             'shaw': ('row', lambda self, distance: (-distance).clamp(-15, 0) + 16),
             'rope': ('turn', lambda self, q, k, angles, layer: (rotate(q, *angles, self.rope_layout), k)),
             'alibi': ('of_distance', lambda self, distance: -1.01 * self.slopes * distance.abs()[..., None]),
             't5': ('of_distance', lambda self, distance: F.embedding(t5_bucket(distance + 1), self.table)),
             'tupe': ('bias', lambda self, queries, keys: None)}[name]
    monkeypatch.setattr(SCHEMES[name], *fault, raising=False)
    assert (np.abs(made() - before).max() > 1e-4) == (name != 'none')


def test_losses_at_length():
    model, tokens = small_model('rope', std=0.2), text(200)
    sliding, everything = losses_at_length(model, tokens, 16, 40, 96, 4, CPU)
    side_by_side = [slow_loss(model, tokens, 40 + (i - 40) // 16 * 16, i) for i in range(40, 136)]
    assert everything == pytest.approx(np.mean(side_by_side), abs=1e-5)
    # each window of 16 scores its last 4 tokens, the very first one too: it begins 12 tokens before the part that is scored
    slow = [slow_loss(model, tokens, 40 + (i - 40) // 4 * 4 - 12, i) for i in range(40, 136)]
    assert sliding == pytest.approx(np.mean(slow), abs=1e-5)
    assert losses_at_length(small_model('learned'), tokens, 64, 64, 64, 32, CPU) == (None, None)


def test_dynamic_with_factor_1_is_ntk_at_the_factor_that_the_length_calls_for():
    tokens = text(129)
    options = dict(std=0.2, rope_original_length=16)
    dynamic = token_losses(small_model('dynamic', rope_factor=1.0, **options), tokens, 64, CPU, FLOAT32)
    ntk = token_losses(small_model('ntk', rope_factor=4.0, **options), tokens, 64, CPU, FLOAT32)
    np.testing.assert_allclose(dynamic, ntk, atol=1e-5)
    further = token_losses(small_model('dynamic', rope_factor=4.0, **options), tokens, 64, CPU, FLOAT32)
    assert not np.allclose(dynamic, further, atol=1e-3)


def test_answer_accuracy_counts_right_answers(monkeypatch):
    monkeypatch.syspath_prepend(os.path.join(ROOT, 'data', 'word_order'))
    import sentences
    tokenizer = WordTokenizer(sentences.VOCABULARY)
    model = small_model('rope', std=0.2, vocab_size=tokenizer.vocab_size)
    examples, right = [], 0
    for number, (prompt, _) in enumerate(sentences.examples(40, 1, 0) + sentences.examples(60, 3, 0)):
        idx = torch.from_numpy(tokenizer.encode('\n' + ' '.join(prompt)).astype(np.int64))[None]
        guess = tokenizer.decode([model(idx)[0].argmax().item()])
        answer = guess if number % 4 and guess.startswith(' ') else ' cow' if guess != ' cow' else ' pig'
        examples.append((prompt, answer[1:]))
        right += answer == guess
    assert 20 < right < 80 and answer_accuracy(model, tokenizer, examples, CPU) == right / 100


def test_gpus_are_known_by_whole_words_of_their_names():
    """An L40 and an L40S are no L4; what is not known has no utilisation, nor has a CPU."""
    names = ['NVIDIA L4', 'NVIDIA L40', 'NVIDIA L40S', 'NVIDIA A100-SXM4-80GB', 'NVIDIA H100 80GB HBM3', 'NVIDIA H100 PCIe', 'NVIDIA H200']
    assert [peak_flops(name) for name in names] == [121e12, 181e12, 362e12, 312e12, 989e12, 756e12, 989e12]
    assert peak_flops('NVIDIA L400') is None and peak_flops('Tesla T4') is None
    assert utilisation(small_model('rope'), 1024, 0.1, 'bfloat16') is None


def test_utilisation_is_the_models_arithmetic_over_the_peak(monkeypatch):
    """6 N + 12 L C T operations a token; twice the tokens in as much time is twice the share."""
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device: 'NVIDIA L4')
    model = SimpleNamespace(config=small_model('rope').config, get_num_params=lambda: 1000,
                            lm_head=SimpleNamespace(weight=SimpleNamespace(device=torch.device('cuda'))))
    expected = (6 * 1000 + 12 * 2 * 24 * 32) * 4096 / 0.5 / 121e12
    assert utilisation(model, 4096, 0.5, 'bfloat16') == pytest.approx(expected)
    assert utilisation(model, 8192, 0.5, 'bfloat16') == pytest.approx(2 * expected)
    assert utilisation(model, 4096, 0.5, 'float32') is None
