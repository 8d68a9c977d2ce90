"""Whether samples and batches follow from their keys alone, tried once on a few samples.

A data set or a `collate` may draw from Python's, NumPy's and torch's generators: those are keyed.
What draws from a generator of its own, or counts, gives something else when it is asked again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from allranks.errors import RequestError
from allranks.torch.data.collate import DATA, map_tensors, tensors_in
from allranks.torch.data.sources import COLLATE, Key, MapSource, drawn_from, seed_generators
from allranks.training import same_data
from allranks.training.order import random_key
from allranks.training.same_data import DIGEST_BYTES, rows_to_compare, samples_to_compare

# --- same data -----------------------------------------------------------------------------------
# Digests of tensors, for what is compared between ranks and for what is tried twice.


def digest_of(value: Any) -> str:
    """A digest of what a sample, a batch, or any structure of tensors holds."""
    return same_data.digest_of(value, DATA, _array)


def _array(tensor: Tensor) -> NDArray[Any]:
    plain = tensor.detach().cpu().contiguous()
    if plain.dtype == torch.bfloat16:  # which NumPy has not
        plain = plain.view(torch.int16)
    array: NDArray[Any] = plain.numpy()
    return array


def digest_of_rows(tensors: Any) -> str:
    """Of tensors over samples: all of them, or as many rows as are quickly read."""
    size = sum(tensor.nbytes for tensor in tensors_in(tensors))
    if size <= DIGEST_BYTES:
        return digest_of(tensors)
    rows = next(tensors_in(tensors)).shape[0]
    index = torch.from_numpy(rows_to_compare(rows, size))
    return digest_of(map_tensors(lambda t: t.index_select(0, index.to(t.device)), tensors))


@dataclass(frozen=True)
class Probed:
    """`digest` is that of five samples, empty where they could not be read or are never alike.

    `own` says what of it draws from a generator of its own: "" if nothing does. `collate_draws`:
    from the generators that are keyed.
    """

    digest: str = ""
    own: str = ""
    collate_draws: bool = False

    @property
    def note(self) -> str:
        """What to say of it; "" if all is well."""
        if not self.own:
            return ""
        return (
            f"{self.own} gives something else when it is called again for the same samples: it "
            "draws from a generator of its own, or counts, so the result is NOT equal on another "
            "number of ranks; draw from Python's, NumPy's or torch's generators, which are keyed"
        )

    def check_bitwise(self) -> None:
        """Raise `RequestError` where bits are promised that cannot be kept."""
        if self.own:
            raise RequestError(
                asked="--bitwise",
                found=f"{self.own} gives something else when it is called again for the same "
                "samples: it draws from a generator of its own, or counts",
                why="how often it is called on a rank follows the number of ranks",
                do="draw from Python's, NumPy's or torch's generators, which are keyed by "
                "(seed, epoch, sample), or drop --bitwise",
            )


def probe(source: MapSource) -> Probed:
    """Reads five samples from the first to the last, the first of them twice; no communication.

    Read in a loader process where samples are, and what cannot be read is left to the training.
    """
    keys = [(0, number) for number in samples_to_compare(len(source))]
    made: Probed = source.in_loader_process(lambda keys: _probe(source, keys), keys)
    return made


def _probe(source: MapSource, keys: list[Key]) -> Probed:
    try:
        samples = [_read(source, key) for key in keys]
        if digest_of(_read(source, keys[0])) != digest_of(samples[0]):
            return Probed(own="a sample of the data set", collate_draws=_draws(source, keys[:2])[0])
        digest = digest_of(samples)
        draws, repeats = _draws(source, keys[:2])
    except Exception:  # what is wrong shows again when it is trained with, and is told there
        return Probed()
    return Probed(digest, "" if repeats else "collate", draws)


def _draws(source: MapSource, keys: list[Key]) -> tuple[bool, bool]:
    """Whether collate draws from the generators that are keyed, and whether it repeats itself."""
    if source.is_staged:
        return False, True
    found, draws = list[str](), False
    for _ in range(2):
        samples = [_read(source, key) for key in keys]
        seed_generators(random_key(source.seed, *keys[0], COLLATE))
        before = drawn_from()
        batch = source.collated(keys, samples)
        seeded = drawn_from() != before
        draws = draws or seeded
        found.append(digest_of(batch))
    return draws, found[0] == found[1]


def _read(source: MapSource, key: Key) -> Any:
    """A sample; one that is decoded in stages is not keyed where it is read."""
    seed_generators(random_key(source.seed, *key))
    return source[key]
