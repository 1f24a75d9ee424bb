"""Doors to the programs of `jaxformer.programs`, which the command `jaxformer` runs; and what made the results here."""

import jaxformer  # noqa: F401  # first, because it turns an environment that JAX refuses into a line
