"""`jaxformer fit` from a checkout: python -m experiments.fit --help"""

from jaxformer.__main__ import run

if __name__ == "__main__":
    run("fit")
