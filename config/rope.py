# Queries and keys are turned by an angle that grows with position, so that their product depends on the distance alone.
# Su 2021 (RoFormer).
position = 'rope'
