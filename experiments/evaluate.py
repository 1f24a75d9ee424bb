"""`jaxformer evaluate` from a checkout: python -m experiments.evaluate --help"""

from jaxformer.__main__ import run

if __name__ == "__main__":
    run("evaluate")
