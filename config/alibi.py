# A penalty on the score that grows linearly with distance, each head with its own slope. Nothing to train.
# Press 2022.
position = 'alibi'
