# A learned vector for each distance up to 16, multiplied with the query and added to the score, in every layer.
# Shaw 2018.
position = 'shaw'
