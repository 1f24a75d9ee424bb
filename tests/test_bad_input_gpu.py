"""What asks for a GPU's attention where it cannot be had; the lines stand in bad_input.md."""

from bad_input_cases import expected, place  # noqa: F401


def test_attention_of_a_gpu_that_is_not_here(place):  # noqa: F811
    found = place.pretrain("--config.execution.attention=flash_gpu")
    assert found == (2, expected()["attention of a GPU without one"])
    assert not (place.folder / "run").exists()


def test_heads_that_the_kernel_cannot_do(place):  # noqa: F811
    flags = ["--config.model.attention.head_width=512", "--config.execution.attention=flash_gpu"]
    command = [f"--config={place.config}", f"--config.data.files={place.text}", "--topology=cpu:1", *flags]
    assert place.run("plan", *command) == (2, expected()["attention of a GPU with heads too wide"])
