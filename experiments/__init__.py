"""Command-line programs. JAX reads environment variables on import; an invalid one becomes a one-line error here."""

import sys

try:
    import jax  # noqa: F401
except ValueError as error:
    if "--debug" in sys.argv:
        raise
    print(f"error: environment: {' '.join(str(error).split())}; accepted: another value, or none", file=sys.stderr)
    raise SystemExit(2) from None
