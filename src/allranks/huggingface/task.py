"""What the tasks of Hugging Face share: the model, its tokenizer, and the rows of a data set."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, wraps
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import transformers
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging

from allranks.catalog import load
from allranks.errors import RequestError
from allranks.huggingface.experts import swap_experts
from allranks.huggingface.parts import read_in_parts, weights_in
from allranks.huggingface.plans import offer_blocks
from allranks.huggingface.stages import stages_of
from allranks.torch.data.streams import DataStream, is_data_stream
from allranks.torch.task import Task
from allranks.training import schedules

IGNORED = -100
"""The label of a token that has no loss, as in transformers."""

TRAIN, VALIDATION = "train", "validation"
PADDED = {"input_ids": 0, "attention_mask": 0, "token_type_ids": 0, "labels": IGNORED}
"""What the parts of a sample are padded with, if the tokenizer does not say."""

Row = Mapping[str, Any]
Sample = dict[str, Any]


@dataclass(kw_only=True)
class HuggingFaceTask(Task):
    """A model of transformers, trained on the rows of a data set.

    `name` is a model of the hub or a folder that `save_pretrained` wrote, and `from_scratch` takes
    its configuration alone. `dataset` and `subset` are what `datasets.load_dataset` reads, with
    `streaming` row by row during the training; `rows` may return any other data. Weights are
    trained in float32, whatever type the files have, unless `--precision` says otherwise. The
    learning rate rises for `warmup` steps and falls to 0 along a line.

    Samples are dicts from names of arguments to tensors. `encode` makes one of a row.
    """

    name: str = ""
    from_scratch: bool = False
    dataset: str = ""
    subset: str = ""
    streaming: bool = False
    max_length: int = 512
    lr: float = 5e-5
    weight_decay: float = 0.0
    warmup: int = 0

    auto: ClassVar[str]
    """The class of transformers that makes the model."""
    columns: ClassVar[tuple[str, ...]]
    """The fields that name a column of the data."""

    def __init_subclass__(cls, **values: Any) -> None:
        super().__init_subclass__(**values)
        if "model" in vars(cls):
            cls.model = _with_adapters(cls.model)  # type: ignore[assignment,method-assign]

    def config(self) -> Any:
        """The configuration of the model; of a task without `name`, write it."""
        name = self._named("the configuration")
        with read_from(f"the configuration of {name}", ValueError):
            return transformers.AutoConfig.from_pretrained(name)

    def tokenizer(self) -> Any:
        """The tokenizer of the model, or its image processor."""
        name = self._named("the tokenizer")
        with read_from(f"the tokenizer of {name}", ValueError):
            return transformers.AutoTokenizer.from_pretrained(name)

    def rows(self, split: str) -> Any:
        """The rows of `"train"` or `"validation"`: a sequence of mappings from columns to values.

        Or a `datasets.IterableDataset`; of `"validation"` every rank then reads all rows into
        memory. The default reads `dataset` and `subset`. `None`: there are no such rows.
        """
        if not self.dataset:
            raise RequestError(
                asked=f"the rows of {split!r} of {type(self).__name__}",
                found="no `dataset` is set, and the task has no rows(split)",
                why="a task of Hugging Face trains on the rows of a data set",
                do="--set dataset=NAME, or write rows(self, split)",
            )
        try:
            read = load("datasets:load_dataset")
        except ImportError as error:
            raise RequestError(
                asked="to read a data set of the hub",
                found=f"datasets is not installed: {error}",
                why="`dataset` is read by datasets.load_dataset",
                do="pip install 'allranks[huggingface]', or write rows(self, split)",
            ) from error
        with read_from(f"the data set {self.dataset}", ValueError):
            return read(self.dataset, self.subset or None, streaming=self.streaming).get(split)

    def encode(self, row: Row) -> Sample:
        """A sample: tensors without a batch dimension, by the names of the model's arguments.

        `labels` are what `loss` reads; the model does not get them.
        """
        raise NotImplementedError

    # --- what the engine calls -----------------------------------------------------------------

    def model(self) -> nn.Module:
        """The model in float32. Of a folder the engine reads each weight when the model is cut."""
        kind = getattr(transformers, self.auto)
        if self.from_scratch or not self.name:
            model: nn.Module = kind.from_config(self._config)
            return model
        folder = Path(self.name)
        weights = weights_in(folder) if folder.is_dir() else None
        if weights is not None and self.builds_on_meta and not (why := self._whole_because()):
            with without_progress_bars():
                read = read_in_parts(kind, folder, self._config, weights)
            model, self._weights, why = read.model, read.weights, read.why
        else:
            with without_progress_bars(), read_from(f"the weights of {self.name}"):
                model = kind.from_pretrained(self.name, config=self._config, dtype=torch.float32)
            why = self._whole_because()
        self.notes = [f"every rank reads all of {self.name}: {why}"] if why else []
        return model.train()  # from_pretrained puts it into evaluation mode

    def pretrained(self) -> Any:
        weights, self._weights = self._weights, None  # the engine alone keeps the files open
        return weights

    def optimizer(self, model: nn.Module) -> Optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=self.lr, weight_decay=self.weight_decay)

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        """The layers that transformers itself can compute again; of other models, the default."""
        layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        return layers or super().blocks(model)

    def tensor_plan(self, model: nn.Module) -> Mapping[str, Any] | None:
        """The blocks of the model's own plan; layers that are in none are cut by themselves."""
        offer_blocks(model)
        return None

    def deal_experts(self, model: nn.Module) -> None:
        """Experts that are two tensors, as those of Mixtral and Qwen3-MoE."""
        swap_experts(model)

    def stages(self, model: nn.Module, count: int) -> Sequence[nn.Module]:
        """Runs of the model's layers, as even as they can be."""
        data = self.train_data()
        if is_data_stream(data):
            data = DataStream(data, self.shards)
        if hasattr(data, "open") and not hasattr(data, "__getitem__"):
            samples = chain.from_iterable(data.open(k, 0, 0, 0) for k in range(self.shards))
            data = list(islice(samples, 1))
        if not len(data):
            raise RequestError(
                asked=f"{count} stages of {type(self).__name__}",
                found="no sample in the training data",
                why="the model is followed on the first one, to find its layers",
                do="data that is not empty, or write stages(self, model, count)",
            )
        return stages_of(model, count, self.inputs(self.collate([data[0]])))

    def schedule(self, step: int, total: int) -> float:  # type: ignore[override]
        return schedules.polynomial(total, warmup=min(self.warmup, total - 1))(step)

    def train_data(self) -> Any:
        return self._encoded(TRAIN)

    def eval_data(self) -> Any:
        return self._encoded(VALIDATION)

    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        """Pads each part to the longest of the batch, and adds the `attention_mask`."""
        parts = {name: [sample[name] for sample in samples] for name in samples[0]}
        if "input_ids" in parts:
            parts["attention_mask"] = [torch.ones_like(tokens) for tokens in parts["input_ids"]]
        return {name: _padded(tensors, self.padding(name)) for name, tensors in parts.items()}

    def padding(self, name: str) -> int:
        """What a part of the batch is padded with."""
        has_tokenizer = self.name or type(self).tokenizer is not HuggingFaceTask.tokenizer
        if name != "input_ids" or not has_tokenizer:  # rows may be numbers already
            return PADDED.get(name, 0)
        token = getattr(self._tokenizer, "pad_token_id", None)
        return PADDED.get(name, 0) if token is None else token

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in batch.items() if name != "labels"}

    # --- within --------------------------------------------------------------------------------

    _weights = cast("Any", None)
    """Those of a folder that `model()` has left on the meta device."""

    def _whole_because(self) -> str:
        """Why weights cannot be left on the meta device, or empty: the task may read them."""
        for name in ("model", "pretrained"):
            if not getattr(type(self), name).__module__.startswith("allranks.huggingface."):
                return f"the task has a {name}() of its own, which may read or replace weights"
        return ""

    @cached_property
    def _config(self) -> Any:
        config = self.config()
        config.use_cache = False  # of keys and values: training needs none
        return config

    @cached_property
    def _tokenizer(self) -> Any:
        return self.tokenizer()

    def _named(self, part: str) -> str:
        if not self.name:
            raise RequestError(
                asked=f"{part} of {type(self).__name__}",
                found="no `name` is set",
                why="it is read from a model of the hub, or from a folder",
                do="--set name=FOLDER, or write config(self) and tokenizer(self)",
            )
        return self.name

    def _encoded(self, split: str) -> Any:
        rows = self.rows(split)
        if rows is None:
            return None
        if is_data_stream(rows):
            self._check_columns(split, rows.column_names or list(next(iter(rows.take(1)), {})))
            if split == VALIDATION:
                return EncodedRows(self, list(rows))
            return EncodedStream(self, DataStream(rows, self.shards))
        if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
            raise RequestError(
                asked=f"rows({split!r}) of {type(self).__name__}",
                found=f"a {type(rows).__name__}, without rows by number",
                why="an epoch reads it from its start, and a resume from the middle",
                do="return a sequence, such as list(…), or a stream of datasets: "
                "IterableDataset.from_generator(…)",
            )
        names = getattr(rows, "column_names", None) or (list(rows[0]) if len(rows) else [])
        self._check_columns(split, names)
        return EncodedRows(self, rows)

    def _check_columns(self, split: str, names: Sequence[str]) -> None:
        for field in self.columns:
            column = getattr(self, field)
            if column and column not in names:
                raise RequestError(
                    asked=f"{field}={column!r}, a column of the {split!r} rows",
                    found=f"columns: {', '.join(map(str, names)) or 'none'}",
                    why=f"{type(self).__name__} reads it in every row",
                    do=f"--set {field}=COLUMN",
                )

    def _sample(self, row: Row, place: str) -> Sample:
        """A row as a sample; raises `RequestError` if the model has too few positions for it."""
        for column in {getattr(self, field) for field in self.columns} - {""}:
            if isinstance(row, Mapping) and row.get(column, "") is None:
                raise RequestError(
                    asked=f"{place} as a sample",
                    found=f"no value in the column {column!r}",
                    why="a sample is made of it",
                    do="leave such rows out in rows(self, split), as with .filter",
                )
        sample = self.encode(row)
        positions = getattr(self._config, "max_position_embeddings", None)
        length = len(sample.get("input_ids", ()))
        if positions and length > positions:
            raise RequestError(
                asked=f"{place} as {length} tokens",
                found=f"a model of {positions} positions",
                why="it has no position for the others",
                do=f"--set max_length={positions}",
            )
        return sample


class EncodedRows:
    """Rows as samples, encoded when they are read."""

    def __init__(self, task: HuggingFaceTask, rows: Any) -> None:
        self.task, self.rows = task, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        return self.task._sample(self.rows[int(index)], f"row {index}")


class EncodedStream:
    """The rows of a stream as samples, encoded when they are read."""

    skips = True

    def __init__(self, task: HuggingFaceTask, stream: DataStream) -> None:
        self.task, self.stream, self.shards, self.note = task, stream, stream.shards, stream.note

    def open(self, shard: int, epoch: int, seed: int, skip: int) -> Iterator[Sample]:
        return StreamedSamples(self.task, self.stream.open(shard, epoch, seed, skip))


class StreamedSamples:
    """The samples of the rows of a shard; their state is that of the rows."""

    def __init__(self, task: HuggingFaceTask, rows: Any) -> None:
        self.task, self.rows = task, rows

    def __iter__(self) -> Iterator[Sample]:
        return self

    def __next__(self) -> Sample:
        return self.task._sample(next(self.rows), "a row")

    def state_dict(self) -> Any:
        return self.rows.state_dict() if hasattr(self.rows, "state_dict") else None

    def load_state_dict(self, state: Any) -> None:
        self.rows.load_state_dict(state)


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Turns off the progress bars of transformers: each rank would write its own."""
    were_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            logging.enable_progress_bar()


@contextmanager
def read_from(part: str, *more: type[Exception]) -> Iterator[None]:
    """Raises `RequestError` if neither a folder nor the hub has it: for `OSError` and `more`."""
    errors: tuple[type[Exception], ...] = (OSError, *more)
    try:
        yield
    except errors as error:
        raise RequestError(
            asked=part,
            found=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
            why="it is the path of a folder here, or a name on the hub",
            do="check the name; without a network, download it beforehand and name the folder",
        ) from error


def _padded(tensors: Sequence[Tensor], value: int) -> Tensor:
    """Stacked; sequences of different lengths are padded on the right."""
    if len({tuple(tensor.shape) for tensor in tensors}) == 1:
        return torch.stack(list(tensors))
    return nn.utils.rnn.pad_sequence(list(tensors), batch_first=True, padding_value=value)


def _with_adapters(model: Callable[[Any], nn.Module]) -> Callable[[Any], nn.Module]:
    """`model()` of a task: adapters of peft that do not fit its base raise `RequestError`."""

    @wraps(model)
    def checked(task: Any) -> nn.Module:
        try:
            with warnings.catch_warnings():  # peft would start such adapters from random numbers
                warnings.filterwarnings("error", "Found missing adapter keys")
                return model(task)
        except RequestError:
            raise
        except (ValueError, RuntimeError, KeyError, UserWarning) as error:
            frames = [frame.f_globals for frame, _ in traceback.walk_tb(error.__traceback__)]
            if not any(frame.get("__name__", "").startswith("peft.") for frame in frames):
                raise
            raise RequestError(
                asked=f"adapters of peft, in model() of {type(task).__name__}",
                found=f"{type(error).__name__}: {error}",
                why="they are those of another base, by the names or the shapes of its layers",
                do="set target_modules to layers of this model, or name the base of the adapters",
            ) from error

    return checked
