"""A folder of `save_pretrained`, of which each rank reads its parts.

transformers builds the model on the meta device, maps names of the files onto names of the model,
and draws what the files lack. Here it does all of that, and leaves the weights of the files on the
meta device. The engine reads them when the model is cut: `torch.model.deferred_init`. Numbers,
ties and draws are those of a model that is read whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, rename_source_key
from transformers.utils.loading_report import LoadStateDictInfo

from allranks.errors import RequestError
from allranks.torch.model.reals import TensorFile, TensorFolder

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
OTHER_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "adapter_config.json")
EXACT_IN_FLOAT32 = (torch.float32, torch.float16, torch.bfloat16)
LOADER = "_load_pretrained_model"


@dataclass(frozen=True)
class PartlyRead:
    """A model whose `weights` are on the meta device; none if it was read whole, and `why`."""

    model: nn.Module
    weights: TensorFolder | None
    why: str = ""


def weights_in(folder: Path) -> TensorFolder | None:
    """The tensors of a folder by their names in its files; `None` if transformers alone reads it.

    Raises `RequestError` for a folder without weights, and for files that do not have what the
    index names.
    """
    if (folder / ONE_FILE).is_file():
        return TensorFolder({ONE_FILE: _opened(folder, ONE_FILE)})
    if (folder / INDEX).is_file():
        return _sharded(folder)
    if not any(any(folder.glob(pattern)) for pattern in OTHER_WEIGHTS):
        raise RequestError(
            asked=f"the weights of {folder}",
            found=f"neither {ONE_FILE} nor {INDEX}",
            why="a model starts from the weights of its folder",
            do="write them with save_pretrained, or --set from_scratch=true for a new model",
        )
    return None


def _sharded(folder: Path) -> TensorFolder:
    try:
        names: Any = json.loads((folder / INDEX).read_text())["weight_map"]
        shards = sorted({*map(str, names.values())})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _broken(folder, INDEX, f"{type(error).__name__}: {error}") from error
    if absent := [shard for shard in shards if not (folder / shard).is_file()]:
        raise _broken(folder, ", ".join(absent), f"not there; {INDEX} names {len(shards)} files")
    files = {shard: _opened(folder, shard) for shard in shards}
    for name, shard in names.items():
        if name not in set(files[shard]):
            raise _broken(folder, shard, f"no tensor {name!r}, which {INDEX} says is there")
    return TensorFolder(files)


def _opened(folder: Path, name: str) -> TensorFile:
    try:
        return TensorFile(folder / name)
    except (OSError, SafetensorError) as error:
        raise _broken(folder, name, f"{type(error).__name__}: {error}") from error


def _broken(folder: Path, name: str, problem: str) -> RequestError:
    return RequestError(
        asked=f"the weights of {folder}: {name}",
        found=problem,
        why="every weight of the folder goes into the model",
        do="write or copy the folder again, all of its files",
    )


def read_in_parts(kind: Any, folder: Path, config: Any, weights: TensorFolder) -> PartlyRead:
    """The model of `kind`, an Auto class, as `from_pretrained` makes it in float32.

    What it takes of `weights` is on the meta device. A folder whose names or types do not map one
    to one onto the model is read whole. No communication.
    """
    places: dict[str, str] = {}
    why: list[str] = []
    with _mapping_names(weights, places, why):
        model = kind.from_pretrained(str(folder), config=config, dtype=torch.float32)
    if why or not places:
        return PartlyRead(model, None, why[0] if why else "transformers reads it another way")
    return PartlyRead(model, weights.renamed(places))


@contextmanager
def _mapping_names(weights: TensorFolder, places: dict[str, str], why: list[str]) -> Iterator[None]:
    """Within, transformers reads no weights, but fills `places`; or reads all, and says `why`."""
    original: Any = vars(PreTrainedModel)[LOADER]

    def load(model: Any, *arguments: Any, **more: Any) -> Any:
        settings = next(a for a in (*arguments, *more.values()) if hasattr(a, "weight_mapping"))
        try:
            info = _map_names(model, weights, settings, places)
        except _NotMappedError as error:
            why.append(str(error))
            return original.__func__(model, *arguments, **more)
        return info, None

    setattr(PreTrainedModel, LOADER, staticmethod(load))
    try:
        yield
    finally:
        setattr(PreTrainedModel, LOADER, original)


class _NotMappedError(Exception):
    """Why the tensors of a folder are not those of the model."""


def _map_names(
    model: Any, weights: TensorFolder, settings: Any, places: dict[str, str]
) -> LoadStateDictInfo:
    """Put the name in the folder of each weight of the model that it has into `places`.

    It follows `convert_and_load_state_dict_in_model` of transformers. Weights that are there are
    marked, so that nothing is drawn for them.
    """
    if settings.hf_quantizer is not None or model.is_custom_code():
        raise _NotMappedError("it is quantized, or has code of its own")
    state: dict[str, Tensor] = model.state_dict()
    names: dict[str, str] = {}
    unexpected: set[str] = set()
    for name in weights:
        target = _name_in_model(name, model, state, settings.weight_mapping or ())
        if target not in state:
            unexpected.add(target)
            continue
        if names.setdefault(target, name) != name:
            raise _NotMappedError(f"{names[target]!r} and {name!r} of the files are one weight")
        _check_fits(name, weights, target, state[target])
    tied: Mapping[str, str] = model.all_tied_weights_keys
    for target, source in tied.items():
        if target in names and source in names:
            raise _NotMappedError(f"{target!r} and {source!r} are tied, and both are in the files")
    for target in names:
        tensor = model.get_parameter_or_buffer(target)
        tensor._is_hf_initialized = True
        if isinstance(tensor, nn.Parameter):  # also one that was frozen before, as Pegasus has
            tensor.requires_grad_(tensor.is_floating_point())
    model._weight_conversions = []
    places.update(names)
    return LoadStateDictInfo(
        missing_keys=state.keys() - names.keys(),
        unexpected_keys=unexpected,
        mismatched_keys=set(),
        error_msgs=[],
        conversion_errors={},
        skipped_pp_keys=set(),
    )


def _name_in_model(name: str, model: Any, state: Mapping[str, Tensor], rules: Sequence[Any]) -> str:
    """The name of a tensor in the model. Raises if it is converted, not only renamed."""
    renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    prefix = model.base_model_prefix
    target, pattern = rename_source_key(name, renamings, converters, prefix, state)
    if target not in state and name in state:
        target, pattern = rename_source_key(name, [], [], prefix, state)
    if pattern is not None:
        raise _NotMappedError(f"{name!r} of the files is a part of another weight of the model")
    return str(target)


def _check_fits(name: str, weights: TensorFolder, target: str, like: Tensor) -> None:
    tensor = weights[name]
    if tensor.shape != like.shape:
        raise RequestError(
            asked=f"{name!r} of the files as {target!r} of the model",
            found=f"shape {tuple(tensor.shape)} there, {tuple(like.shape)} in the model",
            why="a weight goes into the model in its shape",
            do="the sizes of the folder in config(); for a new head, a model(self) that returns "
            "AutoModel….from_pretrained(self.name, config=self.config(), "
            "ignore_mismatched_sizes=True).train()",
        )
    is_exact = like.dtype == torch.float32 and tensor.dtype in EXACT_IN_FLOAT32
    if not is_exact and tensor.dtype != like.dtype:
        raise _NotMappedError(
            f"{name!r} of the files is {tensor.dtype}, and the model {like.dtype}"
        )
