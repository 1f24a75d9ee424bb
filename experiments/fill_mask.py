"""`jaxformer fill-mask` from a checkout: python -m experiments.fill_mask --help"""

from jaxformer.__main__ import run

if __name__ == "__main__":
    run("fill-mask")
