"""The sequences of weights that torchft keeps of its DiLoCo, from our `diloco`.

The numbers are those of `test_fixtures/` in torchft, revision 7eb70878. Two learners train two
weights, each a fragment of its own, from 1 by a gradient of 2 at a rate of 1; every 6 steps a
fragment is exchanged, and the outer optimizer is SGD at a rate of 2. `delay` is the number of
steps that an exchange takes, `alpha` the share of its own weights that a learner keeps.

torchft sends a fragment `delay` steps before a multiple of 3, and applies it at the multiple;
`diloco` sends at the multiple, and applies `overlap` steps later. So where there is a delay, our
learners rest for a step first, and from then on all numbers are the same.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.errors import RequestError
from conftest import Train

PLAIN = [
    [1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59],
    [1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53],
]
SEQUENCES = {
    (0, 0): PLAIN,
    (0, 0.5): [
        [1, -1, -3, -8, -10, -12, -14, -16, -18, -24.5, -26.5, -28.5, -30.5, -32.5, -34.5, -40.25],
        [1, -1, -3, -5, -7, -9, -17, -19, -21, -23, -25, -27, -32, -34, -36, -38],
    ],
    (1, 0): [
        [1, -1, -3, -7, -9, -11, -13, -15, -17, -27, -29, -31, -33, -35, -37, -47],
        [1, -1, -3, -5, -7, -9, -19, -21, -23, -25, -27, -29, -39, -41, -43, -45],
    ],
    (1, 0.5): [
        [1, -1, -3, -6, -8, -10, -12, -14, -16, -21.5, -23.5, -25.5, -27.5, -29.5, -31.5, -35.75],
        [1, -1, -3, -5, -7, -9, -15, -17, -19, -21, -23, -25, -29, -31, -33, -35],
    ],
}
"""By `delay` and `alpha`: both weights before step 0, 1, 2, …, the same on both learners."""
RECOVERED = [
    [*PLAIN[0], -61, -63, -65, -67, -69, -83],
    [*PLAIN[1], -55, -57, -71, -73, -75, -77],
]
"""With a learner that fails: those of the other one."""
DILOCO = "diloco:every=6,fragments=2,lr=2,momentum=0,overlap={},mix={}"


def weights_after(folder: Path, rank: int) -> dict[int, list[float]]:
    """By the number of steps: both weights of a rank; of a step made twice, those of the last."""
    rows = (line.split() for line in (folder / f"weights-{rank}").read_text().splitlines())
    return {int(steps): [float(first), float(second)] for steps, first, second in rows}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("delay", "alpha"), SEQUENCES)
def test_learners_move_as_those_of_torchft(
    delay: int, alpha: float, train: Train, tmp_path: Path
) -> None:
    settings = (f"folder={tmp_path}", f"rests={delay}")
    strategy = DILOCO.format(delay, alpha)
    train("fragment_tasks:Fragments", *settings, strategy=strategy, ranks=2, steps=15 + delay)
    wanted = [list(pair) for pair in zip(*SEQUENCES[delay, alpha], strict=True)]
    for rank in range(2):
        found = weights_after(tmp_path, rank)
        assert [found[step + delay] for step in range(1, 16)] == wanted[1:]


@pytest.mark.slow
def test_a_learner_that_fails_ends_where_it_does_in_torchft(train: Train, tmp_path: Path) -> None:
    """torchft's other learner goes on alone; here both continue from the checkpoint."""
    result = train(
        "fragment_tasks:Fragments",
        f"folder={tmp_path}",
        strategy=DILOCO.format(0, 0),
        ranks=2,
        steps=21,
        checkpoint_every=4,
        max_restarts=1,
        inject="kill@rank=1,step=7",
    )
    assert result.summary["restarts"] == 1
    wanted = [list(pair) for pair in zip(*RECOVERED, strict=True)]
    for rank in range(2):
        assert [weights_after(tmp_path, rank)[step] for step in range(1, 22)] == wanted[1:]


@pytest.mark.parametrize("delay", [0, 1])
def test_learners_that_keep_all_of_their_own_weights_are_refused(
    delay: int, train: Train, tmp_path: Path
) -> None:
    """With torchft's alpha of 1 the exchange changes no learner."""
    with pytest.raises(RequestError, match="mix is a finite float, at least 0, below 1"):
        train("fragment_tasks:Fragments", strategy=DILOCO.format(delay, 1), ranks=2, steps=1)
