"""Tests of how many nodes and spares a drill uses."""

import pytest

from dalsegno.drill.schedule import choose_size
from dalsegno.errors import UsageError


@pytest.mark.parametrize(
    ("in_service", "nodes", "spares", "found"),
    [
        (6, None, None, (4, 1)),
        (4, None, None, (4, 0)),  # the cluster's own spare is ready, although it is not in service
        (2, None, None, (2, 0)),
        (5, None, 2, (3, 2)),
        (6, 3, None, (3, 1)),
        (3, 3, 0, (3, 0)),
    ],
)
def test_the_defaults_are_four_nodes_and_one_spare_if_available(
    in_service: int, nodes: int | None, spares: int | None, found: tuple[int, int]
):
    assert choose_size(in_service, nodes, spares) == found


@pytest.mark.parametrize(("in_service", "nodes", "spares"), [(4, 4, 1), (4, 5, None), (0, None, None), (2, None, 2)])
def test_more_nodes_than_are_in_service_are_refused(in_service: int, nodes: int | None, spares: int | None):
    with pytest.raises(UsageError, match="are in service"):
        choose_size(in_service, nodes, spares)
