"""Which models the platforms' own kernels can run, and where; checked before anything compiles."""

from dataclasses import replace

from jax.sharding import Mesh

from jaxformer import masks
from jaxformer.config import Execution, ModelConfig, stacks_of
from jaxformer.errors import ConfigError
from jaxformer.functional import grouped_choice
from jaxformer.functional.attention_choice import ANY, KERNELS, takes_distances, unavailable, with_window
from jaxformer.functional.position_encodings import encoding_of, is_of_distance
from jaxformer.patterns import GlobalPositions

# Field of `Execution` -> (the platform that an implementation needs and that is not here, those that run everywhere).
CHOICES = {"attention": (unavailable, ANY), "experts": (grouped_choice.unavailable, grouped_choice.ANY)}


def check_available(execution: Execution, platform: str | None = None, where: str = "here") -> None:
    """Refuses a kernel of a platform that `where` is not, by default this process.

    Raises:
      ConfigError: there is no such device.

    >>> check_available(Execution(attention="cudnn"))
    Traceback (most recent call last):
    ...
    jaxformer.errors.ConfigError: config.execution.attention: cudnn needs an NVIDIA GPU of compute capability 8 or \
more, which is not here; accepted here: auto, xla, chunked
    """
    for name, (needed, everywhere) in CHOICES.items():
        what = needed(getattr(execution, name), platform)
        if what is not None:
            accepted = "accepted here" if where == "here" else "accepted there"
            raise ConfigError(
                f"config.execution.{name}: {getattr(execution, name)} needs {what}, which is not {where}; {accepted}: "
                f"{everywhere}"
            )


def fallback_to_auto(execution: Execution) -> Execution:
    """The same with "auto" in place of a kernel that is not available here; the result is the same.

    >>> fallback_to_auto(Execution(attention="cudnn")).attention
    'auto'
    """
    absent = [name for name, (needed, _) in CHOICES.items() if needed(getattr(execution, name)) is not None]
    return replace(execution, **dict.fromkeys(absent, "auto")) if absent else execution


def check_mesh(execution: Execution, mesh: Mesh) -> None:
    """Refuses a platform's attention kernel with context parallelism, if it has no ring attention.

    Raises:
      ConfigError: both are asked for.
    """
    if execution.attention in KERNELS and not KERNELS[execution.attention].rings and mesh.shape["context"] > 1:
        raise ConfigError(
            f"config.execution.attention: {execution.attention} cannot do rows cut by config.mesh.context "
            f"{mesh.shape['context']}; accepted there: {ANY}"
        )


def mask_of(cfg: ModelConfig, of: masks.Mask, length: int, causal: bool) -> masks.Mask:
    """`of` with a model's causality and patterns."""
    first, last = cfg.fitted_attention.global_ends(causal)
    ends = (GlobalPositions(first, length - last),) if first or last else ()
    return with_window(replace(of, causal=causal, patterns=(*cfg.fitted_attention.patterns(length, causal), *ends)))


def unsupported_by(name: str, cfg: ModelConfig, parts: int = 1) -> str | None:
    """Why a platform's attention kernel, "splash" say, cannot train this model exactly with each row in so many parts;
    None: it can."""
    if not cfg.attention.has_implementations:
        return f"model.attention.kind={cfg.attention.kind}"
    soft_cap = cfg.attention.soft_cap is not None
    options = {"dropout": cfg.attention.dropout > 0, "soft_cap": soft_cap}
    calls = [(stack.context_length, stack.context_length, stack.causal) for stack in stacks_of(cfg)]
    if "cross" in cfg.layer:
        calls.append((cfg.context_length, stacks_of(cfg)[0].context_length, False))
    for queries, keys, causal in calls:
        mask = mask_of(cfg, masks.Mask(parts=parts), queries, causal)
        of_positions = encoding_of(cfg).biases and not (is_of_distance(cfg) and takes_distances(name, mask))
        bias = cfg.attention.has_bias or of_positions
        why = KERNELS[name].module.unsupported(queries, keys, cfg.head_size, cfg.dtype, mask, bias=bias, **options)
        if why is not None:
            return why
    return None
