"""`its2clr reproduce` as a user runs it."""

import json
import os
import shutil
import signal
import subprocess
import time

import pandas as pd
import pytest
from tests.conftest import TINY
from tests.end_to_end.commands import command, environment, its2clr
from tests.end_to_end.test_promises import change_labels

from its2clr import plugins as plugins_module
from its2clr.cluster import workers
from its2clr.cluster.place import Cluster
from its2clr.cohort import Cohort
from its2clr.cohort.synthetic.synthetic_cohort import SIZES, make_synthetic
from its2clr.experiments.execute import LOST, Task, execute
from its2clr.experiments.plan import Job
from its2clr.experiments.spec import Resampling, experiments
from its2clr.settings import resolve_config

SIX_MINUTES = 360


@pytest.fixture(scope="module")
def few_bags(tmp_path_factory):
    """A cohort of eight bags per split: what is trained here is one of a hundred runs, and nobody looks at numbers."""
    folder = tmp_path_factory.mktemp("few") / "cohort"
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(SIZES, "tiny", SIZES["tiny"]._replace(train=8, val=8, test=8))
        make_synthetic(folder, size="tiny", workers=1)
    return folder


@pytest.mark.slow
@pytest.mark.xdist_group("reproduce")
def test_all_of_the_paper_in_one_command(few_bags, tmp_path):
    out = tmp_path / "out"
    started = time.monotonic()
    arguments = ["--budget", "smoke", "--cohort", few_bags, "--out", out]
    first = its2clr("reproduce", "all", *arguments, "--workers", 2, fresh=True, timeout=900)
    seconds = time.monotonic() - started
    assert "FAILED" not in first.stdout
    page = (out / "results.md").read_text()
    for label, spec in experiments().items():
        folder = out / spec.folder
        assert f"`{label}`" in page
        assert {"README.md", "table.csv", "result.json"} <= {path.name for path in folder.iterdir()}
        assert (folder / "plot.png").is_file() == (spec.kind != "drawing"), label
        result = json.loads((folder / "result.json").read_text())
        assert result["budget"] == "smoke"
        if spec.kind == "table":
            found = pd.read_csv(folder / "table.csv").set_index(["row", "column"])
            for place, cell in spec.cells().items():
                assert pd.isna(found.loc[place, "ours"]) == (cell.missing is not None), (label, place)
                number = spec.paper[place[0]][list(spec.columns).index(place[1])]
                assert (
                    pd.isna(found.loc[place, "paper"]) if number is None else found.loc[place, "paper"] == number.mean
                )
        elif spec.kind == "sweep":
            found = pd.read_csv(folder / "table.csv")
            assert found["ours"].notna().all()
            assert len(found) == 3 * sum(len(sweep.values) for sweep in spec.sweeps.values())
        elif spec.kind in ("curves", "training"):
            assert set(pd.read_csv(folder / "table.csv")["line"]) >= set(spec.lines), label
    assert len(pd.read_csv(out / "problems.csv")) == 0
    assert seconds < SIX_MINUTES

    # The same again trains nothing: every run is there.
    def written():
        return {path: path.stat().st_mtime_ns for path in (out / "runs").rglob("*.safetensors")}

    before = written()
    table = out / experiments()["tab:aggregator_results"].folder / "table.csv"
    numbers = table.read_text()
    its2clr("reproduce", "tab:aggregator_results", *arguments, "--workers", 1, timeout=300)
    assert written() == before
    assert table.read_text() == numbers


@pytest.mark.slow
def test_without_instance_labels_what_needs_them_is_left_out_and_said(few_bags, tmp_path):
    cohort = tmp_path / "cohort"
    shutil.copytree(few_bags, cohort)
    info = json.loads((cohort / "cohort.json").read_text())
    (cohort / "cohort.json").write_text(json.dumps({**info, "has_instance_labels": False}))
    change_labels(cohort, lambda label: label, lambda labels: None, ["train", "val", "test"])
    out = tmp_path / "out"
    its2clr(
        "reproduce", "tab:mainresult", "tab:WR_exp", "tab:instance_test", "fig:localization",
        "--budget", "smoke", "--cohort", cohort, "--out", out, "--workers", 1,
    )  # fmt: skip
    main = pd.read_csv(out / "tab-mainresult" / "table.csv")
    assert main["ours"].notna().all()
    rates = pd.read_csv(out / "tab-WR_exp" / "table.csv").set_index(["row", "column"])
    assert pd.notna(rates.loc[("Original", "ItS2CLR"), "ours"])
    assert pd.isna(rates.loc[("5% Neg.", "ItS2CLR"), "ours"])
    assert "needs instance labels" in rates.loc[("Original", "Finetuning w. instance GT"), "reason"]
    assert pd.read_csv(out / "tab-instance_test" / "table.csv")["ours"].isna().all()


@pytest.mark.slow
def test_a_run_that_fails_is_a_row_in_a_table_not_a_crash(few_bags, tmp_path):
    out = tmp_path / "out"
    result = its2clr(
        "reproduce", "app:hyperparameter", "--budget", "smoke", "--cohort", few_bags, "--out", out, "--workers", 1,
        "--set", "refine.learning_rate=1e30", check=False,
    )  # fmt: skip
    assert result.returncode == 1
    assert "FAILED: TrainingError" in result.stdout
    found = pd.read_csv(out / "app-hyperparameter" / "table.csv")
    assert found["ours"].isna().all()
    assert found["reason"].str.contains("loss became").all()
    assert len(pd.read_csv(out / "problems.csv")) == 2
    # Other settings in the same folder are other runs, from the same pretraining.
    again = its2clr(
        "reproduce", "app:hyperparameter", "--budget", "smoke", "--cohort", few_bags, "--out", out, "--workers", 1,
    )  # fmt: skip
    assert "FAILED" not in again.stdout
    assert pd.read_csv(out / "app-hyperparameter" / "table.csv")["ours"].notna().all()
    runs = pd.read_csv(out / "runs.csv", dtype=str)
    assert sorted(runs["stage"]) == ["pretrain", "refine", "refine", "refine", "refine"]
    assert set(runs["seed"]) == {"0"}
    assert len(pd.read_csv(out / "problems.csv")) == 2


@pytest.mark.slow
def test_tables_can_be_made_of_what_is_finished(few_bags, tmp_path):
    out = tmp_path / "out"
    arguments = ["--budget", "smoke", "--cohort", few_bags, "--out", out]
    drawn = tmp_path / "drawn"
    its2clr("reproduce", "all", "--budget", "smoke", "--out", drawn, "--no-train")
    assert pd.read_csv(drawn / "tab-mainresult" / "table.csv")["ours"].isna().all()
    assert len(Cohort.open(drawn / "cohort").bags) == 56  # the budget's own
    assert not (drawn / "runs").exists()
    its2clr("reproduce", "app:hyperparameter", *arguments, "--workers", 1)
    its2clr("reproduce", "tab:mainresult", "fig:training_process", *arguments, "--no-train")
    found = pd.read_csv(out / "tab-mainresult" / "table.csv").set_index(["row", "column"])
    assert pd.notna(found.loc[("ItS2CLR", "Camelyon16"), "ours"])
    assert found.loc[("ItS2CLR", "EGFR"), "reason"] == "seed 0: not run"
    its2clr("reproduce", "tab:mainresult", "--budget", "quick", "--cohort", few_bags, "--out", out, "--no-train")
    assert pd.read_csv(out / "tab-mainresult" / "table.csv")["ours"].isna().all()  # those runs were smoke's
    assert set(pd.read_csv(out / "fig-training_process" / "table.csv")["line"]) == {"ItS2CLR"}


@pytest.mark.slow
def test_measuring_more_later_keeps_what_was_measured(few_bags, tmp_path):
    arguments = ["--budget", "smoke", "--cohort", few_bags, "--out", tmp_path / "out", "--workers", 1]
    for name in ("tab:calsscollision", "tab:instance_test2"):
        its2clr("reproduce", name, *arguments)
    its2clr("reproduce", "tab:calsscollision", "tab:mainresult", "fig:training_process", *arguments, "--no-train")
    assert pd.read_csv(tmp_path / "out" / "tab-calsscollision" / "table.csv")["ours"].notna().all()


@pytest.mark.slow
def test_maps_are_of_the_cohort_of_their_dataset(few_bags, tmp_path):
    other = tmp_path / "other"
    its2clr("cohort", "synthetic", other, "--size", "tiny", "--seed", 3)
    out = tmp_path / "out"
    cohorts = ["--cohort", f"tcga-egfr={other}", "--cohort", f"camelyon16={few_bags}"]
    its2clr("reproduce", "fig:localization", "--budget", "smoke", *cohorts, "--out", out, "--workers", 1)
    found = pd.read_csv(out / "fig-localization" / "table.csv")
    truth = Cohort.open(few_bags)
    bag = found["bag_id"].unique().tolist()
    assert len(bag) == 1
    assert truth.bags.set_index("bag_id").loc[bag[0], "label"] == 1
    one = found[found["model"] == "ItS2CLR"]
    assert one["label"].tolist() == truth.tile_file(bag[0]).labels.tolist()


def still_alive(group, seconds=10):
    """Whether a process of the group lives on."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.slow
@pytest.mark.parametrize(("stop", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_slurm_end_all_workers_and_the_same_command_goes_on(few_bags, tmp_path, stop, code):
    out = tmp_path / "out"
    words = command(
        "reproduce", "app:hyperparameter", "--budget", "smoke", "--cohort", few_bags, "--out", out, "--workers", 2
    )
    heard = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    process = subprocess.Popen(
        [words[0], "-c", heard, *words],  # tests in the background are started deaf to Ctrl-C
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("[1/"):
            break
    for _ in range(2):  # an impatient user
        os.killpg(process.pid, stop)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == code, said
    assert not {word for word in ("Traceback", "FAILED") if word in said}, said
    assert "the same command goes on where it stopped" in said
    assert not still_alive(process.pid)
    if stop == signal.SIGTERM:
        return
    assert words[-1] == "2"
    its2clr(*words[3:-1], 1)
    assert pd.read_csv(out / "app-hyperparameter" / "table.csv")["ours"].notna().all()


@pytest.mark.slow
def test_workers_end_with_a_killed_parent(few_bags, tmp_path):
    words = command(
        "reproduce", "app:hyperparameter", "--budget", "smoke", "--cohort", few_bags, "--out", tmp_path / "out",
        "--workers", 2,
    )  # fmt: skip
    process = subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("[1/"):
            break
    process.kill()
    process.wait()
    assert not still_alive(process.pid, seconds=20)


def test_a_lost_worker_costs_its_task_only(tmp_path, monkeypatch):
    """Tasks that kill their own process, by way of a plugin, beside one that is well."""
    monkeypatch.setitem(workers._SETTINGS, "distributed.scheduler.allowed-failures", 0)
    monkeypatch.setattr(plugins_module, "_allowed", {str(tmp_path / "deadly.py")})
    plugin = tmp_path / "deadly.py"
    plugin.write_text("import os\nos.kill(os.getpid(), 9)\n")
    base = resolve_config("demo", TINY).model_dump(mode="json")
    tasks = {}
    for seed, plugins in enumerate([[str(plugin)], [str(plugin)], []]):
        job = Job("pretrain", "/nowhere", Resampling(), (), seed)
        settings = {**base, "plugins": plugins}
        tasks[job] = Task(job, tmp_path / f"run{seed}", tmp_path / "nowhere", settings, (), of_features=False)
    outcomes = []
    failures = execute(tasks, Cluster(workers=2), lambda outcome, done, total: outcomes.append(outcome))
    assert [outcome.job.seed for outcome in sorted(outcomes, key=lambda one: one.job.seed)] == [0, 1, 2]
    reasons = [failures[job] for job in tasks]
    assert reasons[0] == reasons[1] == LOST
    assert "InputError" in reasons[2]  # there is no such cohort, but its worker lived to say so


def test_a_failed_task_leaves_no_process_to_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(plugins_module, "_allowed", {str(tmp_path / "failing.py")})
    plugin = tmp_path / "failing.py"
    plugin.write_text(
        f"import os\nopen({str(tmp_path / 'pids')!r}, 'a').write(f'{{os.getpid()}} ')\nraise ValueError\n"
    )
    settings = {**resolve_config("demo", TINY).model_dump(mode="json"), "plugins": [str(plugin)]}
    jobs = [Job("pretrain", "/nowhere", Resampling(), (), seed) for seed in range(3)]
    tasks = {job: Task(job, tmp_path / f"run{job.seed}", tmp_path, settings, (), of_features=False) for job in jobs}
    assert len(execute(tasks, Cluster(workers=2), lambda outcome, done, total: None)) == 3
    assert len(set((tmp_path / "pids").read_text().split())) == 3


def test_the_list_and_mistakes():
    assert "tab:WR_exp" in its2clr("reproduce", "--list").stdout
    wrong = its2clr("reproduce", "tab:mainresul", check=False)
    assert wrong.returncode == 2
    assert "did you mean 'tab:mainresult'?" in wrong.stderr
    wrong = its2clr("reproduce", "tab:mainresult", "--budget", "paper", check=False)
    assert wrong.returncode == 2
    assert "needs a cohort of yours" in wrong.stderr
