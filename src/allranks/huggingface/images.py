"""A task whose model gives an image a label."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import transformers

from allranks.huggingface.labels import Classification
from allranks.huggingface.task import Row, Sample


@dataclass(kw_only=True)
class ImageClassification(Classification):
    """An image of the column `image` gets a label: ViT, ResNet, …. The processor scales it."""

    image: str = "image"

    auto = "AutoModelForImageClassification"
    columns = ("image", "label")

    def tokenizer(self) -> Any:
        return transformers.AutoImageProcessor.from_pretrained(self._named("the image processor"))

    def encode(self, row: Row) -> Sample:
        pixels = self._tokenizer(row[self.image], return_tensors="pt")["pixel_values"][0]
        return {"pixel_values": pixels, "labels": self._label(row)}
