"""Programs. JAX reads the environment while it is imported, before a program can say anything: what it cannot read
there is one line as well."""

import sys

try:
    import jax  # noqa: F401
except ValueError as error:
    if "--debug" in sys.argv:
        raise
    print(f"error: environment: {' '.join(str(error).split())}; accepted: another value, or none", file=sys.stderr)
    raise SystemExit(2) from None
