"""Who takes part in a drill."""

import pytest

from dalsegno.drill.schedule import cast
from dalsegno.errors import UsageError


@pytest.mark.parametrize(
    ("in_service", "nodes", "spares", "found"),
    [
        (6, None, None, (4, 1)),
        (4, None, None, (4, 0)),  # the cluster's own spare, which is not in service, stands by
        (2, None, None, (2, 0)),
        (5, None, 2, (3, 2)),
        (6, 3, None, (3, 1)),
        (3, 3, 0, (3, 0)),
    ],
)
def test_as_many_as_there_are_up_to_four_and_one(
    in_service: int, nodes: int | None, spares: int | None, found: tuple[int, int]
):
    assert cast(in_service, nodes, spares) == found


@pytest.mark.parametrize(("in_service", "nodes", "spares"), [(4, 4, 1), (4, 5, None), (0, None, None), (2, None, 2)])
def test_more_than_there_are_is_refused_before_it_waits_for_ever(
    in_service: int, nodes: int | None, spares: int | None
):
    with pytest.raises(UsageError, match="are in service"):
        cast(in_service, nodes, spares)
