# Sentences with questions that only word order can answer: settings with which the schemes learn to, in a minute or two on a CPU.
#     python train.py config/word_order.py config/rope.py --out_dir=out/word_order/rope
dataset = 'word_order'
n_layer = 2
n_head = 4
n_embd = 64
block_size = 32         # two or three sentences
batch_size = 32
learning_rate = 2e-2    # high: with 3e-3 a RoPE model of the default size stayed at the bag-of-words bound
max_iters = 2000
eval_interval = 200
