# Position interpolation: a trained RoPE run (out/rope) learns to read 4 times its length, in a few percent of its steps. All waves are
# stretched alike, so that 4 times the length spans the angles it knows. Chen 2023.
init_from = 'out/rope'
position = 'rope'
rope_scaling = 'linear'
rope_factor = 4.0
max_iters = 100
eval_interval = 25
warmup_iters = 10
learning_rate = 1e-3
muon_learning_rate = 5e-3
min_lr = 0.0
