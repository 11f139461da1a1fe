"""``fourstroke why``: a stall has a name, and the decision that ends it is on record."""

import json
import re

import pytest

from fourstroke.store import RunStatus, read_events, read_summary

pytestmark = pytest.mark.timeout(900)

GROUP = "e0000-i000005"


def test_a_grader_that_hangs_is_named_and_then_killed(place):
    file = place.folder / "hung"
    running = place.train(
        num_steps=3,
        grader={"use": "graders:hanging", "arguments": {"group": GROUP, "file": str(file)}},
        deadlines={"grade_s": 45.0},
        evaluation={"before": False, "after": False},
    )
    running.wait_for(file.exists)
    folder = place.run_folder()
    grader = int(file.read_text())

    def asked(*options):
        code, output, errors = place.start("why", folder, *options).end()
        assert (code, errors) == (0, "")
        return output

    # The report is written each second; the first may be from before.
    running.wait_for(lambda: f"the grader of {GROUP}, attempt 0" in asked())
    output = asked()

    first, *lines = output.splitlines()
    assert re.fullmatch(rf"{folder.name} \(process \d+\) runs: train, step 1, \d+ s ago", first)
    assert any(re.fullmatch(rf"  worker-0 waits for the grader of {GROUP}, attempt 0: \d+ s", line) for line in lines)
    sampled = rf"  controller waits for group {GROUP}, attempt 0, to be sampled and graded: \d+ s, at most 600 s"
    assert any(re.fullmatch(sampled, line) for line in lines)
    assert any(line.startswith("  controller waits for the groups of step 2: ") for line in lines)
    report = json.loads(asked("--json"))
    assert report["is_alive"] is True
    assert report["step"] == 1
    assert f"the grader of {GROUP}, attempt 0" in [wait["what"] for wait in report["waits"]]
    audited, output, _ = place.start("ledger", "audit", folder, "--json").end()
    assert audited == 0
    assert json.loads(output)["trained"] == 4

    code, _, errors = running.end()

    assert code == 0, errors
    assert read_summary(folder / "summary.json").status is RunStatus.FINISHED
    assert place.audit().trained == 12
    events = read_events(folder / "events.jsonl")
    (unscored,) = [event.fields for event in events if event.kind == "episode_unscored"]
    assert unscored["episode"] == f"{GROUP}.0"
    assert unscored["reason"] == "timeout"
    assert str(grader) in unscored["detail"] or "45" in unscored["detail"]
    first, *_ = asked().splitlines()
    assert "is not running; this is what it last said: " in first
