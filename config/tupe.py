# Positions get queries and keys of their own, apart from the words; the two scores are added.
# Ke 2021.
position = 'tupe'
