"""Teachers that cannot be; the lines stand in bad_input.md."""

import pytest
from bad_input_cases import TINY, expected, place

__all__ = ["place"]

FLAGS = {
    "teacher that is no run": ["--config.distill.teacher=DIR/nothing"],
    "teacher that nobody listens to": ["--config.distill.soft_weight=0", "--config.distill.cosine_weight=0"],
    "teacher and another run to start from": ["--config.distill.teacher=DIR/a", "--config.init_from=DIR/b"],
}


@pytest.mark.parametrize("case", FLAGS)
def test_flags(place, case):
    flags = [flag.replace("DIR", str(place.folder)) for flag in FLAGS[case]]
    assert place.pretrain(*flags) == (2, expected()[case])
    assert not (place.folder / "run" / "manifest.json").exists()


@pytest.mark.parametrize(("case", "flag"), [
    ("study of scaling with a teacher", "--config.distill.teacher=a"),
    ("study of scaling with trained weights", "--config.init_from=a"),
])  # fmt: skip
def test_studies_train_from_scratch(place, case, flag):
    found = place.run("scaling", f"--config={place.config}", *TINY, flag, "--stage=plan")
    assert found == (2, expected()[case])


RUNS = {
    "teacher of another family": ["--config.model.family=bert", "--config.data.objective=masked"],
    "teacher that reads less": ["--config.model.context_length=32"],
    "teacher of another width": ["--config.model.width=32"],
    "teacher with other parameters": ["--config.model.norm=rms_norm"],
}


@pytest.mark.slow
def test_runs_that_cannot_teach(place):
    assert place.pretrain(workdir="teacher")[0] == 0
    teacher = f"--config.distill.teacher={place.folder / 'teacher'}"
    for case in ("teacher of another family", "teacher that reads less", "teacher of another width"):
        assert place.pretrain(teacher, *RUNS[case]) == (2, expected()[case])
    case = "teacher with other parameters"
    assert place.pretrain(teacher, *RUNS[case]) == (2, expected()[case])
    found = place.run("plan", f"--config={place.config}", *TINY, teacher, "--topology=cpu:1")
    assert found == (2, expected()["plan of a run with a teacher"])
    assert not (place.folder / "run" / "manifest.json").exists()
