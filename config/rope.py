# Queries and keys are turned by an angle that grows with position, so that their product depends on the distance alone.
# Su 2021 (RoFormer).
position = 'rope'
rope_base = 1000.0        # chosen of six trials, on plays that the results do not use (RESULTS.md, 0)
cpu_rate = 2.0
