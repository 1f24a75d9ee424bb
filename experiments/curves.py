"""`jaxformer curves` from a checkout: python -m experiments.curves --help"""

from jaxformer.__main__ import run

if __name__ == "__main__":
    run("curves")
