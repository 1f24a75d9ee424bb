"""Bad flags of the benchmark; the lines stand in bad_input.md."""

from bad_input_cases import expected, place

__all__ = ["place"]


def test_a_shape_of_another_suite(place):
    found = place.run("benchmark", "--suite=seq2seq", "--shape=gpt2")
    assert found == (2, expected()["shape of another suite"])


def test_a_shape_of_another_family(place):
    found = place.run("benchmark", "--suite=disentangled", "--shape=gpt2")
    assert found == (2, expected()["shape of another family"])


def test_a_row_that_transformers_layers_do_not_take(place):
    found = place.run("benchmark", "--suite=sparse", "--tokens=100")
    assert found == (2, expected()["row that transformers' layers do not take"])
