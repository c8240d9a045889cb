# A learned bias on the score for each head and bucket of distances: near ones one by one, far ones in logarithmic groups.
# Raffel 2020, section 2.1.
position = 't5'
t5_max_distance = 64      # chosen of six trials, on plays that the results do not use (RESULTS.md, 0)
position_rate = 10.0
cpu_rate = 2.0
