"""The one command for all studies: what each prints is kept, and a study that fails is told."""

import re
import sys
from pathlib import Path

import pytest
from run_script import run_python

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "evidence.py"

PRINTS = "import os; print('Epoch 0: 28.7it/s'); print('| a table |', os.environ['OMP_NUM_THREADS'])"
FAILS = "import sys; print('half a table'); sys.exit('no such folder')"


@pytest.fixture
def called(example, tmp_path, monkeypatch, capfd):
    """The exit code of the command and what it says, for studies of our own."""

    def call(*studies, options=()):
        for name, source, _ in studies:
            (tmp_path / f"{name}.py").write_text(source)
        made = [example.Study(name, [f"{name}.py"], packages) for name, _, packages in studies]
        monkeypatch.setattr(example, "HERE", tmp_path)
        monkeypatch.setattr(example, "studies", lambda *_: made)
        monkeypatch.setattr(sys, "argv", ["evidence.py", "--out", str(tmp_path / "out"), *options])
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        with pytest.raises(SystemExit) as end:
            example.main()
        return end.value.code, capfd.readouterr()

    return call


def test_what_a_study_prints_is_kept(called, tmp_path):
    code, said = called(("first", PRINTS, ()), ("second", PRINTS, ()), ("third", PRINTS, ()))
    assert not code
    assert [line.split(":")[0] for line in sorted(said.out.splitlines())] == ["first", "second", "third"]
    for name in ("first", "second", "third"):
        assert (tmp_path / "out" / f"{name}.md").read_text() == "| a table | 1\n"


def test_a_study_that_fails_is_told_and_the_others_go_on(called, tmp_path):
    code, said = called(("bad", FAILS, ()), ("good", PRINTS, ()), options=["--jobs", "1"])
    assert code
    assert "FAILED" in next(line for line in said.out.splitlines() if line.startswith("bad"))
    assert "no such folder" in said.err
    assert (tmp_path / "out" / "good.md").exists()


def test_a_study_without_its_packages_is_left_out(called, tmp_path):
    code, said = called(("figures", FAILS, ("no_such_package", "sys")), ("good", PRINTS, ()))
    assert not code
    assert "figures: left out, for want of no_such_package" in said.out
    assert not (tmp_path / "out" / "figures.md").exists()


def test_only_those_asked_for(called, tmp_path):
    called(("one", PRINTS, ()), ("two", PRINTS, ()), options=["--only", "tw"])
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["two.md"]


@pytest.mark.parametrize("quick", [False, True])
def test_every_study_is_part_of_it(example, quick, tmp_path):
    commands = [study.command for study in example.studies(tmp_path, tmp_path / "pets", tmp_path / "xrays", quick)]
    of_page = {path.name for path in EXAMPLES.glob("[01][0-9]_*.py") if path.name[:2] >= "09"}
    assert of_page <= {command[0] for command in commands} <= {path.name for path in EXAMPLES.iterdir()}
    assert all(("--quick" in command) == quick for command in commands)


@pytest.mark.nightly
def test_all_studies_run_with_one_command(tmp_path):
    done = run_python(tmp_path, SCRIPT, "--quick", "--out", "out")
    names = set(re.findall(r"^(\w+): ", done.stdout, flags=re.MULTILINE))
    assert names == {
        "paper_figures",
        "shapes_with_masks",
        "sanity_checks",
        "label_noise",
        "shortcuts",
        "check",
        "drawn_x_rays",
    }
    left_out = set(re.findall(r"^(\w+): left out", done.stdout, flags=re.MULTILINE))  # without the extra `evidence`
    assert left_out <= {"paper_figures", "sanity_checks"}
    for name in names - left_out - {"paper_figures"}:  # which are pictures
        assert (tmp_path / "out" / f"{name}.md").read_text().count("|") > 20, name
