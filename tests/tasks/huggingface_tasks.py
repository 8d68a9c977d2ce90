"""Tiny models of transformers, made from configurations, on made-up texts."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import peft
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

from allranks.huggingface import (
    CausalLM,
    ImageClassification,
    MaskedLM,
    Seq2Seq,
    SequenceClassification,
    TokenClassification,
)

WORDS = [f"w{i}" for i in range(40)]
SPECIAL = {"unk_token": "[UNK]", "pad_token": "[PAD]", "mask_token": "[MASK]", "eos_token": "[EOS]"}


def tokenizer() -> Any:
    """Each word is a token."""
    words = [*SPECIAL.values(), *WORDS]
    level = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    made = Tokenizer(level)
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **SPECIAL)


def texts(split: str) -> list[dict[str, Any]]:
    """Texts of 3 to 12 words, each with a label, tags, and another text that follows from it."""
    random = torch.Generator().manual_seed(len(split))
    rows = []
    for _ in range(48 if split == "train" else 12):
        length = int(torch.randint(3, 13, (), generator=random))
        first, step = torch.randint(1, 39, (2,), generator=random).tolist()
        numbers = [(first + step * i) % 40 for i in range(length)]
        words = [WORDS[i] for i in numbers]
        rows.append(
            {
                "text": " ".join(words),
                "other": " ".join(reversed(words[1:])),
                "label": first % 3,
                "tokens": words,
                "ner_tags": [(i % 5) if i % 5 < 3 else 0 for i in numbers],
                "image": torch.randn(3, 8, 8, generator=random),
            }
        )
    return rows


SIZES = {"vocab_size": 44, "pad_token_id": 1, "eos_token_id": 3, "bos_token_id": 3}


@dataclass(kw_only=True)
class OfTexts:
    batch_size: int = 12
    lr: float = 3e-3
    kind: str = ""
    more: str = ""

    def tokenizer(self) -> Any:
        return tokenizer()

    def rows(self, split: str) -> Any:
        return texts(split)


SMALL = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@dataclass(kw_only=True)
class GPT2(OfTexts, CausalLM):
    dropout: float = 0.0
    tied: bool = True
    positions: int = 16

    def config(self) -> Any:
        p = self.dropout
        return transformers.GPT2Config(
            n_embd=16,
            n_layer=3,
            n_head=4,
            n_positions=self.positions,
            resid_pdrop=p,
            embd_pdrop=p,
            attn_pdrop=p,
            tie_word_embeddings=self.tied,
            **SIZES,
        )


@dataclass(kw_only=True)
class LoRA(GPT2):
    """Of its weights only the adapters are trained; no two are equal at the start."""

    def model(self) -> Any:
        kind = peft.LoraConfig(
            r=4, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False
        )
        return peft.get_peft_model(super().model(), kind)


@dataclass(kw_only=True)
class TwoAdapters(GPT2):
    """Both are trained at once, on different layers."""

    def model(self) -> Any:
        kind = {"r": 4, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
        first = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, **kind)
        second = peft.LoraConfig(target_modules=["c_fc"], fan_in_fan_out=True, **kind)
        model = peft.get_peft_model(super().model(), first)
        model.add_adapter("second", second)
        model.base_model.set_adapter(["default", "second"])
        return model


@dataclass(kw_only=True)
class OwnHead(GPT2):
    """Adapters, and a head that is trained whole; the frozen one is tied to the embeddings."""

    def model(self) -> Any:
        kind = peft.LoraConfig(
            r=4,
            target_modules=["c_attn"],
            fan_in_fan_out=True,
            init_lora_weights=False,
            modules_to_save=["lm_head"],
        )
        return peft.get_peft_model(super().model(), kind)


class EightBits(nn.Module):
    """A frozen layer as quantised models have it: weights of 8 bits, and a scale."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.register_buffer("scale", layer.weight.detach().abs().max() / 127)
        numbers = (layer.weight.detach() / self.scale).round().to(torch.int8)
        self.weight = nn.Parameter(numbers, requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ (self.weight.to(rows.dtype) * self.scale)


@dataclass(kw_only=True)
class EightBitBase(LoRA):
    def model(self) -> Any:
        model = super().model()
        for layer in model.base_model.model.transformer.h:
            layer.mlp.c_fc = EightBits(layer.mlp.c_fc)
        return model


@dataclass(kw_only=True)
class OtherAdapters(GPT2):
    """Adapters that do not fit: of layers that are not there, or of the folder `adapters`."""

    adapters: str = ""

    def model(self) -> Any:
        base = super().model()
        if self.adapters:
            return peft.PeftModel.from_pretrained(base, self.adapters, is_trainable=True)
        return peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"]))


@dataclass(kw_only=True)
class Grouped(OfTexts):
    """Each head of keys and values serves two heads of queries, of 4 features."""

    groups: int = 2

    def heads(self) -> dict[str, int]:
        heads = {"num_attention_heads": 2 * self.groups, "num_key_value_heads": self.groups}
        return {**SMALL, **heads, "hidden_size": 8 * self.groups, "head_dim": 4}


@dataclass(kw_only=True)
class Llama(Grouped, CausalLM):
    dropout: float = 0.0

    def config(self) -> Any:
        return transformers.LlamaConfig(
            attention_dropout=self.dropout,
            intermediate_size=32,
            max_position_embeddings=16,
            **self.heads(),
            **SIZES,
        )


@dataclass(kw_only=True)
class LayersAlone(Llama):
    """The plan of the model is not read."""

    def tensor_plan(self, model: Any) -> None:
        return None


@dataclass(kw_only=True)
class Qwen3(Grouped, CausalLM):
    """Its layers see all tokens before, the last 4, and all, in turns."""

    def config(self) -> Any:
        return transformers.Qwen3Config(
            intermediate_size=32,
            max_position_embeddings=16,
            sliding_window=4,
            use_sliding_window=True,
            max_window_layers=0,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            **self.heads(),
            **SIZES,
        )


@dataclass(kw_only=True)
class Gemma3n(Grouped, CausalLM):
    """The gates of its first layer are cut off at a mean and deviation over all features."""

    def config(self) -> Any:
        return transformers.Gemma3nTextConfig(
            intermediate_size=32,
            activation_sparsity_pattern=[0.5, 0.0, 0.0],
            layer_types=["full_attention"] * 3,
            num_kv_shared_layers=0,
            altup_num_inputs=2,
            laurel_rank=4,
            vocab_size_per_layer_input=44,
            hidden_size_per_layer_input=8,
            max_position_embeddings=16,
            **self.heads(),
            **SIZES,
        )


@dataclass(kw_only=True)
class Llama4(Grouped, CausalLM):
    """Its experts get the rows of all tokens, without a choice of the router."""

    def config(self) -> Any:
        return transformers.Llama4TextConfig(
            intermediate_size=32,
            intermediate_size_mlp=32,
            num_local_experts=4,
            max_position_embeddings=16,
            **self.heads(),
            **SIZES,
        )


@dataclass(kw_only=True)
class Mixtral(Grouped, CausalLM):
    def config(self) -> Any:
        return transformers.MixtralConfig(
            intermediate_size=32,
            num_local_experts=4,
            max_position_embeddings=16,
            experts_implementation="eager",
            **self.heads(),
            **SIZES,
        )


@dataclass(kw_only=True)
class Qwen3Moe(Grouped, CausalLM):
    """Its second layer has no experts."""

    def config(self) -> Any:
        return transformers.Qwen3MoeConfig(
            intermediate_size=32,
            moe_intermediate_size=8,
            num_experts=6,
            num_experts_per_tok=3,
            mlp_only_layers=[1],
            max_position_embeddings=16,
            experts_implementation="eager",
            **self.heads(),
            **SIZES,
        )


@dataclass(kw_only=True)
class Bert(OfTexts, MaskedLM):
    def config(self) -> Any:
        return transformers.BertConfig(
            intermediate_size=32, max_position_embeddings=16, **NO_DROPOUT, **SMALL, **SIZES
        )


@dataclass(kw_only=True)
class SameMasks(Bert):
    """The masks follow from the text alone, for a loop by hand that cannot key its draws."""

    def encode(self, row: Any) -> Any:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(len(row["text"]))
            return super().encode(row)


@dataclass(kw_only=True)
class BertLabels(OfTexts, SequenceClassification):
    labels: int = 3
    pair: str = "other"

    def config(self) -> Any:
        return transformers.BertConfig(
            intermediate_size=32,
            max_position_embeddings=32,
            num_labels=self.labels,
            **NO_DROPOUT,
            **SMALL,
            **SIZES,
        )


@dataclass(kw_only=True)
class BertTags(OfTexts, TokenClassification):
    def config(self) -> Any:
        return transformers.BertConfig(
            intermediate_size=32,
            max_position_embeddings=16,
            **NO_DROPOUT,
            id2label={0: "O", 1: "B-X", 2: "I-X"},
            label2id={"O": 0, "B-X": 1, "I-X": 2},
            **SMALL,
            **SIZES,
        )


@dataclass(kw_only=True)
class T5(OfTexts, Seq2Seq):
    source: str = "text"
    target: str = "other"

    def config(self) -> Any:
        return transformers.T5Config(
            d_model=16,
            d_kv=4,
            d_ff=32,
            num_layers=3,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=1,
            **SIZES,
        )


@dataclass(kw_only=True)
class ViT(OfTexts, ImageClassification):
    labels: int = 3

    def config(self) -> Any:
        return transformers.ViTConfig(
            image_size=8,
            patch_size=4,
            intermediate_size=32,
            num_labels=self.labels,
            **NO_DROPOUT,
            **SMALL,
        )

    def encode(self, row: Any) -> Any:
        return {"pixel_values": row["image"], "labels": self._label(row)}


def write_numbers(folder: Path, files: int, rows: int) -> None:
    """Files of texts, each of which says its number in five words."""
    for part in range(files):
        numbers = range(part * rows, (part + 1) * rows)
        texts = (" ".join(WORDS[int(digit)] for digit in f"{n:05}") for n in numbers)
        lines = "\n".join(
            json.dumps({"text": text, "number": n}) for n, text in zip(numbers, texts, strict=True)
        )
        Path(folder, f"{part}.jsonl").write_text(lines)


def streamed(folder: str) -> Any:
    """The files of a folder, row by row."""
    names = sorted(map(str, Path(folder).glob("*.jsonl")))
    cache = str(Path(folder, "cache"))
    return datasets.load_dataset(
        "json", data_files=names, split="train", streaming=True, cache_dir=cache
    )


@dataclass(kw_only=True)
class Streamed(GPT2):
    """It writes the number of each text that it reads."""

    folder: str = ""
    batch_size: int = 400

    def rows(self, split: str) -> Any:
        return streamed(self.folder) if split == "train" else None

    def schedule(self, step: int, total: int) -> float:  # type: ignore[override]
        return 1.0  # the same for a part of the steps

    def encode(self, row: Any) -> Any:
        with open(Path(self.folder, f"read-{os.getpid()}"), "a") as file:
            file.write(f"{row['number']}\n")
        return super().encode(row)


def save(model: str, data: str) -> None:
    """Save a tiny GPT-2 with its tokenizer, and its texts, in two folders."""
    GPT2().model().save_pretrained(model)
    tokenizer().save_pretrained(model)
    for split in ("train", "validation"):
        path = Path(data, f"{split}.jsonl")
        path.parent.mkdir(exist_ok=True)
        rows = [json.dumps({"text": row["text"]}) for row in texts(split)]
        path.write_text("\n".join(rows))


@dataclass(kw_only=True)
class Writing(OfTexts):
    """Its 10 rows are evaluated; of a causal model the first 1 to 4 words are the prompt."""

    max_new_tokens: int = 5

    def rows(self, split: str) -> Any:
        return super().rows(split)[:10] if split == "validation" else super().rows(split)

    def encode(self, row: Any) -> Any:
        sample: Any = super().encode(row)  # type: ignore[misc]
        labels = sample["labels"].clone()
        if isinstance(self, CausalLM):
            labels[: min(1 + int(labels[0]) % 4, len(labels) - 1)] = -100
        return {**sample, "labels": labels}

    def score(self, texts: list[str], wanted: list[str]) -> dict[str, tuple[Any, Any]]:
        """How far the words are from those wanted."""
        numbers = [[int(word[1:]) for word in text.split()] for text in (*texts, *wanted)]
        places = [sum(at * number for at, number in enumerate(text, 1)) for text in numbers]
        count = len(texts)
        distances = [abs(a - b) for a, b in zip(places[:count], places[count:], strict=True)]
        return {"distance": (sum(distances), count)}


@dataclass(kw_only=True)
class WritingGPT2(Writing, GPT2):
    pass


@dataclass(kw_only=True)
class WritingLlama(Writing, Llama):
    pass


@dataclass(kw_only=True)
class WritingQwen3(Writing, Qwen3):
    pass


@dataclass(kw_only=True)
class WritingT5(Writing, T5):
    pass
