# YaRN: a trained RoPE run (out/rope) learns to read 4 times its length, in a few percent of its steps. Fast waves are kept, slow ones
# divided, those in between blended, and the scores made a little warmer. Peng 2023.
init_from = 'out/rope'
position = 'rope'
rope_scaling = 'yarn'
rope_factor = 4.0
max_iters = 100
eval_interval = 25
warmup_iters = 10
learning_rate = 1e-3
muon_learning_rate = 5e-3
min_lr = 0.0
