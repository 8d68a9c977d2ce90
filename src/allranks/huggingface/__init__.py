"""Tasks for models of Hugging Face: a model name, a data set and its columns make a training.

Needs transformers: `pip install 'allranks[huggingface]'`. The classes are loaded when they are
first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from allranks.huggingface.labels import (
        ImageClassification,
        SequenceClassification,
        TokenClassification,
    )
    from allranks.huggingface.language import CausalLM, MaskedLM, Seq2Seq

MODULES = {
    "CausalLM": "allranks.huggingface.language",
    "ImageClassification": "allranks.huggingface.labels",
    "MaskedLM": "allranks.huggingface.language",
    "Seq2Seq": "allranks.huggingface.language",
    "SequenceClassification": "allranks.huggingface.labels",
    "TokenClassification": "allranks.huggingface.labels",
}

__all__ = [
    "CausalLM",
    "ImageClassification",
    "MaskedLM",
    "Seq2Seq",
    "SequenceClassification",
    "TokenClassification",
]


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(MODULES[name]), name)
