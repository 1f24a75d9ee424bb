"""Pure functions of arrays and numbers: attention, positions, layers, blocks, losses; jax and numpy alone."""
