"""`jaxformer export` from a checkout: python -m experiments.export --help"""

from jaxformer.__main__ import run

if __name__ == "__main__":
    run("export")
