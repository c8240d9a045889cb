# Waves of many lengths, read at the position and added to the token embedding. Nothing to train, and no end.
# Vaswani 2017, section 3.5.
position = 'sinusoidal'
sinusoidal_scale = 0.1    # chosen of six trials, on plays that the results do not use (RESULTS.md, 0)
