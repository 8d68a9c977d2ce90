"""The model of a checkpoint as a folder of transformers, or its adapters as those of peft.

Runs in a process of its own, as the export of a Keras model does. The task of the run builds its
model on the meta device, so no file of weights is read but the checkpoint. The libraries write what
is not a weight, and give the weights their names in files; this module writes the weights, one at a
time.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from allranks.checkpoint.export import TensorFiles, put_in_place, refused, weights_of
from allranks.checkpoint.format import FileTensor, SavedTensor, lay_out, read_manifest
from allranks.errors import RequestError
from allranks.huggingface.task import HuggingFaceTask
from allranks.job.job import Job
from allranks.job.run_folder import JsonLines, rank_events_path
from allranks.launcher.processes.process import exit_code_of, failure_of
from allranks.torch.checkpoint.state import DTYPES, NAMES
from allranks.torch.task import Task
from allranks.training.task_fields import task_of

WEIGHTS = "model.safetensors"
METADATA = {"format": "pt"}
"""What transformers and peft write into each file of weights."""
SAFETENSORS = "--format safetensors, which has the weights by their names"

Written = Mapping[str, Tensor]
"""Tensors by their names in files. Those of a plan are on the meta device."""


def main(argument: dict[str, Any]) -> int:
    """Export, and write the event `exported` or `failed`; returns the exit code of the process.

    `argument` has the `job`, the `folder` of a checkpoint that was verified, the `target`, the
    `dtype` ("" for that of the checkpoint) and `shard_bytes`; what is `beside` the target is
    removed by whoever asked.
    """
    job = Job.from_data(argument["job"])
    with JsonLines(rank_events_path(Path(job.run_dir), 0)) as events:
        try:
            count = export(job, argument)
        except BaseException as error:
            events.event("failed", **failure_of(error, 0, None))
            return exit_code_of(error)
        events.event("exported", tensors=count)
    return 0


def export(job: Job, argument: Mapping[str, Any]) -> int:
    """Write the folder; returns how many tensors are in it. Raises `RequestError`."""
    folder, target, temporary = (Path(argument[name]) for name in ("folder", "target", "beside"))
    task = task_of(job, Task)
    if not isinstance(task, HuggingFaceTask):
        raise RequestError(
            asked=f"to export to {target} with --format huggingface",
            found=f"{type(task).__name__}, which is no task of allranks.huggingface",
            why="that format holds a model of transformers, with its configuration",
            do=SAFETENSORS,
        )
    with reported(target), TensorFiles(folder) as files:
        temporary.mkdir()
        saved = weights_of(read_manifest(folder))
        model = without_weights(task)
        check_names(model, saved, target)
        weights = SavedWeights(files, saved, argument["dtype"])
        if is_adapted(model):
            check_adapters(model, target)
            count = write_adapters(model, weights, temporary)
        elif isinstance(model, transformers.PreTrainedModel):
            prepare(task, model, weights, temporary)
            path = temporary / WEIGHTS
            plan, convert = plan_of(model, weights, target)
            count = write_files(path, plan, weights, convert, argument["shard_bytes"])
        else:
            raise refused(target, f"a {type(model).__name__}", "transformers did not make it")
    put_in_place(temporary, target)
    return count


@contextmanager
def reported(target: Path) -> Iterator[None]:
    """What the libraries and the disk refuse is an answer to the user."""
    try:
        yield
    except RequestError:
        raise
    except OSError as error:
        raise refused(target, str(error), "it cannot be written there") from error
    except Exception as error:
        raise RequestError(
            asked=f"to export the model to {target}",
            found=f"{type(error).__name__}: {error}",
            why="transformers or peft cannot write this model from its configuration alone",
            do=f"mend model(self): super().model() reads no weights here; or {SAFETENSORS}",
        ) from error


class SavedWeights:
    """The weights of a checkpoint by name: numbers of floating point become those of `dtype`."""

    def __init__(
        self, files: TensorFiles, saved: Mapping[str, tuple[str, SavedTensor]], dtype: str
    ) -> None:
        self.files, self.saved = files, saved
        self.wanted: torch.dtype | None = getattr(torch, dtype) if dtype else None

    def dtype(self, name: str) -> torch.dtype:
        kind = DTYPES[self.saved[name][1].dtype]
        return self.wanted if self.wanted and kind.is_floating_point else kind

    def like(self, name: str) -> Tensor:
        """A tensor of the type and shape of a weight, without memory."""
        return torch.empty(self.saved[name][1].shape, dtype=self.dtype(name), device="meta")

    def read(self, name: str) -> Tensor:
        path, saved = self.saved[name]
        kind = DTYPES[saved.dtype]
        if not saved.size:
            return torch.empty(saved.shape, dtype=self.dtype(name))
        with warnings.catch_warnings():  # bytes cannot be written to, and are not
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            numbers = torch.frombuffer(self.files.bytes_of(path, saved), dtype=kind)
        return numbers.reshape(saved.shape).to(self.dtype(name))


# --- what is no weight ---------------------------------------------------------------------------


def without_weights(task: HuggingFaceTask) -> nn.Module:
    """The model of a task on the meta device, made from its configuration."""
    was = dict(vars(task))
    vars(task).update(from_scratch=True, packed=0)  # nothing is read or trained
    vars(task)["_config"] = task.config()  # as the user has it, not as it is for training
    try:
        with torch.device("meta"):
            return task.model()
    finally:
        vars(task).clear()
        vars(task).update(was)


def is_adapted(model: nn.Module) -> bool:
    """Whether it is a model of peft, or one of transformers with adapters of peft in it."""
    if isinstance(model, transformers.PreTrainedModel):
        return bool(model._hf_peft_config_loaded)
    return hasattr(model, "peft_config")


def check_adapters(model: Any, target: Path) -> None:
    """Raise `RequestError` for what peft computes from its weights when it writes them."""
    prompts = [name for name, kind in model.peft_config.items() if kind.is_prompt_learning]
    if prompts:
        raise RequestError(
            asked=f"to export the adapter {prompts[0]!r} to {target}",
            found=f"a {type(model.peft_config[prompts[0]]).__name__}",
            why="peft writes prompts that it computes with the whole model",
            do=f"{SAFETENSORS}, or save_pretrained of peft in a callback, in trainer.whole_model()",
        )


def check_names(model: nn.Module, saved: Mapping[str, Any], target: Path) -> None:
    """Raise `RequestError` unless the model of the task has the weights of the checkpoint."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    was = {name: tensor.shape for name, (_, tensor) in saved.items()}
    odd = [name for name in sorted(shapes | was) if shapes.get(name) != was.get(name)]
    if odd:
        name = odd[0]
        checkpoint, program = (shape.get(name, "absent") for shape in (was, shapes))
        raise RequestError(
            asked=f"to export the model to {target}",
            found=f"{name}: {checkpoint} in the checkpoint, {program} in the model of the task",
            why="the program that makes the model has changed since",
            do=f"the program as it was, or {SAFETENSORS}",
        )


def prepare(
    task: HuggingFaceTask, model: transformers.PreTrainedModel, weights: SavedWeights, folder: Path
) -> None:
    """Write the configurations, and the tokenizer or image processor if the task has one."""
    trained = [name for name, p in model.named_parameters() if p.is_floating_point()]
    model.to(weights.dtype(trained[0]))  # transformers writes the type of the first one
    if task.name and not task.from_scratch and model.can_generate():
        with suppress(OSError):  # a model need not have one
            generation = transformers.GenerationConfig.from_pretrained(task.name)
            model.generation_config = generation
    model.save_pretrained(folder, state_dict={}, save_original_format=False)
    try:
        tokenizer = task.tokenizer()
    except RequestError:  # a task that encodes rows by itself has none
        return
    if getattr(tokenizer, "vocab_size", 1):  # transformers makes an empty one of no files
        tokenizer.save_pretrained(folder)


# --- names in files ------------------------------------------------------------------------------


def plan_of(
    model: transformers.PreTrainedModel, weights: SavedWeights, target: Path
) -> tuple[dict[str, Written], Callable[[str, Tensor], Written]]:
    """What each weight becomes in the files of transformers, and the function that makes it so.

    Tied weights are written once. The experts of a layer may be one tensor in memory, and several
    in files.
    """
    ignored = set(model._keys_to_ignore_on_save or ())
    every = {name: weights.like(name) for name in model.state_dict() if name not in ignored}
    every = remove_tied_weights_from_state_dict(every, model)
    plan = {name: revert_weight_conversion(model, {name: like}) for name, like in every.items()}
    wanted = {n: t.shape for n, t in revert_weight_conversion(model, dict(every)).items()}
    if wanted != {n: t.shape for tensors in plan.values() for n, t in tensors.items()}:
        raise RequestError(
            asked=f"to export the model to {target}",
            found=f"a {type(model).__name__}, which joins several weights to one in its files",
            why="an export reads one weight at a time",
            do=SAFETENSORS,
        )
    return plan, lambda name, tensor: revert_weight_conversion(model, {name: tensor})


def write_adapters(model: Any, weights: SavedWeights, folder: Path) -> int:
    """Let peft write its folder with a number in the place of each weight, then put the weights in.

    So configuration, names and the folder of each adapter are those of `peft`.
    """
    names = list(weights.saved)
    numbers = {name: torch.tensor([number]) for number, name in enumerate(names)}
    model.save_pretrained(folder, state_dict=numbers)
    count = 0
    for path in sorted(folder.rglob("*.safetensors")):
        places = {names[int(number)]: name for name, number in load_file(path).items()}
        plan = {name: {place: weights.like(name)} for name, place in places.items()}

        count += write_files(path, plan, weights, partial(_renamed, places), 2**63)
    return count


def _renamed(places: Mapping[str, str], name: str, tensor: Tensor) -> Written:
    return {places[name]: tensor}


# --- files ---------------------------------------------------------------------------------------


def write_files(
    path: Path,
    plan: Mapping[str, Written],
    weights: SavedWeights,
    convert: Callable[[str, Tensor], Written],
    shard_bytes: int,
) -> int:
    """Write the weights to `path`, or to several files and an index; returns how many tensors.

    A file has at most `shard_bytes` of tensors, or a single one. One weight is in memory at a time.
    """
    tensors = {name: t for made_of_one in plan.values() for name, t in made_of_one.items()}
    shards = cut(
        {n: FileTensor(NAMES[t.dtype], tuple(t.shape)) for n, t in tensors.items()}, shard_bytes
    )
    names = [path.name]
    if len(shards) > 1:
        of = f"of-{len(shards):05d}{path.suffix}"
        names = [f"{path.stem}-{number:05d}-{of}" for number in range(1, len(shards) + 1)]
        write_index(path, dict(zip(names, shards, strict=True)))
    with ExitStack() as stack:
        places: dict[str, tuple[Any, int]] = {}
        for name, shard in zip(names, shards, strict=True):
            file = stack.enter_context(open(path.with_name(name), "wb"))
            layout = lay_out(shard, METADATA)
            file.write(layout.header)
            start = len(layout.header)
            places |= {name: (file, start + piece.begin) for name, piece in layout.pieces.items()}
        for name in plan:  # nothing of a weight is kept when the next one is read
            write_tensors(places, convert(name, weights.read(name)))
    return len(tensors)


def write_tensors(places: Mapping[str, tuple[Any, int]], tensors: Written) -> None:
    """Write tensors at their places: a file, and the byte in it."""
    for name, tensor in tensors.items():
        file, at = places[name]
        file.seek(at)
        file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def cut(pieces: Mapping[str, FileTensor], limit: int) -> list[dict[str, FileTensor]]:
    """Runs of tensors of at most `limit` bytes, in order."""
    shards: list[dict[str, FileTensor]] = [{}]
    size = 0
    for name, piece in pieces.items():
        if shards[-1] and size + piece.size > limit:
            shards.append({})
            size = 0
        shards[-1][name] = piece
        size += piece.size
    return shards


def write_index(path: Path, shards: Mapping[str, Mapping[str, FileTensor]]) -> None:
    """Write which file has which tensor, as transformers reads it."""
    size = sum(piece.size for shard in shards.values() for piece in shard.values())
    files = {name: file for file, shard in shards.items() for name in shard}
    index = {"metadata": {"total_size": size}, "weight_map": files}
    path.with_name(f"{path.name}.index.json").write_text(
        json.dumps(index, indent=2, sort_keys=True)
    )
