"""`jaxformer benchmark` from a checkout: python -m experiments.benchmark --help"""

from jaxformer.__main__ import run

if __name__ == "__main__":
    run("benchmark")
