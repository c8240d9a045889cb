# One trained vector per position, added to the token embedding. Simple, and it ends where the table ends.
# Gehring 2017; GPT-2.
position = 'learned'
