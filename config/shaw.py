# A learned vector for each distance up to 64, multiplied with the query and added to the score, in every layer.
# Shaw 2018.
position = 'shaw'
shaw_max_distance = 64    # chosen of six trials, on plays that the results do not use (RESULTS.md, 0)
position_rate = 10.0
cpu_rate = 2.0
