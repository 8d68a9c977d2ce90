"""Tasks whose model predicts tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from allranks.errors import RequestError
from allranks.huggingface.packing import check_keeps_texts_apart, packed
from allranks.huggingface.task import IGNORED, HuggingFaceTask, Row, Sample


@dataclass(kw_only=True)
class TokenTask(HuggingFaceTask):
    """A task whose loss is the cross entropy of tokens: those with a label of -100 do not count.

    The mean is over the tokens of the whole batch, on any number of ranks. An evaluation reports
    `accuracy` and `perplexity`.
    """

    shift: ClassVar[int] = 0
    """How many tokens a label lies behind the output that predicts it."""

    def loss(self, output: Any, batch: dict[str, Tensor]) -> Tensor:
        logits, labels = self._matched(output, batch)
        return F.cross_entropy(
            logits.transpose(1, 2), labels, reduction="none", ignore_index=IGNORED
        )

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["labels"][:, self.shift :] != IGNORED

    def metrics(self, output: Any, batch: dict[str, Tensor]) -> dict[str, tuple[Any, Any]]:
        logits, labels = self._matched(output, batch)
        counted = labels != IGNORED
        right = (logits.argmax(dim=2) == labels) & counted
        return {"accuracy": (right.sum(), counted.sum())}

    def finalize(self, metrics: dict[str, float]) -> dict[str, float]:
        loss = metrics.get("loss", math.nan)  # of no target there is none
        return {**metrics, "perplexity": math.exp(min(loss, 700.0))}

    def _matched(self, output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The logits, and the label of each."""
        logits = output["logits"]
        return logits[:, : logits.shape[1] - self.shift], batch["labels"][:, self.shift :]


@dataclass(kw_only=True)
class CausalLM(TokenTask):
    """A language model that predicts each next token of the column `text`: GPT-2, Llama, ….

    Texts longer than `max_length` tokens are cut. Override `encode` for labels of its own, such as
    -100 for the tokens of a prompt.

    With `packed` a sample is a block of up to so many tokens, of several texts that do not attend
    to each other; the loss is that of the same texts padded. Longer texts are refused, or with
    `split_texts` go on as texts of their own. Models that cannot keep texts apart are refused.
    """

    text: str = "text"
    packed: int = 0
    split_texts: bool = False

    auto = "AutoModelForCausalLM"
    columns = ("text",)
    shift = 1

    def encode(self, row: Row) -> Sample:
        cut = {} if self.packed else {"truncation": True, "max_length": self.max_length}
        tokens: Any = self._tokenizer(row[self.text], **cut)
        numbers = torch.tensor(tokens["input_ids"], dtype=torch.int64)
        return {"input_ids": numbers, "labels": numbers}

    def model(self) -> Any:
        model = super().model()
        if self.packed:
            check_keeps_texts_apart(model, self._config)
        return model

    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        batch = super().collate(samples)
        if self.packed:
            del batch["attention_mask"]  # positions say where a text begins; padding is texts, too
        return batch

    def padding(self, name: str) -> int:
        if self.packed and name == "input_ids":  # transformers warns of padding without a mask
            return int(self._config.pad_token_id == 0)
        return super().padding(name)

    def _whole_because(self) -> str:
        tried = "packed texts are tried with all of its layers" if self.packed else ""
        return super()._whole_because() or tried

    def _encoded(self, split: str) -> Any:
        data = super()._encoded(split)
        return packed(data, self.packed, self.split_texts) if self.packed and data else data


@dataclass(kw_only=True)
class MaskedLM(TokenTask):
    """A model that predicts masked tokens of the column `text`: BERT and its kin.

    `masked` of the tokens have a loss. Of those 80 % become the mask token, 10 % a random one, and
    10 % stay (Devlin et al. 2018, arXiv 1810.04805). Special tokens are never masked. The draws
    belong to the seed, the epoch and the sample.
    """

    text: str = "text"
    masked: float = 0.15

    auto = "AutoModelForMaskedLM"
    columns = ("text",)

    def encode(self, row: Row) -> Sample:
        encoding = self._tokenizer(
            row[self.text],
            truncation=True,
            max_length=self.max_length,
            return_special_tokens_mask=True,
        )
        tokens, special = torch.tensor(encoding["input_ids"]), encoding["special_tokens_mask"]
        chosen = (torch.rand(len(tokens)) < self.masked) & ~torch.tensor(special, dtype=torch.bool)
        fate = torch.rand(len(tokens))
        others = torch.randint(len(self._tokenizer), (len(tokens),))
        changed = torch.where(chosen & (fate < 0.8), self._mask_token, tokens)
        changed = torch.where(chosen & (fate >= 0.9), others, changed)
        return {"input_ids": changed, "labels": torch.where(chosen, tokens, IGNORED)}

    @property
    def _mask_token(self) -> int:
        number: int | None = self._tokenizer.mask_token_id
        if number is None:
            raise RequestError(
                asked="to mask tokens",
                found="a tokenizer without a mask token",
                why="80 % of the tokens that have a loss become it",
                do="set tokenizer.mask_token in tokenizer(self), or train a CausalLM",
            )
        return number


@dataclass(kw_only=True)
class Seq2Seq(TokenTask):
    """An encoder and a decoder, from the column `source` to the column `target`: T5, BART, …."""

    source: str = "source"
    target: str = "target"

    auto = "AutoModelForSeq2SeqLM"
    columns = ("source", "target")

    def encode(self, row: Row) -> Sample:
        limits: dict[str, Any] = {"truncation": True, "max_length": self.max_length}
        source = self._tokenizer(row[self.source], **limits)["input_ids"]
        target = self._tokenizer(text_target=row[self.target], **limits)["input_ids"]
        return {"input_ids": torch.tensor(source), "labels": torch.tensor(target)}

    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        batch = super().collate(samples)
        labels, config = batch["labels"], self._config
        start = torch.full_like(labels[:, :1], config.decoder_start_token_id)
        before = labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, config.pad_token_id)
        return {**batch, "decoder_input_ids": torch.cat([start, before], dim=1)}
