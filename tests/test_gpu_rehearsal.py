"""
The GPU, rehearsed without one: PyTorch's fake tensors have a shape, a type and a device ('cuda'), and no numbers. What runs on them meets
no tensor on another device; and a watcher sees every operation, so that none may wait for the device or copy between devices.
"""
import contextlib
import ctypes
import os
import shutil
import subprocess

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import SCALINGS, SCHEMES, SIZES
from measure import training_step
from model import GPT, GPTConfig
from optim import make_optimizers

EVERY = {**SCHEMES, **SCALINGS}
WAITING = ('_local_scalar_dense', 'nonzero', 'masked_select', 'equal', 'is_nonzero')       # operations that wait for the device
B, T = 2, 20


class Watcher(TorchDispatchMode):
    """Notes the operations that copy between devices, or that wait for one."""

    def __init__(self):
        super().__init__()
        self.faults = []

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        result = operation(*arguments, **(options or {}))
        flat = [one for one in torch.utils._pytree.tree_leaves((arguments, options, result)) if isinstance(one, torch.Tensor)]
        devices = {tensor.device.type for tensor in flat if tensor.dim() > 0 or operation._schema.name.endswith('copy_')}
        if len(devices) > 1 or any(operation._schema.name == f'aten::{name}' for name in WAITING):
            self.faults.append(f'{operation} {[(tuple(tensor.shape), tensor.device.type) for tensor in flat]}')
        return result


GUARD = '''
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>) }
'''


@pytest.fixture(scope='module')
def device_guard(tmp_path_factory):
    """A build of PyTorch for CPUs knows no guard for CUDA devices, which casts and backward passes ask for: one that does nothing."""
    if torch.backends.cuda.is_built():
        return
    compiler = shutil.which('g++') or shutil.which('clang++')
    if compiler is None:
        pytest.skip('needs a C++ compiler, or a PyTorch that was built with CUDA')
    folder, home = tmp_path_factory.mktemp('guard'), os.path.dirname(torch.__file__)
    (folder / 'guard.cpp').write_text(GUARD)
    subprocess.run([compiler, '-shared', '-fPIC', '-std=c++20', f'-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}',
                    f'-I{home}/include', 'guard.cpp', '-o', 'guard.so', f'-L{home}/lib', '-lc10'], cwd=folder, check=True)
    ctypes.CDLL(folder / 'guard.so')


@pytest.fixture
def fake(device_guard):
    with FakeTensorMode():
        yield


def make(name, **options):
    with torch.device('cuda'):
        return GPT(GPTConfig(**{**SIZES, **EVERY[name], 'block_size': 64, **options}))


def tokens(*shape):
    return torch.zeros(shape, dtype=torch.int64, device='cuda')


@contextlib.contextmanager
def autocast(dtype):
    """torch.autocast('cuda'), which refuses where there is no GPU."""
    torch.set_autocast_dtype('cuda', dtype)
    torch.set_autocast_enabled('cuda', dtype != torch.float32)
    try:
        yield
    finally:
        torch.set_autocast_enabled('cuda', False)


@pytest.mark.parametrize('flash', [True, False])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize('name', EVERY)
def test_a_forward_pass_stays_on_the_device_and_never_waits(name, dtype, flash, fake):
    model = make(name, flash=flash, dropout=0.1)
    with Watcher() as watcher, autocast(dtype):
        logits, loss = model(tokens(B, T), tokens(B, T))
    assert watcher.faults == []
    assert logits.device.type == loss.device.type == 'cuda' and logits.shape == (B, T, 17) and logits.dtype == dtype


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('name', EVERY)
def test_the_fused_kernels_get_what_they_ask_for(name, dtype, fake, monkeypatch):
    """
    PyTorch's rules (sdp_utils.cpp, attention.cpp): flash attention takes no mask; the memory-efficient kernel takes one of the queries' type
    whose rows are whole and begin at multiples of 8 (others it copies in every layer); all want q, k and v in rows, at multiples of 16 bytes.
    """
    calls, attend = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, 'scaled_dot_product_attention', lambda *arguments, **options: calls.append(arguments) or
                        attend(*arguments, **options))
    model = make(name, n_embd=64, n_head=4)
    if model.transformer.wpe.needs_weights:
        pytest.skip('is written out')
    with autocast(dtype):
        model(tokens(B, 64), tokens(B, 64))
    assert len(calls) == model.config.n_layer
    for q, k, v, mask, _, is_causal in calls:
        assert all(x.stride(-1) == 1 and x.storage_offset() * x.element_size() % 16 == 0 and x.dtype == dtype for x in (q, k, v))
        with_mask = name in ('shaw', 'alibi', 't5', 'tupe')
        assert is_causal != with_mask == (mask is not None)
        if with_mask:
            assert mask.dtype == dtype and mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1])
            assert mask.size(0) == (B if name == 'shaw' else 1) and mask.requires_grad == (name != 'alibi')


@pytest.mark.parametrize('name', EVERY)
def test_positions_with_gaps_stay_on_the_device(name, fake):
    model = make(name)
    with Watcher() as watcher:
        model(tokens(B, T), tokens(B, T), positions=torch.arange(0, 2 * T, 2, device='cuda'))
    assert watcher.faults == []


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize('name', EVERY)
def test_a_schemes_tables_move_along_and_are_not_rounded(name, dtype, fake):
    scheme = GPT(GPTConfig(**{**SIZES, **EVERY[name]})).transformer.wpe
    scheme._parameters.clear()                                              # fake ones cannot change their type in place
    for moved in (scheme.to(dtype).to('cuda'), scheme.float().to('cuda').to(dtype)):
        for key, exact in moved.exact.items():
            table = getattr(moved, key)
            right = torch.float64 if dtype == torch.float64 else torch.float32
            assert table.device.type == 'cuda' and table.dtype == (right if exact.is_floating_point() else exact.dtype)


@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
@pytest.mark.parametrize('name', SCHEMES)
def test_a_training_step_stays_on_the_device(name, optimizer, fake):
    model = make(name)
    optimizers = make_optimizers(model, 0.1, 1e-3, (0.9, 0.99), 'cuda', optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(2):                                                      # the first one makes the optimizers' states
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with Watcher() as watcher:
            for one in optimizers:
                one.step()
        assert watcher.faults == []
    assert all(tensor.device.type == 'cuda' for one in optimizers for state in one.state.values()
               for tensor in state.values() if isinstance(tensor, torch.Tensor) and tensor.dim() > 0)


@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
def test_a_whole_step_of_training_never_waits(optimizer, fake, monkeypatch):
    """Forward passes, clipping, optimizers (but no backward passes: PyTorch's engine wants a device): train.py waits where it reads losses."""
    model = make('rope')
    monkeypatch.setattr(torch.Tensor, 'backward', lambda loss: [setattr(parameter, 'grad', torch.zeros_like(parameter))
                                                                for parameter in model.parameters()])
    optimizers = make_optimizers(model, 0.1, 1e-3, (0.9, 0.99), 'cuda', optimizer)
    for _ in range(2):
        with Watcher() as watcher:
            loss, norm = training_step(model, optimizers, [(tokens(B, T), tokens(B, T))] * 2, contextlib.nullcontext(), 1.0)
        assert watcher.faults == [] and loss.device.type == norm.device.type == 'cuda'


@pytest.mark.parametrize('name', [name for name in EVERY if name != 'dynamic'])
@torch.no_grad()
def test_reading_through_a_cache_stays_on_the_device(name, fake):
    model = make(name).eval()
    cache = model.make_cache(B)
    with Watcher() as watcher:
        for length in (7, 1, 1, 5):
            logits, _ = model(tokens(B, length), cache=cache)
    assert watcher.faults == [] and logits.device.type == 'cuda' and cache.length == 14
    assert all(part.device.type == 'cuda' for layer in cache.memory for part in layer)


@pytest.mark.parametrize('options', [dict(), dict(top_k=5), dict(top_p=0.9), dict(temperature=0), dict(top_k=5, top_p=0.5, vocab_size=15)])
@pytest.mark.parametrize('name', ['none', 'rope', 'dynamic', 'alibi', 'shaw'])
def test_generation_never_waits(name, options, fake):
    """Beyond the window too. Whoever prints a token waits for it, but generate() itself keeps the device busy."""
    model = make(name).eval()
    with Watcher() as watcher:
        text = model.generate(tokens(B, 3), 12, context=8, **options)
    assert watcher.faults == [] and text.shape == (B, 15) and text.device.type == 'cuda'


def test_the_watcher_sees_what_it_is_to_see(fake):
    x = torch.zeros(3, device='cuda')
    for act in (lambda: x.cpu(), lambda: torch.arange(3).to('cuda'), lambda: x.nonzero()):
        with Watcher() as watcher:
            try:
                act()
            except Exception:                                               # fake tensors have no numbers to count
                watcher.faults.append('refused')
        assert watcher.faults
