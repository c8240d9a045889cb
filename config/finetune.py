# A few steps on a text of one's own, from weights that others trained for long: nanoGPT's, GPT-2's, or a run.
# What does GPT-2 lose without its table of positions, and how fast is it won back?
#     python train.py config/finetune.py --init_from=gpt2 --dataset=shakespeare_bpe
#     python train.py config/finetune.py --init_from=gpt2 --dataset=shakespeare_bpe --position=rope
init_from = 'gpt2'
dataset = 'shakespeare_bpe'
block_size = 256
optimizer = 'adamw'
learning_rate = 3e-5
min_lr = 0.0
warmup_iters = 5
max_iters = 100
eval_interval = 10
