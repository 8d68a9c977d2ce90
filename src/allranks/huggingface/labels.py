"""Tasks whose model gives a text, each of its words, or an image a label."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from allranks.errors import RequestError
from allranks.huggingface.language import TokenTask
from allranks.huggingface.task import IGNORED, HuggingFaceTask, Row, Sample


@dataclass(kw_only=True)
class Classification(HuggingFaceTask):
    """A task with one label for each sample, in the column `label`; `labels` is how many there are.

    The loss is the cross entropy. An evaluation reports `accuracy` and `f1`: that of class 1 if
    there are two, else the mean over the classes that occur.
    """

    labels: int = 2
    label: str = "label"

    def config(self) -> Any:
        config = super().config()
        config.num_labels = self.labels
        return config

    def _label(self, row: Row) -> Tensor:
        """The label of a row, a class of the model."""
        value, count = row[self.label], self._config.num_labels
        if not (isinstance(value, int | np.integer) and 0 <= value < count):
            raise RequestError(
                asked=f"the label of a row, in column {self.label!r}",
                found=repr(value)[:80],
                why=f"the model has {count} classes, 0 to {count - 1}",
                do="--set labels=COUNT, or num_labels in config(); make numbers of names in rows()",
            )
        return torch.tensor(value)

    def loss(self, output: Any, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(output["logits"], batch["labels"], reduction="none")

    def metrics(self, output: Any, batch: dict[str, Tensor]) -> dict[str, tuple[Any, Any]]:
        predicted, true = output["logits"].argmax(dim=1), batch["labels"]
        count = output["logits"].shape[1]
        scores: dict[str, tuple[Any, Any]] = {"accuracy": ((predicted == true).sum(), len(true))}
        for label in (1,) if count == 2 else range(count):
            both = ((predicted == label) & (true == label)).sum()
            either = (predicted == label).sum() + (true == label).sum()
            scores[f"f1 of {label}"] = (2 * both, either)
        return scores

    def finalize(self, metrics: dict[str, float]) -> dict[str, float]:
        """With the `f1` of all classes in the place of one for each."""
        of_classes = [value for name, value in metrics.items() if name.startswith("f1 of ")]
        of_classes = [value for value in of_classes if value == value]  # nan: it never occurs
        others = {name: value for name, value in metrics.items() if not name.startswith("f1 of ")}
        return {**others, "f1": sum(of_classes) / len(of_classes) if of_classes else 0.0}


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


@dataclass(kw_only=True)
class SequenceClassification(Classification):
    """A text of the column `text`, or a pair with that of the column `pair`, gets a label."""

    text: str = "text"
    pair: str = ""

    auto = "AutoModelForSequenceClassification"
    columns = ("text", "pair", "label")

    def encode(self, row: Row) -> Sample:
        texts = [row[column] for column in (self.text, self.pair) if column]
        encoding = self._tokenizer(*texts, truncation=True, max_length=self.max_length)
        names = [name for name in ("input_ids", "token_type_ids") if name in encoding]
        sample = {name: torch.tensor(encoding[name]) for name in names}
        return {**sample, "labels": self._label(row)}

    def model(self) -> Any:
        if self._config.pad_token_id is None and not self._config.is_encoder_decoder:
            self._config.pad_token_id = self._tokenizer.pad_token_id
        if self._config.pad_token_id is None:
            raise RequestError(
                asked=f"to pad texts for a {self._config.model_type}",
                found="a tokenizer without a pad token",
                why="the model finds the end of a text by it",
                do="set tokenizer.pad_token in tokenizer(self), such as tokenizer.eos_token",
            )
        return super().model()


@dataclass(kw_only=True)
class TokenClassification(TokenTask):
    """Each word of the column `words` gets a label of the column `tags`; `labels` are their names.

    A word's first token has its label, others have none. With names such as `B-PER` and `I-PER` an
    evaluation reports the `f1` of entities: an entity counts if its type and all of its words are
    right.
    """

    words: str = "tokens"
    tags: str = "ner_tags"
    labels: tuple[str, ...] = ()

    auto = "AutoModelForTokenClassification"
    columns = ("words", "tags")

    def config(self) -> Any:
        config = super().config()
        if self.labels:
            config.id2label = dict(enumerate(self.labels))
            config.label2id = {name: number for number, name in enumerate(self.labels)}
        return config

    def encode(self, row: Row) -> Sample:
        limits: dict[str, Any] = {"truncation": True, "max_length": self.max_length}
        encoding = self._tokenizer(list(row[self.words]), is_split_into_words=True, **limits)
        owners, tags = encoding.word_ids(), row[self.tags]
        labels = [
            IGNORED if word is None or word == before else tags[word]
            for before, word in zip([None, *owners], owners, strict=False)
        ]
        return {"input_ids": torch.tensor(encoding["input_ids"]), "labels": torch.tensor(labels)}

    def metrics(self, output: Any, batch: dict[str, Tensor]) -> dict[str, tuple[Any, Any]]:
        names = {number: str(name) for number, name in self._config.id2label.items()}
        scores = super().metrics(output, batch)
        if not any(name.startswith("B-") for name in names.values()):
            return scores
        right = total = 0
        for predicted, true in zip(output["logits"].argmax(dim=2), batch["labels"], strict=True):
            counted = true != IGNORED
            of_guess = set(entities([names[i] for i in predicted[counted].tolist()]))
            of_truth = set(entities([names[i] for i in true[counted].tolist()]))
            right += 2 * len(of_guess & of_truth)
            total += len(of_guess) + len(of_truth)
        return {**scores, "f1": (right, total)}


def entities(names: list[str]) -> Iterator[tuple[str, int, int]]:
    """Type, first and end of each entity: `B-X` begins one, and `I-X` goes on or begins one."""
    kind, first = "", 0
    for place, name in enumerate([*names, "O"]):
        mark, _, new = name.partition("-")
        if kind and (mark != "I" or new != kind):
            yield kind, first, place
            kind = ""
        if not kind and new:
            kind, first = new, place
