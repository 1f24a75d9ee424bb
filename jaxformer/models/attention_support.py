"""Which models the platforms' own attention kernels can run, and where; checked before anything compiles."""

from dataclasses import replace

from jax.sharding import Mesh

from jaxformer import masks
from jaxformer.config import Execution, ModelConfig
from jaxformer.errors import ConfigError
from jaxformer.functional.attention import ANY, KERNELS, unavailable
from jaxformer.functional.position_encodings import encoding_of


def check_available(execution: Execution) -> None:
    """Refuses an attention kernel of a platform that this process does not run on.

    Raises:
      ConfigError: there is no such device.

    >>> check_available(Execution(attention="cudnn"))
    Traceback (most recent call last):
    ...
    jaxformer.errors.ConfigError: config.execution.attention: cudnn needs an NVIDIA GPU of compute capability 8 or \
more, which is not here; accepted here: auto, xla, chunked
    """
    what = unavailable(execution.attention)
    if what is not None:
        raise ConfigError(
            f"config.execution.attention: {execution.attention} needs {what}, which is not here; accepted here: {ANY}"
        )


def fallback_to_auto(execution: Execution) -> Execution:
    """The same with "auto" in place of an attention kernel that is not available here; the result is the same.

    >>> fallback_to_auto(Execution(attention="cudnn")).attention
    'auto'
    """
    return execution if unavailable(execution.attention) is None else replace(execution, attention="auto")


def check_mesh(execution: Execution, mesh: Mesh) -> None:
    """Refuses a platform's attention kernel with context parallelism, which none of them supports.

    Raises:
      ConfigError: both are asked for.
    """
    if execution.attention in KERNELS and mesh.shape["context"] > 1:
        raise ConfigError(
            f"config.execution.attention: {execution.attention} cannot do rows cut by config.mesh.context "
            f"{mesh.shape['context']}; accepted there: {ANY}"
        )


def unsupported_by(name: str, cfg: ModelConfig) -> str | None:
    """Why a platform's attention kernel, "splash" or "cudnn", cannot train this model exactly; None: it can."""
    if not cfg.attention.has_implementations:
        return f"model.attention.kind={cfg.attention.kind}"
    bias = cfg.attention.has_bias or encoding_of(cfg).bias is not None
    soft_cap = cfg.attention.soft_cap is not None
    options = {"bias": bias, "dropout": cfg.attention.dropout > 0, "soft_cap": soft_cap}
    length, mask = cfg.context_length, masks.Mask(causal=cfg.causal)
    return KERNELS[name].module.unsupported(length, length, cfg.head_size, cfg.dtype, mask, **options)
