import numpy as np
import pytest

from tdstore.data.permutation import Permutation
from tdstore.errors import InvalidArgumentError, OutOfRangeError


@pytest.mark.parametrize("size", [0, 1, 2, 5, 4096, 4097, 10007, 99856, 100001])
def test_each_element_has_one_place(size: int) -> None:
    assert sorted(Permutation(size, (3, 1))(np.arange(size)).tolist()) == list(range(size))


def test_places_asked_apart_give_the_order_asked_at_once() -> None:
    order = Permutation(10**9, (0, 0))
    places = np.array([[0, 1], [999_999_999, 1]])
    assert order(places).tolist() == [[int(order(place.reshape(1))[0]) for place in row] for row in places]


def test_the_order_of_a_key_never_changes() -> None:
    assert Permutation(10**9, (0, 0))(np.array([0, 1, 10**9 - 1])).tolist() == [101449406, 872685582, 420236025]


def test_elements_are_uniform_over_places_and_neighbours_independent() -> None:
    size, elements, steps = 100_003, np.zeros((20, 20)), np.zeros(20)
    for key in range(400):
        found = Permutation(size, (key, 0))(np.arange(20) * 5001)
        np.add.at(elements, (np.arange(20), found * 20 // size), 1)
        np.add.at(steps, (np.diff(Permutation(size, (key, 1))(np.arange(64))) % size) * 20 // size, 1)
    assert ((elements - 20) ** 2 / 20).sum() < 500  # chi squared of 380 degrees of freedom: 1 in 50,000
    assert ((steps - steps.mean()) ** 2 / steps.mean()).sum() < 50  # of 19 degrees: 1 in 7,000


def test_what_is_outside_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="-1 elements"):
        Permutation(-1, (0,))
    with pytest.raises(OutOfRangeError, match="order of 5"):
        Permutation(5, (0,))(np.array([5]))
