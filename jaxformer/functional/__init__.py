"""Pure functions of arrays and numbers: attention, positions, layers, blocks, losses. They import jax and numpy alone."""
