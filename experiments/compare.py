"""`jaxformer compare` from a checkout: python -m experiments.compare --help"""

from jaxformer.__main__ import run

if __name__ == "__main__":
    run("compare")
