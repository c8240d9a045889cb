# A learned bias on the score for each head and bucket of distances: near ones one by one, far ones in logarithmic groups.
# Raffel 2020, section 2.1.
position = 't5'
