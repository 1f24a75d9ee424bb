"""`jaxformer plan` from a checkout: python -m experiments.plan --help"""

from jaxformer.__main__ import run

if __name__ == "__main__":
    run("plan")
