"""Texts packed into blocks: several in one sample, which do not attend to each other.

Blocks are filled in the order of the texts: one that does not fit any more begins the next block.
So they depend on the data alone, and of a stream on its shard. Positions start anew with each text;
transformers' own masks keep texts apart by that, if there is no `attention_mask`. The first token
of a text is no target. Krell et al. 2021, arXiv 2107.02027, compare such packing with padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from allranks.errors import RequestError
from allranks.huggingface.stages import in_evaluation
from allranks.huggingface.task import IGNORED, EncodedRows, EncodedStream, Sample, StreamedSamples

ROUNDING, CROSSING = 1e-4, 1e-6
"""Of the largest logit: what passes of other shapes may differ by, and of the same shape."""


@dataclass(frozen=True)
class Packing:
    """How texts are packed: blocks of `tokens`, for a model of `positions` (0: no limit).

    A text of more tokens is refused, or with `splits` becomes several texts.
    """

    tokens: int
    positions: int
    splits: bool

    @property
    def most(self) -> int:
        """The tokens that a text in a block may have."""
        return min(self.tokens, self.positions or self.tokens)

    def check(self, length: int, place: str) -> None:
        """Raise `RequestError` for a text that does not fit into a block and may not be split."""
        if length <= self.most or self.splits:
            return
        fits = not self.positions or length <= self.positions
        larger = f"--set packed={length}, or " if fits else ""
        raise RequestError(
            asked=f"{place}, {length} tokens, in a block of {self.tokens}",
            found=f"a text may have {self.most}",
            why="the blocks are packed=… tokens long, and the model may have fewer positions",
            do=f"{larger}--set split_texts=true: a text goes on as a text of its own",
        )

    def starts(self, length: int) -> range:
        """Where the pieces of a text begin."""
        return range(0, length, self.most)

    def pieces(self, sample: Sample, place: str) -> list[Sample]:
        """A text as one sample for each piece; none for a text without tokens."""
        length = len(sample["input_ids"])
        self.check(length, place)
        ends = [(at, at + self.most) for at in self.starts(length)]
        return [{name: part[at:end] for name, part in sample.items()} for at, end in ends]


def joined(pieces: Sequence[Sample]) -> Sample:
    """Texts one after the other, as one sample with `position_ids` that start anew with each."""
    block = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
    places = [torch.arange(len(piece["input_ids"])) for piece in pieces]
    block["position_ids"] = torch.cat(places)
    block["labels"] = block["labels"].masked_fill(block["position_ids"] == 0, IGNORED)
    return block


class PackedRows:
    """Blocks of texts, which are encoded once to count tokens, and again when they are read."""

    def __init__(self, encoded: EncodedRows, packing: Packing) -> None:
        self._encoded, self._packing = encoded, packing
        rows, encode = encoded.rows, encoded.task.encode
        lengths = [len(encode(rows[row])["input_ids"]) for row in range(len(rows))]
        longest = max(range(len(lengths)), key=lengths.__getitem__, default=None)
        if longest is not None:
            packing.check(lengths[longest], f"row {longest}, the longest")
        firsts, used = list[tuple[int, int]](), packing.tokens
        for row, length in enumerate(lengths):
            for number, start in enumerate(packing.starts(length)):
                size = min(packing.most, length - start)
                if used + size > packing.tokens:
                    firsts.append((row, number))
                    used = 0
                used += size
        self._firsts = np.array([*firsts, (len(encoded), 0)], np.int64)

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def __getitem__(self, index: int) -> Sample:
        (row, first), (end, stop) = (self._firsts[int(index) + ahead].tolist() for ahead in (0, 1))
        rows, encode = self._encoded.rows, self._encoded.task.encode
        pieces: list[Sample] = []
        for number in range(row, end + (stop > 0)):
            of_row = self._packing.pieces(encode(rows[number]), f"row {number}")
            pieces += of_row[first * (number == row) : stop if number == end else None]
        return joined(pieces)


class PackedStream(EncodedStream):
    """Blocks of the texts of a stream: each shard packs its own."""

    def __init__(self, encoded: EncodedStream, packing: Packing) -> None:
        super().__init__(encoded.task, encoded.stream)
        self._packing = packing

    def open(self, shard: int, epoch: int, seed: int, skip: int) -> Iterator[Sample]:
        rows = self.stream.open(shard, epoch, seed, 0)
        blocks = PackedSamples(self.task, rows, self._packing)
        for _ in islice(blocks, skip):
            pass
        return blocks


class PackedSamples(StreamedSamples):
    """The blocks of the rows of a shard; their state also has the texts that were read too far."""

    def __init__(self, task: Any, rows: Any, packing: Packing) -> None:
        super().__init__(task, rows)
        self._packing, self._waiting = packing, list[Sample]()

    def __next__(self) -> Sample:
        block, used = list[Sample](), 0
        while True:
            while not self._waiting:
                row = next(self.rows, None)
                if row is None and not block:
                    raise StopIteration
                if row is None:
                    return joined(block)
                self._waiting = self._packing.pieces(self.task.encode(row), "a row")
            used += len(self._waiting[0]["input_ids"])
            if used > self._packing.tokens:
                return joined(block)
            block.append(self._waiting.pop(0))

    def state_dict(self) -> Any:
        waiting = [{name: part.tolist() for name, part in s.items()} for s in self._waiting]
        rows = super().state_dict()
        return rows and {"rows": rows, "waiting": waiting}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state["rows"])
        waiting = state["waiting"]
        self._waiting = [{n: torch.tensor(part) for n, part in s.items()} for s in waiting]


def packed(data: Any, tokens: int, splits: bool) -> PackedRows | PackedStream:
    """The blocks of encoded texts."""
    if tokens < 2:
        raise RequestError(
            asked=f"blocks of packed={tokens}",
            found="a block that has no target",
            why="the first token of a text is predicted from nothing",
            do="--set packed=1024, or another length of at least 2; 0 packs nothing",
        )
    positions = getattr(data.task._config, "max_position_embeddings", None) or 0
    packing = Packing(tokens, positions, splits)
    return (PackedStream if isinstance(data, EncodedStream) else PackedRows)(data, packing)


def check_keeps_texts_apart(model: Any, config: Any) -> None:
    """Raise `RequestError` for a model in whose blocks a text changes the outputs of another.

    Compares the outputs for two texts in a block with those for each alone, and those of the
    second one where the first one has other tokens.
    """
    tokens = [n for n in range(12) if n != config.pad_token_id]  # the model warns of padding
    numbers = torch.tensor(tokens[:11]) % config.vocab_size
    first, other, second = numbers[:3], numbers[7:10], numbers[3:]
    blocks = [
        joined([{"input_ids": part, "labels": part} for part in (text, second)])
        for text in (first, other)
    ]
    problem = ""
    with in_evaluation(model), torch.no_grad():
        try:
            logits, changed = (
                model(**{name: block[name][None] for name in ("input_ids", "position_ids")}).logits
                for block in blocks
            )
            alone = torch.cat([model(text[None]).logits for text in (first, second)], dim=1)
            most = float(alone.abs().max())
            error = float((logits - alone).abs().max()) / most
            if not error <= ROUNDING:
                problem = f"outputs of a text in a block are others than alone, by {error:.2g}"
            error = float((logits - changed)[:, len(first) :].abs().max()) / most
            if not error <= CROSSING:
                problem = f"a text before it changes an output by {error:.2g}"
        except Exception as failure:  # it takes no positions, or is on the meta device
            problem = f"{type(failure).__name__}: {failure}"[:200]
    if problem:
        raise RequestError(
            asked=f"texts packed into blocks for a {type(model).__name__}",
            found=problem,
            why="texts of a block would be read as one text",
            do="leave packed out, so that texts are padded; or attn_implementation = 'sdpa' or "
            "'eager' in config(self), if the model has them",
        )
