import numpy as np
import pytest

from jaxformer.data.shuffle import below, fractions, keys, mix, noise, permuted

SIZES = [1, 2, 3, 4, 5, 7, 16, 17, 63, 100, 1000, 4097]


@pytest.mark.parametrize("size", SIZES)
def test_permuted_is_a_permutation(size):
    for number in range(20):
        key = keys(1, 0, np.full(size, number))
        assert sorted(permuted(np.arange(size), size, key).tolist()) == list(range(size))


def test_permuted_answers_each_index_by_itself():
    key = keys(1, 0, np.zeros(100, int))
    whole = permuted(np.arange(100), 100, key)
    assert [int(permuted(np.array([i]), 100, key[:1])[0]) for i in range(100)] == whole.tolist()


def test_permuted_takes_a_key_for_each_index():
    size = 50
    index, number = np.tile(np.arange(size), 2), np.repeat([4, 5], size)
    both = permuted(index, size, keys(1, 0, number))
    assert (both[:size] == permuted(np.arange(size), size, keys(1, 0, number[:size]))).all()
    assert (both[size:] == permuted(np.arange(size), size, keys(1, 0, number[size:]))).all()
    assert (both[:size] != both[size:]).any()


@pytest.mark.parametrize("size", [12, 37])
def test_permuted_puts_every_index_everywhere_equally_often(size):
    """Chi-square of index -> place, and of the distance between neighbours, over many keys."""
    trials = 20_000
    places = np.stack([permuted(np.full(trials, i), size, keys(3, 0, np.arange(trials))) for i in range(size)])
    counts = np.stack([np.bincount(row, minlength=size) for row in places])
    distances = np.bincount(((places[1:] - places[:-1]) % size).ravel(), minlength=size)
    expected = trials / size
    chi = ((counts - expected) ** 2 / expected).sum()
    freedom = (size - 1) ** 2
    assert abs(chi - freedom) < 6 * np.sqrt(2 * freedom)
    assert distances[0] == 0
    expected = trials  # (size - 1) neighbours fall on (size - 1) distances
    chi = ((distances[1:] - expected) ** 2 / expected).sum()
    assert chi < (size - 2) + 6 * np.sqrt(2 * (size - 2))


def test_keys_of_other_seeds_streams_and_numbers_differ():
    everything = [keys(seed, stream, np.arange(1000)) for seed in (0, 1, 2**31) for stream in (0, 1, 2)]
    assert len(set(np.concatenate(everything).tolist())) == 9000


def test_mix_is_injective_and_changes_half_the_bits():
    values = np.arange(1 << 14, dtype=np.uint64)
    mixed = mix(values)
    assert len(set(mixed.tolist())) == len(values)
    flips = np.bitwise_count(mixed ^ mix(values ^ np.uint64(1)))
    assert abs(flips.mean() - 32) < 0.5


@pytest.mark.parametrize("words", [4, 7, 128])
def test_noise_of_a_row_does_not_depend_on_the_rows_asked_with_it(words):
    whole = noise(5, 10, 8, words)
    assert whole.shape == (8, words)
    for row in range(8):
        assert (noise(5, 10 + row, 1, words) == whole[row]).all()
    assert len(set(whole.ravel().tolist())) == whole.size
    assert not (noise(6, 10, 8, words) == whole).any()


def test_noise_is_what_it_was():
    """A run resumed under another numpy must see the same noise: Philox's stream is fixed by its definition."""
    assert noise(1, 2, 1, 2).tolist() == GOLDEN_NOISE
    assert permuted(np.arange(8), 8, keys(1, 0, np.zeros(8, int))).tolist() == GOLDEN_ORDER


def test_below_and_fractions_are_uniform():
    bits = noise(0, 0, 100, 1000).ravel()
    counts = np.bincount(below(7, bits), minlength=7)
    expected = len(bits) / 7
    assert ((counts - expected) ** 2 / expected).sum() < 6 + 6 * np.sqrt(12)
    assert below(1, bits).max() == 0
    shares = fractions(bits)
    assert shares.min() >= 0 and shares.max() < 1
    assert abs(shares.mean() - 0.5) < 6 * np.sqrt(1 / 12 / len(bits))
    assert fractions(np.array([2**64 - 1], np.uint64))[0] < 1


GOLDEN_NOISE = [[7531101419052079111, 3116694405751838939]]
GOLDEN_ORDER = [2, 4, 5, 7, 1, 3, 6, 0]
