# NTK-aware scaling: a trained RoPE run (out/rope) learns to read 4 times its length, in a few percent of its steps. A larger base
# stretches the slowest wave 4 times and the fastest hardly at all. bloc97 2023; YaRN paper, section 3.1.
init_from = 'out/rope'
position = 'rope'
rope_scaling = 'ntk'
rope_factor = 4.0
max_iters = 100
eval_interval = 25
warmup_iters = 10
learning_rate = 1e-3
muon_learning_rate = 5e-3
min_lr = 0.0
