"""BatchNorm and dropout that belong to shards: what they do, whatever goes through at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from allranks.errors import RequestError
from allranks.strategies.shards import Piece, micro_batches
from allranks.torch.batchnorm.shard import RunningStatistics
from allranks.torch.build import swap_layers
from allranks.torch.model.layers import Scope, shard_norms

SIZES = {0: 4, 1: 4, 2: 3, 3: 1}


def scoped(model: nn.Module) -> Scope:
    scope = Scope(0, torch.device("cpu"))
    swap_layers(model.train(), scope)
    return scope


def outputs(model: nn.Module, scope: Scope, data: Tensor, limit: int | None) -> Tensor:
    """The model on all shards, in micro-batches of at most `limit` samples."""
    parts, row = [], 0
    for pieces in micro_batches(SIZES, limit):
        count = sum(piece.samples for piece in pieces)
        scope.enter(3, pieces, count)
        parts.append(model(data[row : row + count]))
        row += count
    scope.leave()
    return torch.cat(parts)


@pytest.mark.parametrize("layer", [nn.Dropout(0.4), nn.Dropout1d(0.4), nn.Dropout2d(0.4)])
@pytest.mark.parametrize("limit", [1, 2, 4, 7])
def test_dropout_does_not_know_what_goes_through_together(layer: nn.Module, limit: int) -> None:
    shape = (12, 5, 6, 6) if isinstance(layer, nn.Dropout2d) else (12, 5, 6)
    scope = scoped(layer)
    data = torch.ones(shape)
    whole = outputs(layer, scope, data, None)
    assert torch.equal(outputs(layer, scope, data, limit), whole)
    assert whole.unique().tolist() == pytest.approx([0.0, 1 / 0.6])
    assert not torch.equal(whole[0:4], whole[4:8]), "shards must not share a mask"
    if not isinstance(layer, nn.Dropout):  # whole channels
        assert (whole.flatten(2).amax(2) == whole.flatten(2).amin(2)).all()


def test_two_dropouts_two_calls_and_two_steps_draw_apart() -> None:
    model = nn.ModuleList([nn.Dropout(0.5), nn.Dropout(0.5)])
    scope = scoped(model)
    pieces = (Piece(0, 0, 50, 50),)
    data = torch.ones(50, 8)
    scope.enter(0, pieces, 50)
    masks = [model[0](data), model[0](data), model[1](data)]
    scope.enter(1, pieces, 50)
    masks.append(model[0](data))
    scope.enter(0, pieces, 50)
    assert torch.equal(model[0](data), masks[0])
    assert len({mask.numpy().tobytes() for mask in masks}) == 4


@pytest.mark.parametrize("limit", [None, 3])
def test_more_padding_only_adds_to_the_mask(limit: int | None) -> None:
    """Batches padded to their longest sample: what comes before the padding is the same."""
    layer = nn.Dropout(0.4)
    scope = scoped(layer)
    narrow = outputs(layer, scope, torch.ones(12, 5, 7), limit)
    wide = outputs(layer, scope, torch.ones(12, 9, 7), None)
    assert torch.equal(wide[:, :5], narrow)
    assert not torch.equal(wide[:, 5:], wide[:, :4])


def test_rows_that_were_picked_out_are_refused_with_a_remedy() -> None:
    layer = nn.Dropout(0.4)
    scope = scoped(layer)
    scope.enter(0, (Piece(0, 0, 4, 4),), 4)
    with pytest.raises(RequestError, match="an expert of a mixture") as error:
        layer(torch.ones(3, 8))
    assert error.value.found == "3 rows for 4 samples"


def test_batchnorm_without_running_statistics_normalises_its_shard_and_leaves_nothing() -> None:
    plain, layer = (nn.BatchNorm1d(3, track_running_stats=False) for _ in range(2))
    scope = scoped(layer)
    data = torch.randn(11, 3, generator=torch.Generator().manual_seed(1))
    scope.enter(0, (Piece(0, 0, 4, 4), Piece(1, 0, 7, 7)), 11)
    wanted = torch.cat([plain(data[:4]), plain(data[4:])])
    torch.testing.assert_close(layer(data), wanted)
    assert not scope.moments
    scope.enter(0, (Piece(0, 0, 2, 2), Piece(1, 0, 1, 1)), 3)
    with pytest.raises(RequestError, match="no variance") as error:
        layer(data[:3])
    assert error.value.found == "one value for each channel in shard 1"
    image = nn.BatchNorm2d(3, track_running_stats=False)
    scoped(image).enter(0, (Piece(0, 0, 1, 1),), 1)
    assert image(torch.randn(1, 3, 4, 4)).isfinite().all()


def test_dropout_in_float64_draws_the_same_mask() -> None:
    layer = nn.Dropout(0.3)
    scope = scoped(layer)
    single = outputs(layer, scope, torch.ones(12, 9), None)
    double = outputs(layer, scope, torch.ones(12, 9, dtype=torch.float64), None)
    assert torch.equal(single > 0, double > 0)


def test_batchnorm_normalises_each_shard_by_itself() -> None:
    plain, layer = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    scope = scoped(layer)
    data = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    found = outputs(layer, scope, data, None)
    for rows in (slice(0, 4), slice(4, 8), slice(8, 11)):
        torch.testing.assert_close(found[rows], plain.train()(data[rows]))
    alone = nn.BatchNorm1d(3).eval()(data[11:])  # one sample: by the running statistics
    torch.testing.assert_close(found[11:], alone)


def test_running_statistics_take_the_weighted_moments_once() -> None:
    layer = nn.BatchNorm2d(2, momentum=0.1)
    scope = scoped(layer)
    data = torch.randn(12, 2, 3, 3, generator=torch.Generator().manual_seed(2))
    outputs(layer, scope, data, None)
    assert int(layer.num_batches_tracked) == 0, "nothing is updated before the step ends"
    moments = scope.moments[layer.index]  # type: ignore[index]
    RunningStatistics(shard_norms(layer), moments).update(moments)
    shards = [data[0:4], data[4:8], data[8:11]]
    mean = sum(len(s) * s.mean((0, 2, 3)) for s in shards) / 11
    var = sum(len(s) * s.var((0, 2, 3)) for s in shards) / 11
    torch.testing.assert_close(layer.running_mean, 0.1 * mean)
    torch.testing.assert_close(layer.running_var, 0.9 + 0.1 * var)
    assert int(layer.num_batches_tracked) == 1


def test_outside_of_a_step_the_layers_are_torchs_own() -> None:
    model, plain = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    scoped(model)
    data = torch.randn(5, 3)
    torch.testing.assert_close(model(data), plain(data))
    torch.testing.assert_close(model.running_mean, plain.running_mean)
    assert isinstance(model, nn.BatchNorm1d)
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_a_layer_in_evaluation_mode_is_torchs_own_within_a_step_too() -> None:
    """A frozen BatchNorm uses its running statistics, and adds nothing to them."""
    layer, plain = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    for norm in (layer, plain):
        norm.running_mean.fill_(2.0)  # type: ignore[union-attr]
    scope = scoped(layer)
    layer.eval()
    data = torch.randn(12, 3, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(outputs(layer, scope, data, None), plain.eval()(data))
    assert not scope.moments


def test_rows_that_are_not_samples_are_refused() -> None:
    layer = nn.Dropout(0.5)
    scope = scoped(layer)
    scope.enter(0, (Piece(0, 0, 4, 4),), 4)
    with pytest.raises(RequestError, match="samples first"):
        layer(torch.ones(6, 4))


@pytest.mark.parametrize("layer", [nn.LazyLinear(3), nn.SyncBatchNorm(3)])
def test_layers_that_cannot_be_right_are_refused(layer: nn.Module) -> None:
    with pytest.raises(RequestError, match="plain layer"):
        scoped(nn.Sequential(layer))


def test_layers_with_randomness_of_their_own_are_named() -> None:
    model = nn.Sequential(nn.LSTM(2, 2, 2, dropout=0.1), nn.Linear(2, 2), nn.RReLU())
    assert swap_layers(model, Scope(0, torch.device("cpu")))["user_randomness"] == ["0", "2"]
