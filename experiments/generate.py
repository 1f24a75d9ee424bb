"""`jaxformer generate` from a checkout: python -m experiments.generate --help"""

from jaxformer.__main__ import run

if __name__ == "__main__":
    run("generate")
