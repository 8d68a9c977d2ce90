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
from allranks.torch.data.sources import COLLATE, Key, MapSource, drawn_from
from allranks.torch.random.keyed_rng import seed_generators
from allranks.training import same_data
from allranks.training.order import random_key
from allranks.training.same_data import DIGEST_BYTES, rows_to_compare, samples_to_compare

DIFFERS = (
    "gives something else when it is called again for the same samples: it draws from a generator "
    "of its own, or counts"
)
DRAW_KEYED = "draw from Python's, NumPy's or torch's generators, which are keyed"

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
    """A digest of tensors over samples: of all rows, or of a bounded number of them."""
    size = sum(tensor.nbytes for tensor in tensors_in(tensors))
    if size <= DIGEST_BYTES:
        return digest_of(tensors)
    rows = next(tensors_in(tensors)).shape[0]
    index = torch.from_numpy(rows_to_compare(rows, size))
    return digest_of(map_tensors(lambda t: t.index_select(0, index.to(t.device)), tensors))


@dataclass(frozen=True)
class Probed:
    """`digest` is that of five samples; empty if they cannot be read, or differ at every read.

    `unkeyed` names the part that draws from its own generator: "" if none does. `collate_draws`:
    `collate` draws from the keyed generators.
    """

    digest: str = ""
    unkeyed: str = ""
    collate_draws: bool = False

    @property
    def note(self) -> str:
        """A note for the user; "" if nothing draws without a key."""
        if not self.unkeyed:
            return ""
        return (
            f"{self.unkeyed} {DIFFERS}, so the result is NOT equal on another number of ranks; "
            f"{DRAW_KEYED}"
        )

    def check_bitwise(self) -> None:
        """Raise `RequestError` if equal bits cannot be guaranteed."""
        if self.unkeyed:
            raise RequestError(
                asked="--bitwise",
                found=f"{self.unkeyed} {DIFFERS}",
                why="how often it is called on a rank follows the number of ranks",
                do=f"{DRAW_KEYED} by (seed, epoch, sample), or drop --bitwise",
            )


def probe(source: MapSource) -> Probed:
    """Reads five samples from the first to the last, the first of them twice; no communication.

    Uses a loader process if samples are read in one. Errors of reading are left to the training.
    """
    keys = [(0, number) for number in samples_to_compare(len(source))]
    probed: Probed = source.in_loader_process(lambda keys: _probe(source, keys), keys)
    return probed


def _probe(source: MapSource, keys: list[Key]) -> Probed:
    try:
        samples = [_read(source, key) for key in keys]
        if digest_of(_read(source, keys[0])) != digest_of(samples[0]):
            draws = _draws(source, keys[:2])[0]
            return Probed(unkeyed="a sample of the data set", collate_draws=draws)
        digest = digest_of(samples)
        draws, repeats = _draws(source, keys[:2])
    except Exception:  # the error comes again in training, and is reported there
        return Probed()
    return Probed(digest, "" if repeats else "collate", draws)


def _draws(source: MapSource, keys: list[Key]) -> tuple[bool, bool]:
    """Whether collate draws from the generators that are keyed, and whether it repeats itself."""
    if source.is_staged:
        return False, True
    digests, draws = list[str](), False
    for _ in range(2):
        samples = [_read(source, key) for key in keys]
        seed_generators(random_key(source.seed, *keys[0], COLLATE))
        before = drawn_from()
        batch = source.collated(keys, samples)
        seeded = drawn_from() != before
        draws = draws or seeded
        digests.append(digest_of(batch))
    return draws, digests[0] == digests[1]


def _read(source: MapSource, key: Key) -> Any:
    """Read a sample; the reading of samples that are decoded in stages is not keyed."""
    seed_generators(random_key(source.seed, *key))
    return source[key]
