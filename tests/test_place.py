"""A place is taken apart once: its name, the values of its options, and what is refused."""

from __future__ import annotations

import pytest

from allranks.errors import RequestError
from allranks.job.job import Job
from allranks.job.place import NodeLink, parse_network, place_spec


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("local", "local", {}),
        ("simulated", "simulated", {}),
        ("simulated:link=2.5gbit", "simulated", {"link": 2.5e9}),
        ("simulated(delay=500us,link=1kbit)", "simulated", {"link": 1e3, "delay": 5e-4}),
    ],
)
def test_options_have_values_in_one_unit(text: str, name: str, options: dict[str, float]) -> None:
    spec = place_spec(text)
    assert (spec.name, spec.options, str(spec)) == (name, options, text)
    assert Job(place=text).place_spec == spec


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("here", "no place of that name in this version"),
        ("slurm:link=1gbit", "options of slurm"),
        ("simulated:lonk=1gbit", "no option 'lonk' of simulated nodes"),
        ("simulated:link=fast", "link=fast"),
        ("simulated:link=0gbit", "link=0gbit"),
        ("simulated:delay=1gbit", "delay=1gbit"),
        ("simulated:", "'' is not key=value"),
    ],
)
def test_what_is_no_place_is_refused(text: str, found: str) -> None:
    with pytest.raises(RequestError) as refused:
        place_spec(text)
    assert refused.value.found == found
    assert refused.value.asked.startswith("--place ")


def test_the_network_is_made_of_the_options() -> None:
    assert parse_network("simulated:delay=1ms", 2).link == NodeLink(0.0, 1e-3)
    with pytest.raises(RequestError, match="201 nodes on one machine"):
        parse_network("simulated", 201)
