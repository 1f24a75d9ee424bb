"""The suites of `jaxformer benchmark`: what is timed beside what."""
