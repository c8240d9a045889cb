"""The GPT around the schemes: GPT-2's and nanoGPT's, from parameter names to logits; what each scheme adds to it, and how it is trained."""
import copy
import math

import pytest
import torch

from conftest import SCHEMES, SIZES, all_logits, random_tokens, small_model
from model import SCHEMES as POSITIONS, GPT, GPTConfig
from optim import Muon, make_optimizers, orthogonalise
from runs import make_model

EVERY_SCHEME = pytest.mark.parametrize('name', SCHEMES)


# ----------------------------------------------------------------------------------------------------------------------
# GPT-2 and nanoGPT

def test_logits_equal_hugging_faces_gpt2_with_the_same_weights():
    """All weights, biases and norms random, so that none can be left out unseen. Nothing is downloaded."""
    transformers = pytest.importorskip('transformers')
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=17, n_positions=32, n_embd=24, n_layer=2, n_head=3, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0)).eval()
    for name, parameter in theirs.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if name.endswith(('ln_1.weight', 'ln_2.weight', 'ln_f.weight')) else 0.0, std=0.2)
    ours = small_model('learned', gelu='tanh')
    linear = ('c_attn.weight', 'c_proj.weight', 'c_fc.weight')              # stored (in, out) there, (out, in) in a Linear
    ours.load_state_dict({name: tensor.T if name.endswith(linear) else tensor for name, tensor in theirs.state_dict().items()
                          if not name.endswith(('.attn.bias', '.attn.masked_bias'))})
    idx = random_tokens(3, 32)
    with torch.no_grad():
        expected = theirs(idx).logits
        assert expected.std() > 0.5
        torch.testing.assert_close(all_logits(ours, idx), expected, rtol=0, atol=1e-4)
        exact = small_model('learned', gelu='exact')
        exact.load_state_dict(ours.state_dict())
        assert not torch.allclose(all_logits(exact, idx), expected, rtol=0, atol=1e-4)      # nanoGPT's GELU is the exact one


NANOGPT_NAMES = ['transformer.wte.weight', 'transformer.wpe.weight', 'transformer.ln_f.weight', 'transformer.ln_f.bias',
                 'lm_head.weight'] + [
    f'transformer.h.{layer}.{part}.{kind}' for layer in range(2) for kind in ('weight', 'bias')
    for part in ('ln_1', 'attn.c_attn', 'attn.c_proj', 'ln_2', 'mlp.c_fc', 'mlp.c_proj')]


def test_parameter_names_are_nanogpts():
    assert sorted(small_model('learned').state_dict()) == sorted(NANOGPT_NAMES)
    assert not any(name.endswith('.bias') for name in small_model('learned', bias=False).state_dict())


@pytest.mark.parametrize('prefix', ['', '_orig_mod.'])
def test_a_nanogpt_checkpoint_loads(prefix):
    """Its names and settings, with what torch.compile puts before the names and the mask that older PyTorch keeps among the weights."""
    model = small_model('learned', std=0.2)
    weights = {prefix + name: model.state_dict()[name].clone() for name in NANOGPT_NAMES}
    weights |= {f'{prefix}transformer.h.{layer}.attn.bias': torch.ones(1, 1, 32, 32).tril() for layer in range(2)}
    model_args = dict(n_layer=2, n_head=3, n_embd=24, block_size=32, bias=True, vocab_size=17, dropout=0.0)
    loaded = make_model(dict(model=weights, model_args=model_args), 'ckpt.pt').eval()
    assert loaded.config.position == 'learned'
    idx = random_tokens(2, 32)
    assert torch.equal(all_logits(loaded, idx), all_logits(model, idx))


def test_gpt2_has_as_many_parameters_as_published():
    """124,439,808 in GPT-2 small; nanoGPT leaves the 1024 x 768 position table out of its count. Without memory for any."""
    with torch.device('meta'):
        model = GPT(GPTConfig(vocab_size=50257))
    assert model.get_num_params(non_embedding=False) == 124439808
    assert model.get_num_params() == 124439808 - 1024 * 768


@EVERY_SCHEME
def test_a_model_made_on_the_meta_device_becomes_whole(name):
    """Made without memory, given some, initialised: the same model as one made at once."""
    whole = small_model(name)
    with torch.device('meta'):
        empty = GPT(whole.config)
    torch.manual_seed(1)
    filled = empty.to_empty(device='cpu').eval()
    filled.init_weights()
    idx = random_tokens(2, 20)
    torch.manual_seed(1)
    whole.init_weights()
    assert torch.equal(all_logits(filled, idx), all_logits(whole, idx))


@pytest.mark.parametrize('name, own', [
    ('none', 0), ('learned', 32 * 24), ('sinusoidal', 0), ('shaw', 2 * 6 * 8), ('shaw_values', 2 * 2 * 6 * 8), ('rope', 0), ('alibi', 0),
    ('t5', 8 * 3), ('tupe', 2 * 24 * 24)])
def test_position_tables_are_left_out_of_the_count(name, own):
    model, none = small_model(name), small_model('none')
    assert model.get_num_params() == none.get_num_params(non_embedding=False)
    assert model.get_num_params(non_embedding=False) - model.get_num_params() == own == model.get_num_position_params()


def test_logits_are_all_positions_with_targets_and_the_last_without():
    model, idx = small_model('rope'), random_tokens(3, 20)
    logits, loss = model(idx, idx)
    last, no_loss = model(idx)
    assert logits.shape == (3, 20, 17) and loss.shape == () and last.shape == (3, 1, 17) and no_loss is None
    torch.testing.assert_close(last, logits[:, -1:])


def test_the_loss_is_the_mean_over_targets_that_count():
    """In nats per token; a target of -1 is left out."""
    model, idx, targets = small_model('rope', std=0.2), random_tokens(3, 20), random_tokens(3, 20, seed=3)
    targets[0, :15] = -1
    logits, loss = model(idx, targets)
    by_hand = [-logits[b, t].log_softmax(-1)[targets[b, t]].item() for b in range(3) for t in range(20) if targets[b, t] >= 0]
    assert loss.item() == pytest.approx(sum(by_hand) / 45, rel=1e-5)


@EVERY_SCHEME
def test_dropout_is_off_in_evaluation_and_on_in_training(name):
    for flash in (True, False):
        model, plain = (small_model(name, std=0.2, dropout=dropout, flash=flash) for dropout in (0.3, 0.0))
        idx = random_tokens(2, 20)
        assert torch.equal(all_logits(model, idx), all_logits(plain, idx))
        model.train()
        assert not torch.allclose(all_logits(model, idx), all_logits(model, idx), atol=1e-3)


@pytest.mark.parametrize('flash', [True, False])
def test_attention_weights_are_dropped_in_training_and_only_there(flash):
    """With both other dropouts taken out, so that it is the kernel's own that is seen."""
    model, idx = small_model('alibi', std=0.2, dropout=0.3, flash=flash), random_tokens(2, 20)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    expected = all_logits(model, idx)
    assert torch.equal(all_logits(model, idx), expected)
    model.train()
    assert not torch.allclose(all_logits(model, idx), expected, atol=1e-3)


# ----------------------------------------------------------------------------------------------------------------------
# initialisation

@EVERY_SCHEME
def test_the_same_seed_gives_every_scheme_the_same_shared_weights(name):
    shared, weights = small_model('none').state_dict(), small_model(name).state_dict()
    assert set(shared) <= set(weights)
    for key, tensor in shared.items():
        assert torch.equal(weights[key], tensor), key


def test_weights_start_as_gpt2s():
    """N(0, 0.02); the two projections onto the residual stream in each of 8 blocks smaller by sqrt(16); biases 0, norms 1."""
    model = GPT(GPTConfig(block_size=64, vocab_size=200, n_layer=8, n_head=4, n_embd=64, position='none'))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            expected = 0.02 / 4 if name.endswith('c_proj.weight') else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
            assert abs(parameter.mean().item()) < expected / 10, name
        else:
            assert (parameter == (0 if name.endswith('bias') else 1)).all(), name
    assert model.transformer.wte.weight is model.lm_head.weight


@pytest.mark.parametrize('options', [dict(position='learned'), dict(position='t5'), dict(position='shaw', shaw_values=True),
                                     dict(position='tupe')])
def test_position_tables_start_at_normal_002(options):
    model = GPT(GPTConfig(block_size=128, vocab_size=17, n_layer=4, n_head=4, n_embd=64, **options))
    tables = list(model.transformer.wpe.parameters())
    assert tables
    for table in tables:
        assert table.std().item() == pytest.approx(0.02, rel=0.2) and abs(table.mean().item()) < 0.005


@EVERY_SCHEME
def test_gradients_reach_every_parameter(name):
    model = small_model(name, n_layer=3)
    idx = random_tokens(4, 32)
    model(idx, idx.roll(-1, dims=1))[1].backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 1e-9, key


def test_gradients_reach_every_row_of_every_position_table():
    """Every position, every bucket (the longest distance is past max_distance), every clipped distance in every layer."""
    for name in ('learned', 't5', 'shaw_values'):
        model = small_model(name, std=0.2)
        idx = random_tokens(4, 32)
        model(idx, idx.roll(-1, dims=1))[1].backward()
        for table in model.transformer.wpe.parameters():
            assert (table.grad.abs().amax(dim=-1) > 0).all(), name


@pytest.mark.parametrize('name', ['none', 'sinusoidal', 'rope', 'alibi'])
def test_fixed_tables_are_neither_in_the_checkpoint_nor_in_the_optimizer(name):
    model = small_model(name)
    assert not any('wpe' in key for key in model.state_dict())
    assert list(model.transformer.wpe.parameters()) == list(model.transformer.wpe.buffers()) == []
    optimizers = make_optimizers(model, 0.1, 1e-3, (0.9, 0.99), 'cpu')
    trained = sum(parameter.numel() for group in optimizers[0].param_groups for parameter in group['params'])
    assert len(optimizers) == 1 and trained == model.get_num_params(non_embedding=False) == model.get_num_params()


# ----------------------------------------------------------------------------------------------------------------------
# optimizers

@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
@EVERY_SCHEME
def test_every_parameter_is_trained_once_and_only_matrices_decay(name, optimizer):
    model = small_model(name)
    optimizers = make_optimizers(model, 0.1, 1e-3, (0.9, 0.99), 'cpu', optimizer)
    groups = [group for each in optimizers for group in each.param_groups]
    held = [id(parameter) for group in groups for parameter in group['params']]
    assert sorted(held) == sorted(id(parameter) for parameter in model.parameters())
    for group in groups:
        for parameter in group['params']:
            assert group['weight_decay'] == (0.1 if parameter.dim() >= 2 else 0.0)


@EVERY_SCHEME
def test_position_rate_is_for_the_schemes_own_parameters_alone(name):
    """The same decay a step, and a first step of AdamW, which is the learning rate's size whatever the gradient, 10 times as long."""
    moved = {}
    for rate in (1.0, 10.0):
        model = small_model(name)
        before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
        (optimizer,) = make_optimizers(model, 0.1, 1e-3, (0.9, 0.99), 'cpu', position_rate=rate)
        for group in optimizer.param_groups:
            assert group['lr'] == 1e-3 * group['rate']
            for parameter in group['params']:
                parameter.grad = torch.ones_like(parameter)
                assert group['weight_decay'] * group['rate'] == pytest.approx(0.1 if parameter.dim() >= 2 else 0.0)
        optimizer.step()
        moved[rate] = {key: before[key] - parameter for key, parameter in model.named_parameters()}
    for key, tensor in moved[1.0].items():
        decay = 1e-4 * before[key] if tensor.dim() >= 2 else 0.0
        factor = 10.0 if key.startswith('transformer.wpe.') else 1.0
        torch.testing.assert_close(moved[10.0][key], factor * (tensor - decay) + decay, atol=1e-6, rtol=0)


@EVERY_SCHEME
def test_muon_takes_the_blocks_matrices_and_nothing_else(name):
    model = small_model(name)
    adamw, muon = make_optimizers(model, 0.1, 1e-3, (0.9, 0.99), 'cpu', 'muon', muon_learning_rate=0.03)
    names = {id(parameter): key for key, parameter in model.named_parameters()}
    assert {names[id(parameter)] for group in muon.param_groups for parameter in group['params']} == {
        f'transformer.h.{layer}.{part}.weight' for layer in range(2)
        for part in ('attn.c_attn', 'attn.c_proj', 'mlp.c_fc', 'mlp.c_proj')}
    assert muon.param_groups[0]['lr'] == 0.03 and adamw.param_groups[0]['lr'] == 1e-3


def test_muon_steps_as_torchs_but_for_rounding():
    """Tall, wide and square matrices, several of a shape; five steps with momentum and decay. torch's rounds to bfloat16 as it goes."""
    shapes = [(24, 24), (72, 24), (24, 96), (24, 24)]
    start = [torch.randn(shape) * 0.02 for shape in shapes]
    results = []
    for muon in (torch.optim.Muon, Muon):
        parameters = [torch.nn.Parameter(tensor.clone()) for tensor in start]
        optimizer = muon(parameters, lr=0.02, weight_decay=0.1)
        generator = torch.Generator().manual_seed(5)
        for _ in range(5):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
        results.append((parameters, optimizer))
    for theirs, ours, before in zip(results[0][0], results[1][0], start):
        assert (ours - theirs).norm() < 0.03 * (theirs - before).norm()
        momentum = [optimizer.state[parameter]['momentum_buffer'] for (_, optimizer), parameter in zip(results, (theirs, ours))]
        torch.testing.assert_close(momentum[1], momentum[0])


def test_orthogonalise_brings_singular_values_near_1():
    for shape in ((3, 20, 20), (2, 12, 40), (2, 40, 12)):
        matrices = torch.randn(shape)
        found, singular_vectors = orthogonalise(matrices), torch.linalg.svd(matrices, full_matrices=False)
        assert found.shape == shape
        # well-conditioned directions lie in [0.68, 1.13] after five steps; those with singular values near 0 take longer
        ratio = torch.linalg.svdvals(found)[singular_vectors.S > 0.1 * singular_vectors.S.amax(-1, keepdim=True)]
        assert 0.6 < ratio.min() and ratio.max() < 1.2
        same_directions = torch.einsum('nik,nij,nkj->nk', singular_vectors.U, found, singular_vectors.Vh)
        assert (same_directions > -1e-4).all()


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float64])
def test_muon_steps_in_every_type(dtype):
    parameters = [torch.nn.Parameter(torch.randn(8, 16).to(dtype)) for _ in range(2)]
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer = Muon(parameters, lr=0.02, weight_decay=0.1)
    for parameter in parameters:
        parameter.grad = torch.randn(8, 16).to(dtype)
    optimizer.step()
    for parameter, old in zip(parameters, before):
        assert parameter.dtype == dtype and parameter.isfinite().all() and not torch.equal(parameter, old)


def test_muon_resumes_from_its_state():
    def a_step(optimizer, parameter, seed):
        parameter.grad = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
        optimizer.step()
    first = torch.nn.Parameter(torch.zeros(8, 8))
    optimizer = Muon([first], lr=0.02, weight_decay=0.0)
    a_step(optimizer, first, seed=1)
    second = torch.nn.Parameter(first.detach().clone())
    resumed = Muon([second], lr=0.02, weight_decay=0.0)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))          # as if through a file; else both share one momentum
    a_step(optimizer, first, seed=2)
    a_step(resumed, second, seed=2)
    assert torch.equal(first, second)


@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
@EVERY_SCHEME
def test_a_few_steps_lower_the_loss(name, optimizer):
    model, idx = small_model(name).train(), random_tokens(4, 32)
    optimizers = make_optimizers(model, 0.1, 1e-2, (0.9, 0.99), 'cpu', optimizer)
    losses = []
    for _ in range(12):
        loss = model(idx, idx.roll(-1, dims=1))[1]
        losses.append(loss.item())
        loss.backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
    assert losses[0] == pytest.approx(math.log(17), abs=0.2) and losses[-1] < losses[0] - 0.1


# ----------------------------------------------------------------------------------------------------------------------
# GPTConfig

@pytest.mark.parametrize('settings, word', [
    (dict(position='rotary'), 'position'), (dict(position=None), 'position'), (dict(gelu='relu'), 'gelu'),
    (dict(position='rope', rope_layout='pairs'), 'rope_layout'), (dict(position='rope', rope_scaling='longrope'), 'rope_scaling'),
    (dict(n_embd=100, n_head=12), 'n_head'), (dict(n_embd=21, n_head=3, position='sinusoidal'), 'even'),
    (dict(n_embd=21, n_head=3, position='tupe'), 'even'), (dict(n_embd=21, n_head=3, position='rope'), 'even'),
    (dict(n_embd=24, n_head=12, position='rope', rope_scaling='ntk', rope_factor=2.0), 'head size'),
    (dict(n_embd=24, n_head=12, position='rope', rope_scaling='dynamic', rope_factor=2.0), 'head size'),
    (dict(position='rope', rope_base=1.0), 'rope_base'), (dict(position='rope', rope_scaling='yarn', rope_factor=0.5), 'rope_factor'),
    (dict(position='rope', rope_factor=4.0), 'rope_factor'), (dict(position='alibi', rope_scaling='yarn'), 'RoPE only'),
    (dict(position='rope', rope_scaling='yarn', rope_factor=4.0, yarn_beta_fast=1.0, yarn_beta_slow=32.0), 'yarn_beta_fast'),
    (dict(dropout=1.0), 'dropout'), (dict(dropout=-0.1), 'dropout'), (dict(dropout=float('nan')), 'dropout'),
    (dict(position='t5', t5_buckets=7), 't5_buckets'), (dict(position='t5', t5_buckets=6, causal=False), 't5_buckets'),
    (dict(position='t5', t5_max_distance=16), 't5_max_distance'), (dict(position='t5', t5_max_distance=8, causal=False), 't5_max_distance'),
    (dict(n_layer=2.0), 'n_layer'), (dict(n_head=True), 'n_head'), (dict(n_embd='768'), 'n_embd'), (dict(block_size=None), 'block_size'),
    (dict(bias=1), 'bias'), (dict(causal='yes'), 'causal'),
    (dict(rope_base=float('inf')), 'rope_base'), (dict(rope_base=10 ** 400), 'rope_base'),
    (dict(rope_original_length=-1), 'rope_original_length'), (dict(rope_attention_factor=0), 'rope_attention_factor'),
    *((dict([(name, 0)]), name) for name in ('block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'shaw_max_distance', 't5_buckets')),
])
def test_values_that_make_no_model_are_refused_in_one_sentence(settings, word):
    with pytest.raises(ValueError, match=word) as refusal:
        GPTConfig(**settings)
    sentence = str(refusal.value)
    assert '\n' not in sentence and '. ' not in sentence and len(sentence) < 700


def test_whole_numbers_pass_for_floats_and_none_for_what_may_be_none():
    config = GPTConfig(position='rope', rope_base=10000, dropout=0, rope_scaling='yarn', rope_factor=4, rope_original_length=None)
    assert GPT(GPTConfig(**{**vars(config), **SIZES})).transformer.wpe.attention_factor == pytest.approx(1.138629, rel=1e-6)


def test_the_defaults_are_the_papers():
    config = GPTConfig()
    assert (config.rope_base, config.rope_layout, config.yarn_beta_fast, config.yarn_beta_slow) == (10000, 'half', 32, 1)
    assert (config.shaw_max_distance, config.shaw_values, config.t5_buckets, config.t5_max_distance) == (16, False, 32, 128)
    assert config.causal and config.position == 'learned'
    assert list(POSITIONS) == 'none learned sinusoidal shaw rope alibi t5 tupe'.split()


def test_a_config_cannot_be_changed_behind_its_model():
    """A setting changed after construction would do nothing, silently."""
    model = small_model('rope')
    with pytest.raises(AttributeError, match='another'):
        model.config.rope_scaling = 'yarn'
