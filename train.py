"""
Train a GPT whose position scheme is one line of config.

    python train.py config/rope.py                              # sizes that fit this machine; writes out/rope/
    python train.py config/rope.py --batch_size=32 --compile=False
    python train.py config/rope.py --init_from=resume           # go on where it stopped
    torchrun --standalone --nproc_per_node=4 train.py config/rope.py --gradient_accumulation_steps=4
"""
import csv
import glob
import io
import json
import math
import os
import platform
import signal
import sys
import time

from configurator import configure, fail

# ----------------------------------------------------------------------------------------------------------------------
# the run
out_dir: str = None             # where the run is written; None: out/ and the name of the last config file
init_from = 'scratch'           # 'scratch'; 'resume', to go on in out_dir; or the folder of another run, to start from its weights
overwrite = False               # replace the run that out_dir already holds
seed = 1337                     # of weights, batches and dropout; the same seed gives every scheme the same batches
# the data
dataset = 'shakespeare_char'    # a folder under data/: shakespeare_char, shakespeare_bpe, tinyshakespeare, word_order, text
block_size: int = None          # tokens in a sequence
batch_size: int = None          # sequences in a micro-batch
gradient_accumulation_steps = 1 # micro-batches in a step, over all processes
# the model; None fits the machine (see `fits` below)
n_layer: int = None             # blocks
n_head: int = None              # heads per block
n_embd: int = None              # width
dropout: float = None           # 0 for a single pass over the data, 0.1 and more where it is repeated often
bias = False                    # biases in Linear and LayerNorm
gelu = 'exact'                  # 'exact' or 'tanh'
# the position scheme, and each scheme's options
position = 'learned'            # none, learned, sinusoidal, shaw, rope, alibi, t5 or tupe
sinusoidal_base = 10000.0       # sinusoidal: the wavelengths run from 2 pi to nearly 2 pi times this
sinusoidal_scale = 0.02         # sinusoidal: what the waves are multiplied by before they are added
shaw_max_distance = 16          # shaw: keys further away than this share a row
shaw_values = False             # shaw: a table for the values as well as for the keys
rope_base = 10000.0             # rope: the wavelengths run from 2 pi to nearly 2 pi times this
rope_layout = 'half'            # rope: which dimensions are a pair, 'half' or 'interleaved'
rope_scaling = 'none'           # rope: none, linear, ntk, dynamic, yarn or llama3
rope_factor = 1.0               # rope scaling: length wanted / length trained
rope_original_length: int = None        # rope scaling: length trained; None: the block_size of the run that init_from names
rope_attention_factor: float = None     # rope scaling: multiplies cos and sin; None: the method's own
yarn_beta_fast = 32.0           # yarn: pairs that turn more often than this within the trained length are kept
yarn_beta_slow = 1.0            # yarn: pairs that turn less often than this are divided by the factor
t5_buckets = 32                 # t5: buckets of distances
t5_max_distance = 128           # t5: distances from here on share the last bucket
# the optimizer
optimizer: str = None           # 'adamw', or 'muon' for the blocks' matrices and adamw for the rest
learning_rate: float = None     # adamw's peak
muon_learning_rate = 0.02       # muon's peak
max_iters: int = None           # steps
weight_decay = 0.1              # on what has two dimensions or more
beta1 = 0.9                     # adamw
beta2 = 0.99                    # adamw
grad_clip = 1.0                 # largest norm of the gradient; 0 does not clip
# the learning rate's schedule
decay_lr = True                 # False: constant after the warm-up
warmup_iters: int = None        # steps of linear warm-up
lr_decay_iters: int = None      # steps until min_lr is reached, by a cosine; None: max_iters
min_lr: float = None            # what the learning rate decays to; muon's decays in proportion
# evaluation and logging
eval_interval: int = None       # steps between evaluations
eval_windows = 128              # evaluation during the run: so many windows of the validation text, always the same
log_interval = 10               # steps between updates of the progress display
eval_only = False               # score the whole validation text and stop; with init_from
wandb_log = False               # log to wandb too, the same numbers as log.csv
wandb_project = 'position-encoding'     # wandb's project
wandb_run_name: str = None      # wandb's run; None: the name of out_dir
# the machine
device = 'auto'                 # auto, cpu, cuda, cuda:0, mps
dtype: str = None               # float32, bfloat16 or float16: what matrix products are computed in
compile: bool = None            # torch.compile the model
backend: str = None             # of torch.distributed; None: nccl on CUDA, gloo on the CPU
deterministic = False           # on CUDA: the same command gives the same numbers, for slower kernels; on the CPU it always does
# ----------------------------------------------------------------------------------------------------------------------
settings, given, config_files = configure(globals(), __file__)
signal.signal(signal.SIGINT, signal.SIG_DFL)    # Ctrl-C ends the script at once, as long as there is nothing to save

# What None stands for: on a GPU the model that nanoGPT calls baby GPT; elsewhere one that gives its best in three minutes on two cores.
fits = {
    'cuda': dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=64, dropout=0.2, optimizer='adamw', learning_rate=1e-3,
                 max_iters=5000, warmup_iters=100, min_lr=1e-4, eval_interval=250, dtype='bfloat16', compile=True),
    'cpu': dict(n_layer=4, n_head=4, n_embd=128, block_size=128, batch_size=8, dropout=0.0, optimizer='muon', learning_rate=3e-3,
                max_iters=1300, warmup_iters=30, min_lr=0.0, eval_interval=130, dtype='float32', compile=False),
}

import numpy as np              # after configure(), so that --help and mistakes in flags answer at once
import torch
import torch.distributed
from tqdm import tqdm

from dataset import Dataset, data_folder, prepare_if_missing
from model import GPT, GPTConfig
from runs import (autocast, checkpoint_path, git_commit, load_checkpoint, make_model, need_folder, pick_device, sum_of_losses, window_starts,
                  write_whole)

# ----------------------------------------------------------------------------------------------------------------------
# one process, or several under torchrun

rank, world_size = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
master = rank == 0              # the process that prints and writes
device = pick_device(device)
if world_size > 1:
    if device.type == 'cuda':
        device = pick_device(f'cuda:{os.environ.get("LOCAL_RANK", 0)}')
        torch.cuda.set_device(device)
    try:
        torch.distributed.init_process_group(backend or ('nccl' if device.type == 'cuda' else 'gloo'))
    except (RuntimeError, ValueError) as error:
        fail(f'the {world_size} processes cannot be connected ({str(error).splitlines()[0]}); start them by torchrun, see --help')


def say(text):
    """Prints once, whatever the number of processes, and around the progress bar."""
    if master:
        try:
            tqdm.write(text)
            sys.stdout.flush()  # what follows may take long, and the output may be a file
        except OSError:         # its reader has gone, as in `| head`, or its disk is full: training goes on unheard
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def sum_over_processes(*numbers):
    """The sum of each number over all processes."""
    if world_size == 1:
        return numbers
    total = torch.tensor(numbers, dtype=torch.float32 if device.type == 'mps' else torch.float64, device=device)
    torch.distributed.all_reduce(total)
    return total.tolist()


# ----------------------------------------------------------------------------------------------------------------------
# settings: what was asked for, what the run we start from says, what fits the machine

name = os.path.splitext(os.path.basename(config_files[-1]))[0] if config_files else position
if given.get('out_dir') == '':
    fail('--out_dir names no folder; write --out_dir=out/NAME, or leave it out')
out_dir = out_dir or os.path.join('out', name)
name = os.path.basename(os.path.abspath(out_dir))
last_path, best_path, log_path, settings_path, curve_path = (
    os.path.join(out_dir, file) for file in ('last.pt', 'ckpt.pt', 'log.csv', 'config.json', 'loss.png'))
resuming = init_from == 'resume'

model_settings = ['n_layer', 'n_head', 'n_embd', 'block_size', 'dropout', 'bias', 'gelu', 'position', 'sinusoidal_base', 'sinusoidal_scale',
                  'shaw_max_distance', 'shaw_values', 'rope_base', 'rope_layout', 'rope_scaling', 'rope_factor', 'rope_original_length',
                  'rope_attention_factor', 'yarn_beta_fast', 'yarn_beta_slow', 't5_buckets', 't5_max_distance']
# Settings that may differ when a run is resumed; a change of any other would make it another run.
free_to_change = ['out_dir', 'init_from', 'overwrite', 'max_iters', 'lr_decay_iters', 'eval_interval', 'log_interval', 'eval_only',
                  'wandb_log', 'wandb_project', 'wandb_run_name', 'device', 'dtype', 'compile', 'backend', 'deterministic']

source = None                   # the checkpoint that we start from
if resuming:
    if not os.path.exists(last_path) and not os.path.exists(best_path):
        fail(f'{out_dir} holds no run to resume; leave out --init_from=resume to start one, or name its folder with --out_dir')
    source_path, other_path = (last_path, best_path) if os.path.exists(last_path) else (best_path, last_path)
    remedy = f'delete it: resuming then goes on from {other_path}' if os.path.exists(other_path) else 'start the run again'
    source = load_checkpoint(source_path, remedy=remedy)
    kinds = dict(config=dict, optimizer=list, scaler=dict, batch_generator=torch.Tensor, iter_num=int, seconds=float, log=list, data=dict)
    if not all(isinstance(source.get(key), kind) for key, kind in kinds.items()):
        fail(f"{source_path} is not a run of train.py's to go on with; start another from its weights with --init_from={out_dir}")
    for key, value in source['config'].items():
        if key not in settings or key in ('out_dir', 'init_from', 'overwrite', 'eval_only'):
            continue
        if key in given and key not in free_to_change and given[key] is not None and given[key] != value:
            fail(f'{out_dir} was run with {key}={value!r}, not {given[key]!r}; resume it without that, or start a run with another '
                 '--out_dir')
        if key not in given:
            settings[key] = value
    settings['init_from'] = source['config']['init_from']       # how the run began, not how it goes on
elif init_from != 'scratch':
    source_path = checkpoint_path(init_from)
    if not os.path.exists(source_path):
        fail(f"init_from must be 'scratch', 'resume' or the folder of a trained run; there is no {source_path} for {init_from!r}")
    source = load_checkpoint(source_path)
    for key in model_settings:
        if given.get(key) is None and key != 'rope_original_length':
            settings[key] = source['model_args'][key]
    if 'rope_scaling' in given and given.get('rope_original_length') is None:
        settings['rope_original_length'] = source['model_args']['rope_original_length'] or source['model_args']['block_size']
    if given.get('block_size') is None:
        settings['block_size'] = int(source['model_args']['block_size'] * settings['rope_factor'])

fitting = fits.get(device.type, fits['cpu'])
if init_from not in ('scratch', 'resume') and settings['batch_size'] is None:     # as many tokens a step as would be usual
    settings['batch_size'] = max(1, fitting['batch_size'] * fitting['block_size'] // settings['block_size'])
settings.update({key: fitting[key] for key in fitting if settings[key] is None})
if settings['lr_decay_iters'] is None:
    settings['lr_decay_iters'] = settings['max_iters']
if device.type == 'cpu' and settings['dtype'] == 'float16':
    fail('dtype float16 is not for training on a CPU; use float32 or bfloat16')
if settings['dtype'] == 'bfloat16' and device.type == 'cuda' and not torch.cuda.is_bf16_supported():
    settings['dtype'] = 'float16'
settings['out_dir'] = out_dir
globals().update({key: value for key, value in settings.items() if key != 'device'})

for key, (least, most) in dict(
        batch_size=(1, 10 ** 6), gradient_accumulation_steps=(1, 10 ** 6), max_iters=(1, 10 ** 9), warmup_iters=(0, 10 ** 9),
        lr_decay_iters=(1, 10 ** 9), eval_interval=(1, 10 ** 9), eval_windows=(1, 10 ** 9), log_interval=(1, 10 ** 9),
        learning_rate=(0, 100), muon_learning_rate=(0, 100), min_lr=(0, 100), weight_decay=(0, 100), grad_clip=(0, 10 ** 9),
        seed=(0, 2 ** 62)).items():
    if not least <= settings[key] <= most:
        fail(f'{key} must be from {least} to {most}, not {settings[key]}')
for key in ('beta1', 'beta2'):
    if not 0 <= settings[key] < 1:
        fail(f'{key} must be in [0, 1), not {settings[key]}')
if optimizer not in ('adamw', 'muon'):
    fail(f"optimizer must be 'adamw' or 'muon', not {optimizer!r}")
if min_lr > learning_rate:
    fail(f'min_lr {min_lr} must not be above learning_rate {learning_rate}; lower it too')
if backend not in (None, 'gloo', 'nccl'):
    fail(f"backend must be 'gloo', 'nccl' or None, not {backend!r}")
if gradient_accumulation_steps % world_size:
    fail(f'gradient_accumulation_steps {gradient_accumulation_steps} must be a multiple of the {world_size} processes that share them')
if eval_only and source is None:
    fail('eval_only scores a run: name it with --init_from=out/NAME, or use --init_from=resume')
if not resuming and not eval_only and not overwrite and (os.path.exists(last_path) or os.path.exists(best_path)):
    fail(f'{out_dir} already holds a run; add --overwrite=True, --init_from=resume, or another --out_dir')
if not eval_only:
    need_folder(out_dir)
model_args = {key: settings[key] for key in model_settings}
try:
    GPTConfig(**model_args)     # before any data is fetched
except ValueError as error:
    fail(error)
if (parameters := 12 * n_layer * n_embd ** 2) > 1e11:
    fail(f'{n_layer} layers of width {n_embd} have {parameters:.0e} parameters; choose a smaller n_layer or n_embd')
if (step_tokens := gradient_accumulation_steps * batch_size * block_size) > 2 ** 30:
    fail(f'a step would read {step_tokens:,} tokens; choose a smaller batch_size, gradient_accumulation_steps or block_size')
forward_context = autocast(device, dtype)

# ----------------------------------------------------------------------------------------------------------------------
# the data

if master:
    prepare_if_missing(dataset)
if world_size > 1:
    torch.distributed.barrier()
data = Dataset(data_folder(dataset))
for split in ('train', 'val'):
    if len(data.tokens(split)) <= block_size:
        fail(f'the {split} part of {dataset} has {len(data.tokens(split))} tokens: block_size must be below that, not {block_size}')
if source is not None and source.get('tokenizer', data.meta['tokenizer']) != data.meta['tokenizer']:
    fail(f'{source_path} was trained with another tokenizer than the data set {dataset}; use the data set that it was trained on')
if resuming and source['data'] != data.meta['sha256']:
    fail(f'{dataset} has been prepared anew, from another text than {out_dir} was run on; prepare that one, or start a new run')

batch_generator = torch.Generator().manual_seed(seed)   # of its own: no scheme and no evaluation can shift the batches


def get_batch():
    """The micro-batches of one step that are this process's: a list of (inputs, targets), (batch_size, block_size) each."""
    tokens = data.tokens('train')
    starts = torch.randint(len(tokens) - block_size, (gradient_accumulation_steps, batch_size), generator=batch_generator).numpy()
    windows = tokens[starts[rank::world_size, :, None] + np.arange(block_size + 1)].astype(np.int64)
    windows = torch.from_numpy(windows)
    if device.type == 'cuda':
        windows = windows.pin_memory()                  # lets the copy run beside the GPU's work
    windows = windows.to(device, non_blocking=True)
    return [(micro_batch[:, :-1], micro_batch[:, 1:]) for micro_batch in windows]


validation_windows = window_starts(len(data.tokens('val')), block_size, eval_windows)


def validation_loss(starts):
    """Mean loss over the validation windows that begin at `starts`, in nats per token."""
    total, count = sum_of_losses(raw_model, data.tokens('val'), starts[rank::world_size], block_size, batch_size, device, forward_context)
    total, count = sum_over_processes(total, count)
    return total / count


# ----------------------------------------------------------------------------------------------------------------------
# the model and its optimizer

torch.manual_seed(seed)
if device.type == 'cuda':
    torch.set_float32_matmul_precision('high')          # TF32 on GPUs that have it
if deterministic:
    os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')     # cuBLAS reads it at its first use; costs it some 32 MB
    torch.use_deterministic_algorithms(True)            # slower kernels in places, and an error where PyTorch has none
    torch.backends.cudnn.benchmark = False
model_args['vocab_size'] = data.vocab_size
if source is None:
    try:
        raw_model = GPT(GPTConfig(**model_args))
    except RuntimeError:        # PyTorch could not allocate it
        fail('a model of these sizes does not fit into memory; choose smaller ones')
else:
    raw_model = make_model(source, source_path, **model_args)
raw_model.to(device)

optimizers = raw_model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2), device.type, optimizer, muon_learning_rate)
scaler = torch.amp.GradScaler(device.type, enabled=dtype == 'float16')     # float16's small gradients would vanish otherwise

iteration, seconds, best_val_loss, wandb_id = 0, 0.0, math.inf, None
log = []                                                # log.csv's rows
loss_sum, loss_count = 0.0, 0                           # of the training batches since the last row
if resuming:
    try:
        for one, state in zip(optimizers, source['optimizer'], strict=True):
            one.load_state_dict(state)
        if source['scaler']:                            # empty unless float16 was used
            scaler.load_state_dict(source['scaler'])
        batch_generator.set_state(source['batch_generator'])
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        fail(f'{source_path} is damaged: its optimizer or its random numbers cannot be restored; {remedy}')
    iteration, seconds, log = source['iter_num'], source['seconds'], source['log']
    loss_sum, loss_count, wandb_id = source['loss_sum'], source['loss_count'], source['wandb_id']
    if os.path.exists(best_path):                       # it may be an evaluation ahead of last.pt, if a kill came between the two
        remedy = f'delete it: resuming then goes on from {last_path}'
        best_val_loss = load_checkpoint(best_path, remedy=remedy).get('best_val_loss', math.inf)
    if iteration > max_iters:
        fail(f'{out_dir} has done {iteration} steps, and max_iters {max_iters} is below that; give a larger --max_iters')
    if not eval_only:
        say(f'going on from step {iteration:,}' if iteration < max_iters else
            f'{out_dir} has done all of its {max_iters:,} steps; a larger --max_iters goes on')
    if decay_lr and lr_decay_iters < max_iters and max_iters > source['config']['max_iters'] and 'lr_decay_iters' not in given:
        say(f'from step {lr_decay_iters:,} on the learning rate is min_lr, {min_lr}; --lr_decay_iters={max_iters} stretches its schedule')
source = None                                           # frees its memory

model = raw_model
if compile:
    model = torch.compile(raw_model)
    try:                                                # compiling happens at the first call: find out now whether it works
        tokens = torch.zeros(batch_size, block_size + 1, dtype=torch.int64, device=device)
        with forward_context:
            model(tokens[:, :-1], tokens[:, 1:])[1].backward()         # cut as batches are: other strides would be compiled anew
        raw_model.zero_grad(set_to_none=True)
    except Exception as error:                          # no C++ compiler, an unsupported GPU ...
        say(f'torch.compile does not work here ({type(error).__name__}): going on without it')
        model, compile = raw_model, False
if world_size > 1:
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[device.index] if device.type == 'cuda' else None)


def learning_rate_factor(iteration):
    """Share of the peak learning rate at a step: linear warm-up, then a cosine down to min_lr; never below min_lr."""
    lowest = min_lr / learning_rate if learning_rate else 0.0
    if iteration < warmup_iters:
        return max((iteration + 1) / (warmup_iters + 1), lowest)
    if not decay_lr:
        return 1.0
    progress = min((iteration - warmup_iters) / max(lr_decay_iters - warmup_iters, 1), 1.0)
    return lowest + (1 - lowest) * (1 + math.cos(math.pi * progress)) / 2


# ----------------------------------------------------------------------------------------------------------------------
# what a run leaves behind

def save(path):
    """Everything that resuming needs, and with nanoGPT's keys what sampling needs."""
    state = dict(
        model=raw_model.state_dict(), model_args=model_args, config=settings, tokenizer=data.meta['tokenizer'],
        optimizer=[one.state_dict() for one in optimizers], scaler=scaler.state_dict(),
        iter_num=iteration, best_val_loss=best_val_loss, seconds=seconds, log=log, loss_sum=loss_sum, loss_count=loss_count,
        batch_generator=batch_generator.get_state(), data=data.meta['sha256'], wandb_id=wandb_id)
    write_whole(path, lambda file: torch.save(state, file))


def write_log():
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(['iter', 'tokens', 'seconds', 'lr', 'train_loss', 'val_loss'])
    writer.writerows(log)
    write_whole(log_path, lambda file: file.write(text.getvalue().encode()))


def write_settings():
    versions = dict(python=platform.python_version(), torch=torch.__version__, numpy=np.__version__, device=str(device),
                    threads=torch.get_num_threads(), git_commit=git_commit())
    content = json.dumps(dict(settings=settings, model_args=model_args, data=data.meta['sha256'], versions=versions), indent=1)
    write_whole(settings_path, lambda file: file.write(content.encode()))


def draw_curve():
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    rows = [row for row in log if row[4] != '']
    figure, axes = plt.subplots(figsize=(6, 4), layout='constrained')
    axes.plot([row[1] for row in rows], [row[4] for row in rows], label='training batches', color='0.6')
    axes.plot([row[1] for row in log], [row[5] for row in log], label='validation', color='C0', marker='.')
    axes.set(xlabel='tokens seen', ylabel='loss (nats per token)', title=f'{name}: position = {position}')
    axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format='png', dpi=120)
    plt.close(figure)
    write_whole(curve_path, lambda file: file.write(picture.getvalue()))


def without_wandb(error):
    """Whatever ails wandb: one line, and training goes on."""
    global wandb_run
    wandb_run = None
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    say(f'wandb does not work ({reason}): training goes on without it')


def add_row(val_loss):
    """One row of log.csv, and the same numbers to wandb."""
    global loss_sum, loss_count
    row = [iteration, iteration * tokens_per_iter, round(seconds, 3), learning_rate * learning_rate_factor(iteration),
           loss_sum / loss_count if loss_count else '', val_loss]
    log.append(row)
    loss_sum, loss_count = 0.0, 0
    if wandb_run is not None:
        named = zip(('iter', 'tokens', 'seconds', 'lr', 'train_loss', 'val_loss'), row)
        try:
            wandb_run.log({key: number for key, number in named if number != ''}, step=iteration)
        except Exception as error:
            without_wandb(error)


def stop_for(fault):
    """Ends a run whose numbers are none any more. All processes see the same ones, so one of them says it."""
    progress.close()
    if master:
        kept = f'{last_path} holds the last good state: ' if os.path.exists(last_path) else ''
        fail(f'{fault} at step {iteration}; {kept}lower the learning rate and start again')
    sys.exit(2)


# ----------------------------------------------------------------------------------------------------------------------

tokens_per_iter = gradient_accumulation_steps * batch_size * block_size
say(f'{name}: position={position}, {n_layer} layers, {n_head} heads, width {n_embd}, block {block_size}: '
    f'{raw_model.get_num_params():,} parameters, and {raw_model.get_num_position_params():,} of position tables')
say(f'{max_iters:,} steps of {tokens_per_iter:,} tokens on {dataset} with {optimizer}; {device}, {dtype}'
    + (', compiled' if compile else '') + (f', {world_size} processes' if world_size > 1 else ''))

if eval_only:
    say(f'validation loss {validation_loss(window_starts(len(data.tokens("val")), block_size)):.4f} over all of the validation text')
    sys.exit(0)

wandb_run = None
if master:
    try:
        os.makedirs(out_dir, exist_ok=True)
    except OSError as error:
        fail(f'the folder {out_dir} cannot be made ({error.strerror}); choose another --out_dir')
    if wandb_log:
        try:
            import wandb
            wandb_run = wandb.init(project=wandb_project, name=wandb_run_name or name, config=settings, id=wandb_id, resume='allow')
            wandb_id = wandb_run.id
        except Exception as error:
            without_wandb(error)
    for path in (last_path, best_path, log_path, settings_path, curve_path):
        for leftover in glob.glob(glob.escape(path) + '.*.part'):       # of a run that was killed while it wrote
            os.remove(leftover)
        if not resuming and os.path.exists(path):
            os.remove(path)
    write_settings()

stop_signal = 0                 # set by Ctrl-C or a SIGTERM: the run is saved after the step at hand


def request_stop(number, frame):
    global stop_signal
    if stop_signal and number == signal.SIGINT:
        sys.exit(128 + number)  # Ctrl-C again: leave at once. (A second SIGTERM is usual where a job's every process gets one.)
    stop_signal = number


signal.signal(signal.SIGINT, request_stop)
signal.signal(signal.SIGTERM, request_stop)

progress = tqdm(total=max_iters, initial=iteration, unit='step', disable=not (master and sys.stderr.isatty()), dynamic_ncols=True)
started = time.perf_counter() - seconds
last_time, last_iteration, val_loss, mfu = time.perf_counter(), iteration, log[-1][5] if log else math.nan, None
stopping = 0                    # stop_signal, added up over all processes

while True:
    # Score the model. The row of the last step waits for the whole validation text.
    if iteration % eval_interval == 0 and not (log and log[-1][0] == iteration) or iteration == max_iters:
        seconds = time.perf_counter() - started
        val_loss = validation_loss(validation_windows)
        if not math.isfinite(val_loss):
            stop_for(f'the validation loss is {val_loss}')
        trained = f', training {loss_sum / loss_count:.4f}' if loss_count else ''
        improved = val_loss < best_val_loss
        best_val_loss = min(val_loss, best_val_loss)
        if iteration < max_iters:
            add_row(val_loss)
        if master:
            progress.clear()    # should the disk be full, its message stands on a line of its own
            if improved:
                save(best_path)
            if iteration < max_iters:
                save(last_path)
                write_log()
        if not sys.stderr.isatty():
            say(f'step {iteration}: validation loss {val_loss:.4f}{trained}, {seconds:.0f} s')
    if iteration >= max_iters:
        break
    if stopping:
        seconds = time.perf_counter() - started
        if master:
            save(last_path)
            write_log()
        progress.close()
        say(f'stopped at step {iteration} and saved; the same command with --init_from=resume goes on')
        if world_size > 1:      # the first to leave ends the others: not before the state is saved
            torch.distributed.barrier()
        sys.exit(128 + int(stop_signal or signal.SIGTERM))

    # One step: forward and backward for each micro-batch, clip, step.
    factor = learning_rate_factor(iteration)
    for one, peak in zip(optimizers, (learning_rate, muon_learning_rate)):
        for group in one.param_groups:
            group['lr'] = peak * factor
    batch = get_batch()
    # Dropout follows from seed, step and process alone, so that a resumed run draws what an uninterrupted one would have drawn.
    torch.manual_seed(int(np.random.SeedSequence((seed, iteration, rank)).generate_state(1)[0]))
    step_loss = torch.zeros((), device=device)
    for number, (inputs, targets) in enumerate(batch):
        if world_size > 1:      # processes exchange gradients after the last micro-batch only
            model.require_backward_grad_sync = number == len(batch) - 1
        with forward_context:
            _, loss = model(inputs, targets)
        scaler.scale(loss / len(batch)).backward()
        step_loss += loss.detach() / len(batch)
    for one in optimizers:
        scaler.unscale_(one)
    norm = torch.nn.utils.clip_grad_norm_(raw_model.parameters(), grad_clip or math.inf).item()
    step_loss, stopping = sum_over_processes(step_loss.item() / world_size, stop_signal)
    if not math.isfinite(step_loss):
        stop_for(f'the loss is {step_loss}')
    if not math.isfinite(norm) and not scaler.is_enabled():     # float16's scaler expects this now and then, and skips the step
        stop_for(f"the norm of the loss's gradient is {norm}")
    for one in optimizers:
        scaler.step(one)
        one.zero_grad(set_to_none=True)
    scaler.update()
    iteration += 1
    loss_sum, loss_count = loss_sum + step_loss, loss_count + 1

    progress.update()
    if iteration % log_interval == 0 and not progress.disable:
        now = time.perf_counter()
        mfu = raw_model.estimate_mfu(batch_size * gradient_accumulation_steps, (now - last_time) / (iteration - last_iteration), dtype)
        progress.set_postfix_str(f'loss {step_loss:.3f}, validation {val_loss:.3f}, '
                                 f'{(iteration - last_iteration) * tokens_per_iter / (now - last_time):,.0f} tokens/s'
                                 + (f', MFU {mfu:.0%}' if mfu else ''))
        last_time, last_iteration = now, iteration

# The figure that runs are compared by: every token of the validation text, with the last weights. last.pt is saved before it is
# logged: a run that goes on to more steps then has a log without it, as if it had never stopped here.
if master:
    save(last_path)
val_loss = validation_loss(window_starts(len(data.tokens('val')), block_size))
add_row(val_loss)
progress.close()
if master:
    write_log()
    try:
        draw_curve()
    except ImportError:
        say('no curve is drawn: matplotlib is not installed')
    except Exception as error:                          # a name that it cannot write, with one $ or no UTF-8
        say(f'no curve is drawn ({type(error).__name__})')
say(f'done: validation loss {val_loss:.4f} over all of the validation text, after {seconds:.0f} s of training; see {out_dir}')
if wandb_run is not None:
    try:
        wandb_run.finish()
    except Exception as error:
        without_wandb(error)
if world_size > 1:
    torch.distributed.destroy_process_group()
