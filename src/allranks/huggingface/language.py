"""Tasks whose model predicts tokens."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from allranks.errors import RequestError
from allranks.huggingface.packing import check_keeps_texts_apart, packed
from allranks.huggingface.task import IGNORED, VALIDATION, HuggingFaceTask, Row, Sample


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
class WritingTask(TokenTask):
    """A task whose model writes `max_new_tokens` tokens, each the most likely, in an evaluation."""

    max_new_tokens: int = 0

    def score(self, texts: list[str], wanted: list[str]) -> dict[str, tuple[Any, Any]]:
        """Metrics of the texts of a batch, as those of `metrics`; `wanted` are the labels."""
        same = sum(text == other for text, other in zip(texts, wanted, strict=True))
        return {"exact_match": (same, len(texts))}

    def metrics(self, output: Any, batch: dict[str, Tensor]) -> dict[str, tuple[Any, Any]]:
        metrics = super().metrics(output, batch)
        if self.max_new_tokens > 0:
            metrics |= self.score(self._texts(output["generated"]), self._texts(batch["labels"]))
        return metrics

    def eval_output(self, output: Any, batch: Any, forward: Callable[[Any], Any]) -> Any:
        if self.max_new_tokens <= 0:
            return output
        tokens, batch = list[Tensor](), {**self._begun(batch), "use_cache": True}
        for _ in range(self.max_new_tokens):  # on every rank alike, wherever its texts end
            passed = forward(batch)
            tokens.append(passed["logits"][:, -1:].argmax(dim=2))
            batch["cache"] = passed["cache"]
            if "decoder_input_ids" in batch:
                batch["decoder_input_ids"] = tokens[-1]
                batch["encoder_outputs"] = (passed["encoder_last_hidden_state"],)
            else:
                batch["input_ids"] = tokens[-1]
                batch["attention_mask"] = F.pad(batch["attention_mask"], (0, 1), value=1)
                batch["position_ids"] = batch["position_ids"][:, -1:] + 1
        output["generated"] = torch.cat(tokens, dim=1)
        return output

    def stages(self, model: nn.Module, count: int) -> Sequence[nn.Module]:
        if self.max_new_tokens > 0:
            raise RequestError(
                asked=f"max_new_tokens={self.max_new_tokens} in a pipeline",
                found="stages, which send each other the output of one layer",
                why="each stage would have to keep keys and values of the tokens before",
                do="--set max_new_tokens=0, or --strategy fsdp or tensor",
            )
        return super().stages(model, count)

    def _begun(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """What goes into the model first; of a decoder that is its start token."""
        return {**batch, "decoder_input_ids": batch["decoder_input_ids"][:, :1]}

    def _texts(self, tokens: Tensor) -> list[str]:
        end = getattr(self._config, "eos_token_id", None)
        ends = {self._tokenizer.eos_token_id, *(end if isinstance(end, list) else [end])}
        rows = (takewhile(lambda number: number not in ends, row) for row in tokens.tolist())
        texts = [[number for number in row if number != IGNORED] for row in rows]
        return [self._tokenizer.decode(text, skip_special_tokens=True) for text in texts]


@dataclass(kw_only=True)
class CausalLM(WritingTask):
    """A language model that predicts each next token of the column `text`: GPT-2, Llama, ….

    Texts longer than `max_length` tokens are cut. Override `encode` for labels of its own, such as
    -100 for the tokens of a prompt, after which `max_new_tokens` are written.

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
        if self.max_new_tokens > 0 and data and split == VALIDATION:
            self._check_prompts(data)
        return packed(data, self.packed, self.split_texts) if self.packed and data else data

    def _check_prompts(self, data: Any) -> None:
        most = getattr(self._config, "max_position_embeddings", None) or math.inf
        kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(self._config), None)
        problem = "packed, with several texts in a row" if self.packed else ""
        if kind is not None and "position_ids" not in inspect.signature(kind.forward).parameters:
            problem = f"a {kind.__name__}, which takes no position_ids"
        for row in range(0 if problem else len(data)):
            length = int((data[row]["labels"] == IGNORED).cumprod(dim=0).sum())
            if not 0 < length <= most - self.max_new_tokens:
                problem = f"a prompt of {length} tokens in row {row}, a model of {most} positions"
                break
        if problem:
            raise RequestError(
                asked=f"max_new_tokens={self.max_new_tokens}",
                found=problem,
                why="the model goes on, at the next positions, after tokens without a label",
                do="labels of -100 for a short prompt, in encode(row); or --set max_new_tokens=0",
            )

    def _begun(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """The prompts, padded on the left."""
        without = (batch["labels"] == IGNORED) & (batch["attention_mask"] == 1)
        lengths = without.cumprod(dim=1).sum(dim=1)
        places = torch.arange(-int(lengths.max()), 0, device=lengths.device) + lengths[:, None]
        mask, places = places >= 0, places.clamp(min=0)
        tokens = batch["input_ids"].gather(1, places).where(mask, self.padding("input_ids"))
        return {"input_ids": tokens, "attention_mask": mask.long(), "position_ids": places}


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
class Seq2Seq(WritingTask):
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
