"""`jaxformer pretrain` from a checkout: python -m experiments.pretrain --help"""

from jaxformer.__main__ import run

if __name__ == "__main__":
    run("pretrain")
