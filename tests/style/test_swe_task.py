"""The example task is what its README says: its history, its failing tests, the rewards of its patches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
TASK = ROOT / "examples" / "swe-task"
EXPECTED = json.loads((TASK / "expected.json").read_text())


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repo = tmp_path_factory.mktemp("swe-task") / "repo"
    subprocess.run(["sh", TASK / "make-history.sh", repo], check=True)
    return repo


def score(repo: Path) -> tuple[int, dict[str, object]]:
    # The guest has neither this session's plugins nor its settings.
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "AENV"))}
    environ |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, TASK / "score.py", "--repo", repo], env=environ, capture_output=True, text=True
    )
    return done.returncode, json.loads(done.stdout)


def test_history_is_the_same_everywhere(history: Path) -> None:
    head = subprocess.run(["git", "-C", history, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert head.stdout.strip() == "7eeb603474b809e773e663b0e96558b757729c01"


def test_recipe_expects_the_tests_that_a_fix_must_pass() -> None:
    recipe = yaml.safe_load((ROOT / "recipes" / "swe-task.yaml").read_text())
    verify = next(step["verify"] for step in recipe["steps"] if "verify" in step)
    assert verify["failed"] == EXPECTED["fail_to_pass"]


def test_exactly_the_expected_tests_fail(history: Path) -> None:
    assert score(history) == (
        1,
        {"reward": 0.0, "passed": len(EXPECTED["pass_to_pass"]), "failed": EXPECTED["fail_to_pass"]},
    )


@pytest.mark.parametrize(
    ("patch", "exit_code", "reward"),
    [("right", 0, 1.0), ("partial", 1, 0.3333), ("regression", 1, 0.0), ("docs-only", 1, 0.0)],
)
def test_patches_earn_their_rewards(
    history: Path, tmp_path: Path, patch: str, exit_code: int, reward: float
) -> None:
    copy = tmp_path / "repo"
    subprocess.run(["git", "clone", "--quiet", history, copy], check=True)
    subprocess.run(["git", "-C", copy, "apply", TASK / "patches" / f"{patch}.patch"], check=True)
    code, verdict = score(copy)
    assert (code, verdict["reward"]) == (exit_code, reward)
