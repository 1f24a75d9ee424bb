"""`jaxformer scaling` from a checkout: python -m experiments.scaling --help"""

from jaxformer.__main__ import run

if __name__ == "__main__":
    run("scaling")
