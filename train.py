"""
Train a GPT whose position scheme is one line of config.

    python train.py config/rope.py                              # sizes that fit this machine; into out/rope/
    python train.py config/rope.py --batch_size=32 --compile=False
    python train.py config/rope.py --init_from=resume           # go on where it stopped
    torchrun --standalone --nproc_per_node=4 train.py config/rope.py --gradient_accumulation_steps=4
"""
import math
import os
import signal
import sys
import time

from configurator import configure, count, fail, scheme_options, share

# ------------------------------------------------------------------------------------------------------------
# the run
out_dir: str = None             # where the run is written; None: out/ and the name of the last config file
init_from = 'scratch'           # 'scratch'; 'resume': go on in out_dir; or the folder of a run to start from
overwrite = False               # replace the run that out_dir already holds
seed = 1337                     # of weights, batches and dropout: one seed, the same batches for all schemes
# the data
dataset = 'shakespeare_char'    # shakespeare_char, shakespeare_bpe, tinyshakespeare, word_order, text; a path
block_size: count = None        # tokens in a sequence
batch_size: count = None        # sequences in a micro-batch
gradient_accumulation_steps: count = 1  # micro-batches in a step, over all processes
# the model; None fits the machine (FITS, in settle.py)
n_layer: count = None           # blocks
n_head: count = None            # heads per block
n_embd: count = None            # width
dropout: share = None           # 0 for a single pass over the data, 0.1 and more where it is repeated often
bias = False                    # biases in Linear and LayerNorm
gelu = 'exact'                  # 'exact' or 'tanh'
position = 'learned'            # none, learned, sinusoidal, shaw, rope, alibi, t5 or tupe; options: below
# the optimizer
optimizer: str = None           # 'adamw', or 'muon' for the blocks' matrices and adamw for the rest
learning_rate: float = None     # adamw's peak
muon_learning_rate = 0.02       # muon's peak
position_rate = 1.0             # what the position scheme's own parameters learn at, in learning rates
cpu_rate = 1.0                  # times the rates that are left open, on a CPU
max_iters: count = None         # steps
weight_decay = 0.1              # on what has two dimensions or more
beta1: share = 0.9              # adamw
beta2: share = 0.99             # adamw
grad_clip = 1.0                 # largest norm of the gradient; 0 does not clip
# the learning rate's schedule
decay_lr = True                 # False: constant after the warm-up
warmup_iters: int = None        # steps of linear warm-up
lr_decay_iters: count = None    # steps until min_lr is reached, by a cosine; None: max_iters
min_lr: float = None            # what the learning rate decays to; muon's decays in proportion
# evaluation and logging
eval_interval: count = None     # steps between evaluations
eval_windows: count = 128       # windows of the validation text for an evaluation, always the same ones
log_interval: count = 10        # steps between updates of the progress display
eval_only = False               # score the whole validation text and stop; with init_from
wandb_log = False               # log to wandb too, the same numbers as log.csv
wandb_project = 'position-encoding'     # wandb's project
wandb_run_name: str = None      # wandb's run; None: the name of out_dir
# the machine
device = 'auto'                 # auto, cpu, cuda, cuda:0, mps
dtype: str = None               # float32, bfloat16 or float16: what matrix products are computed in
compile: bool = None            # torch.compile the model
backend: str = None             # of torch.distributed; None: nccl on CUDA, gloo on the CPU
deterministic = False           # the same command gives the same numbers on CUDA too, but more slowly
# ------------------------------------------------------------------------------------------------------------
settings, given, config_files = configure(globals(), __file__, more=scheme_options())
signal.signal(signal.SIGINT, signal.SIG_DFL)    # Ctrl-C ends the script at once: there is nothing to save yet

import numpy as np              # after configure(), so that --help and mistakes in flags answer at once
import torch
from tqdm import tqdm

from checkpoints import make_model
from dataset import Dataset, data_folder, prepare_if_missing
from machine import (StopRequest, autocast, choose_kernels, connect, end_with_stdin, pick_device,
                     rank_and_world_size, say, sum_over_processes, wait_for_all)
from measure import (compiled_or_not, keep_on_device, read_windows, sum_of_losses, training_step, utilisation,
                     window_starts)
from optim import make_optimizers
from runs import Run
from settle import check_data, check_place, settle

# ------------------------------------------------------------------------------------------------------------
# the processes (one, or several under torchrun), and what the settings left open

end_with_stdin()
rank, world_size = rank_and_world_size()
device = connect(pick_device(device), backend)
name = os.path.splitext(os.path.basename([position, *config_files][-1]))[0]
settings['out_dir'] = out_dir or os.path.join('out', name)
start = settle(settings, given, device)
settings = start.settings
check_place(start)
globals().update({key: value for key, value in settings.items() if key != 'device'})
forward_context = autocast(device, dtype)

# ------------------------------------------------------------------------------------------------------------
# the data

if rank == 0:
    prepare_if_missing(dataset)
wait_for_all()
data = Dataset(data_folder(dataset))
check_data(start, data)
kept = {split: keep_on_device(data.tokens(split), device) for split in ('train', 'val')}    # None: too large
batch_generator = torch.Generator().manual_seed(seed)   # of its own: nothing else can shift the batches


def tokens_of(split):
    """All tokens of 'train' or 'val', for read_windows(): on the device, or those on the disk."""
    return data.tokens(split) if kept[split] is None else kept[split]


def get_batch():
    """This process's micro-batches of a step: a list of (inputs, targets), (batch_size, block_size) each."""
    tokens = tokens_of('train')
    starts = torch.randint(len(tokens) - block_size, (gradient_accumulation_steps, batch_size),
                           generator=batch_generator).numpy()
    windows = read_windows(tokens, starts[rank::world_size], block_size, device, data.vocab_size)
    return [(micro_batch[:, :-1], micro_batch[:, 1:]) for micro_batch in windows]


def validation_loss(n_windows=None):
    """Mean loss over the validation text, or over n_windows of it, always the same; in nats per token."""
    tokens = tokens_of('val')
    starts = window_starts(len(tokens), block_size, n_windows)[rank::world_size]
    sums = sum_of_losses(raw_model, tokens, starts, block_size, batch_size, device, forward_context)
    total, predicted = sum_over_processes(device, *sums)
    return total / predicted


# ------------------------------------------------------------------------------------------------------------
# the model, its optimizers, and the run with all that it has to keep

torch.manual_seed(seed)
choose_kernels(device, deterministic)
model_args = {**start.model_args, 'vocab_size': data.vocab_size}
raw_model = make_model(start.source, start.source_path, **model_args).to(device)
optimizers = make_optimizers(raw_model, weight_decay, learning_rate, (beta1, beta2), device.type, optimizer,
                             muon_learning_rate, position_rate)
scaler = torch.amp.GradScaler(device.type, enabled=dtype == 'float16')     # its small gradients would vanish
run = Run(settings, model_args, data, raw_model, optimizers, scaler, batch_generator)
if start.resuming:
    run.go_on(start)
start.source = None                                     # frees its memory

model = raw_model                                       # until it is compiled or shared among processes
if compile:
    tokens = torch.zeros(batch_size, block_size + 1, dtype=torch.int64, device=device)  # cut as batches are
    model = compiled_or_not(raw_model, tokens[:, :-1], tokens[:, 1:], forward_context,
                            lambda reason: say(f'{reason}: going on without it'))
    compile = model is not raw_model
if world_size > 1:
    model = torch.nn.parallel.DistributedDataParallel(model)

say(f'{run.name}: position={position}, {n_layer} layers, {n_head} heads, width {n_embd}, block {block_size}: '
    f'{raw_model.get_num_params():,} parameters, {raw_model.get_num_position_params():,} of position tables')
say(f'{max_iters:,} steps of {run.tokens_per_iter:,} tokens on {dataset} with {optimizer}; {device}, {dtype}'
    + (', compiled' if compile else '') + (f', {world_size} processes' if world_size > 1 else ''))
if eval_only:
    say(f'validation loss {validation_loss():.4f} over all of the validation text')
    sys.exit(0)


def learning_rate_factor(iteration):
    """Share of the peak rate at a step: linear warm-up, then a cosine down to min_lr; never below min_lr."""
    lowest = min_lr / learning_rate if learning_rate else 0.0
    if iteration < warmup_iters:
        return max((iteration + 1) / (warmup_iters + 1), lowest)
    if not decay_lr:
        return 1.0
    progress = min((iteration - warmup_iters) / max(lr_decay_iters - warmup_iters, 1), 1.0)
    return lowest + (1 - lowest) * (1 + math.cos(math.pi * progress)) / 2


def stop_for(fault, step):
    """Ends a run whose numbers are none any more. All processes see the same ones, so one of them says it."""
    progress.close()
    if rank == 0:
        last = run.path('last.pt')
        good = f'{last} holds the last good state: ' if run.saved and os.path.exists(last) else ''
        fail(f'{fault} at step {step}; {good}lower the learning rate and start again')
    sys.exit(2)


def read_steps():
    """
    Reads the losses of the steps since it was called last, and the requests to stop, of all processes. Ends a
    run that is spoilt: nothing has been saved since. Of a step nothing else waits for the device, but
    float16's scaler.
    """
    global step_loss, stopping
    numbers = torch.stack(unread).tolist()              # a loss, its gradient's norm, a loss, ..
    *losses, stopping = sum_over_processes(device, *(loss / world_size for loss in numbers[::2]), stop.signal)
    for step, (step_loss, norm) in enumerate(zip(losses, numbers[1::2]), run.iteration - len(losses)):
        if not math.isfinite(step_loss):
            stop_for(f'the loss is {step_loss}', step)
        if not math.isfinite(norm) and not scaler.is_enabled():     # float16's scaler skips such a step
            stop_for(f"the norm of the loss's gradient is {norm}", step)
        run.loss_sum, run.loss_count = run.loss_sum + step_loss, run.loss_count + 1
    unread.clear()


def leave():
    """Ends a run that was asked to stop, when it is saved."""
    progress.close()
    say(f'stopped at step {run.iteration} and saved; the same command with --init_from=resume goes on')
    sys.exit(128 + int(stop.signal or signal.SIGTERM))


# ------------------------------------------------------------------------------------------------------------
# training

run.begin(start.resuming)
stop, stopping = StopRequest(), 0
unread = []             # what read_steps() is to read, on the device
progress = tqdm(total=max_iters, initial=run.iteration, unit='step', dynamic_ncols=True,
                disable=not (rank == 0 and sys.stderr.isatty()))
started = time.perf_counter() - run.seconds
last_time, last_iteration = time.perf_counter(), run.iteration
val_loss = run.log[-1][5] if run.log else math.nan

while True:
    # Score the model. The row of the last step waits for the whole validation text.
    factor = learning_rate_factor(run.iteration)
    at_end = run.iteration == max_iters
    if at_end or run.iteration % eval_interval == 0 and not run.has_row():
        run.seconds = time.perf_counter() - started
        val_loss = validation_loss(eval_windows)
        if not math.isfinite(val_loss):
            stop_for(f'the validation loss is {val_loss}', run.iteration)
        progress.clear()        # should the disk be full, its message stands on a line of its own
        if not (sys.stdout.isatty() and sys.stderr.isatty()):     # there the bar says it
            trained = f', training {run.training_loss():.4f}' if run.loss_count else ''
            say(f'step {run.iteration}: validation loss {val_loss:.4f}{trained}, {run.seconds:.0f} s')
        improved, run.best_val_loss = val_loss < run.best_val_loss, min(val_loss, run.best_val_loss)
        if not at_end:
            run.add_row(learning_rate * factor, val_loss)
        if improved:
            run.save('ckpt.pt')
        if not at_end:
            run.save('last.pt')
            run.write_log()
    if at_end or stopping:
        break

    # One step. Dropout follows from seed, step and process alone, so that a resumed run draws the same.
    for each, peak in zip(optimizers, (learning_rate, muon_learning_rate)):
        for group in each.param_groups:
            group['lr'] = peak * factor * group.get('rate', 1.0)        # Muon's have none
    torch.manual_seed(int(np.random.SeedSequence((seed, run.iteration, rank)).generate_state(1)[0]))
    unread += training_step(model, optimizers, get_batch(), forward_context, grad_clip, scaler)
    run.iteration += 1
    if (device.type == 'cpu' or run.iteration == max_iters      # a GPU is not to wait between its steps
            or any(run.iteration % interval == 0 for interval in (10, log_interval, eval_interval))):
        read_steps()

    progress.update()
    if run.iteration % log_interval == 0 and not progress.disable:
        now = time.perf_counter()
        step_time = (now - last_time) / (run.iteration - last_iteration)
        mfu = utilisation(raw_model, run.tokens_per_iter / world_size, step_time, dtype)
        progress.set_postfix_str(f'loss {step_loss:.3f}, validation {val_loss:.3f}, '
                                 f'{run.tokens_per_iter / step_time:,.0f} tokens/s'
                                 + (f', MFU {mfu:.0%}' if mfu else ''))
        last_time, last_iteration = now, run.iteration

# The figure that runs are compared by: every token of the validation text, with the last weights. last.pt is
# saved before it is logged: a run that goes on to more steps then has a log without it, as if it had never
# stopped here.
if stopping:
    run.seconds = time.perf_counter() - started
    run.write_log()
run.save('last.pt')
wait_for_all()          # the first to leave ends the others: not before the state is saved
if stopping:
    leave()
with stop.at_once(leave):
    val_loss = validation_loss()
run.add_row(learning_rate * learning_rate_factor(run.iteration), val_loss)
progress.close()
run.write_log()
run.draw()
say(f'done: validation loss {val_loss:.4f} over all of the validation text, after {run.seconds:.0f} s of '
    f'training; see {run.folder}')
run.wandb.finish()
if world_size > 1:
    torch.distributed.destroy_process_group()
