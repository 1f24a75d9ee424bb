"""Weights of the library transformers as ours, and ours as theirs."""

from jaxformer.interchange.exporting import export_model
from jaxformer.interchange.importing import Imported, import_model

__all__ = ["Imported", "export_model", "import_model"]
