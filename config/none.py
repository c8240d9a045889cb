# No positions at all ("NoPE"): word order reaches the model only through the causal mask, which lets each token see what came before.
# Haviv 2022; Kazemnejad 2023.
position = 'none'
