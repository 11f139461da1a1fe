"""The pages over HTTP: what they say, what they refuse, and what hostile text does to them."""

import os
import re
from html.parser import HTMLParser

import pytest

from fourstroke.algorithms import group_advantages
from fourstroke.dashboard.charts import number_text
from fourstroke.dashboard.runs import Runs
from fourstroke.store import Ledger
from fourstroke.testing.recorded_run import RecordedRun

TOKEN = "correct horse battery"
TABS = ("", "/episodes", "/timeline", "/distributions", "/weights")


class Elements(HTMLParser):
    """Every start tag of a page with its attributes, and its text."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.words = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def _text(answer):
    assert answer.status_code == 200, answer.text
    return Elements(answer.text).text


def test_the_overview_says_what_each_run_came_to(served):
    client, (name,) = served(RecordedRun(name="one", num_steps=3))

    text = _text(client.get("/"))

    assert f"{name} finished 3 / 3" in text
    assert "balanced" in text


def test_a_runs_page_has_its_balance_and_drops(served):
    # 2 steps of 4 groups; draw 8 of 9 would be the first dropped one, so that 9 need 3 steps.
    client, (name,) = served(RecordedRun(num_steps=3, groups_per_step=4))

    text = _text(client.get(f"/runs/{name}"))

    assert "draws 13 12 1 0" in text
    assert "attempts 12 12 0 0" in text
    assert "too_few_scored 1" in text
    assert "not balanced" not in text


def test_a_ledger_that_does_not_balance_is_said_so(served, runs_dir):
    client, (name,) = served(RecordedRun(num_steps=1))
    ledger = Ledger(runs_dir / name / "ledger.sqlite")
    ledger._file.count("drawn")
    ledger.close()

    assert "not balanced" in _text(client.get("/"))
    assert "it does not balance" in _text(client.get(f"/runs/{name}"))


def test_curves_compare_runs_with_intervals(served):
    client, (one, two) = served(RecordedRun(name="one"), RecordedRun(name="two", seed=1))

    answer = client.get("/curves", params={"run": [one, two]})
    page = Elements(answer.text)

    assert "score of the trained groups" in page.text
    assert sum(tag == "polygon" for tag, _ in page.tags) == 4  # scores and evaluations, of two runs
    assert page.text.count(two) > page.text.count("train/loss/loss") > 0
    assert two not in Elements(client.get("/curves", params={"run": one}).text).text.split("Show", 1)[1]


def test_episodes_are_filtered_and_lead_to_each_episode(served):
    client, (name,) = served(RecordedRun(num_steps=4, groups_per_step=4, group_size=4))

    answer = client.get(f"/runs/{name}/episodes", params={"verdict": "tamper"})
    text = _text(answer)
    links = re.findall(r'href="(/runs/[^"]*/groups/[^"]*)"', answer.text)

    assert "2 episodes" in text  # of 64 verdicts each 23rd
    assert len(links) == 2
    episode = _text(client.get(links[0]))
    assert "wrote to the grader's folder" in episode
    assert "The sum of" in episode
    assert "advantage not trained on" in episode


def test_pages_of_episodes_keep_their_filter(served):
    client, (name,) = served(RecordedRun(num_steps=8, groups_per_step=4, group_size=4))

    answer = client.get(f"/runs/{name}/episodes", params={"stop": "finished", "page": "2"})

    assert 'href="?stop=finished&amp;page=1"' in answer.text
    assert "Page 2 of 3" in Elements(answer.text).text


def test_a_groups_members_stand_side_by_side_with_their_advantages(served):
    client, (name,) = served(RecordedRun(num_steps=1, groups_per_step=1, group_size=4, seed=3))

    page = Elements(client.get(f"/runs/{name}/groups/e0000-i000000/0/0").text)

    assert sum(tag == "article" for tag, _ in page.tags) == 4
    assert "trained on version 0 in step 1" in page.text
    assert page.text.count("advantage") == 4


def test_an_advantage_that_other_groups_decide_is_not_worked_out_from_one(served, runs_dir):
    client, (name,) = served(RecordedRun(num_steps=2, groups_per_step=2, group_size=4, seed=5))
    config = runs_dir / name / "config.yaml"
    config.write_text(config.read_text().replace("advantage: group_standardised", "advantage: batch_standardised"))

    text = _text(client.get(f"/runs/{name}/groups/e0000-i000002/0/0/0"))

    assert "advantage batch_standardised needs more than the group's scores" in text


def test_the_advantage_is_that_of_the_runs_rule(served, runs_dir):
    client, (name,) = served(RecordedRun(num_steps=2, groups_per_step=2, group_size=4, seed=5))
    (run,) = Runs([runs_dir]).all()
    group = run.group("e0000-i000002", incarnation=0, attempt=0)
    wanted = group_advantages(group.scores_G, kind="group_standardised")

    text = _text(client.get(f"/runs/{name}/groups/e0000-i000002/0/0/0"))

    assert f"advantage {number_text(float(wanted[0]))} group_standardised" in text


def test_tokens_are_shown_as_text_and_as_a_table(served):
    client, (name,) = served(RecordedRun(num_steps=1, groups_per_step=1))
    place = f"/runs/{name}/groups/e0000-i000000/0/0/0"

    as_text = client.get(place, params={"colour": "mask reason"}).text
    as_table = Elements(client.get(place, params={"view": "table", "colour": "version"}).text)

    assert 'class="token mask-prompt"' in as_text
    assert 'class="token mask-sampled"' in as_text
    assert "position id text log-probability probability version mask engine" in as_table.text
    assert "vllm-0" in as_table.text


def test_distributions_weights_and_timeline_say_what_was_recorded(served):
    client, (name,) = served(RecordedRun(num_steps=3))

    distributions = _text(client.get(f"/runs/{name}/distributions"))
    weights = _text(client.get(f"/runs/{name}/weights"))
    timeline = _text(client.get(f"/runs/{name}/timeline"))

    assert "48 episodes of all results" in distributions
    assert "Trained tokens by lag" in distributions
    assert "0.3 00000003 3 0:30" in weights
    assert "rollout 6." in timeline
    assert "worker-0 request e0000-i000001 to be sampled 1.5 600" in timeline
    assert "weights landed" in timeline
    only = _text(client.get(f"/runs/{name}/timeline", params={"kind": "weights_landed"}))
    assert "3 events" in only


def test_a_run_that_goes_on_is_looked_at_again(served):
    client, (name,) = served(RecordedRun(num_steps=1, is_ended=False, pid=os.getpid()))

    assert f"{name} running" in _text(client.get("/"))
    for tab in TABS:
        assert 'data-refresh="3"' in client.get(f"/runs/{name}{tab}").text


def test_a_run_whose_process_is_gone_is_not_running(served):
    client, (name,) = served(RecordedRun(num_steps=1, is_ended=False, pid=2**22 + 1))

    assert f"{name} not running" in _text(client.get("/"))
    assert 'data-refresh="0"' in client.get(f"/runs/{name}").text


def test_a_run_that_was_resumed_and_killed_does_not_keep_its_first_end(served, runs_dir):
    client, (name,) = served(RecordedRun(num_steps=1, pid=2**22 + 1))
    assert f"{name} finished" in _text(client.get("/"))
    ended = (runs_dir / name / "summary.json").stat().st_mtime_ns

    os.utime(runs_dir / name / "waits.json", ns=(ended + 1, ended + 1))

    assert f"{name} not running" in _text(client.get("/"))


def test_hostile_waits_are_only_text(served, runs_dir):
    client, (name,) = served(RecordedRun(num_steps=1, is_ended=False, pid=os.getpid()))
    file = runs_dir / name / "waits.json"
    file.write_text(file.read_text().replace("to be sampled", "<b>\\u202e\\u0007"))

    for tab in ("", "/timeline"):
        text = _text(client.get(f"/runs/{name}{tab}"))
        assert "<b>\\u202e\\x07" in text


# --- hostile text ---------------------------------------------------------------------------------------------------

HOSTILE = (
    "<script>hacked = 1</script><img src=x onerror=hacked=1><a href='javascript:hacked=1'>x</a>",
    "</pre></main></body><h1>out</h1>\"'><svg onload=hacked=1>",
    "{{ 7 * 7 }}{% include 'login.html' %}",
    "a\x00b\x1b[31m\u202eright\u2066 \u200b\x07",
)


@pytest.mark.parametrize("member", range(len(HOSTILE)))
def test_hostile_text_is_only_text(served, member):
    client, (name,) = served(RecordedRun(num_steps=1, groups_per_step=1, replies=HOSTILE))
    place = f"/runs/{name}/groups/e0000-i000000/0/0"

    for address in (place, f"{place}/{member}", f"{place}/{member}/text/0"):
        page = Elements(client.get(address).text)
        tags = {tag for tag, _ in page.tags}
        assert [attrs["src"] for tag, attrs in page.tags if tag == "script"] == ["/static/page.js"]
        assert not {"img", "iframe", "object", "embed"} & tags
        assert not any(key.startswith("on") for _, attrs in page.tags for key in attrs)
        assert not any((attrs.get("href") or "").startswith("javascript") for _, attrs in page.tags)
        assert sum(tag == "h1" for tag, _ in page.tags) == 1
        assert not set("\x00\x1b\u202e\u2066\u200b\x07") & set("".join(page.words))
    assert "49" not in Elements(client.get(f"{place}/2/text/0").text).text.split("}")[0]


def test_ten_megabytes_are_shown_in_pages(served):
    text = "".join(f"{n:09d}\n" for n in range(1_000_000))
    client, (name,) = served(RecordedRun(num_steps=1, groups_per_step=1, group_size=2, replies=(text,)))
    place = f"/runs/{name}/groups/e0000-i000000/0/0"

    episode = client.get(f"{place}/0")
    first, last = (client.get(f"{place}/0/text/0", params={"part": part}) for part in ("1", "500"))

    assert len(client.get(place).text) < 50_000
    assert len(episode.text) < 100_000
    assert "All 10,000,000 characters, in pages" in Elements(episode.text).text
    assert "000000000" in first.text
    assert "000999999" in last.text
    assert "Page 500 of 500" in Elements(last.text).text


# --- who may ask ----------------------------------------------------------------------------------------------------


def test_every_answer_forbids_what_is_not_the_dashboards_own(served):
    client, (name,) = served(RecordedRun(num_steps=1))

    for address in ("/", f"/runs/{name}/episodes", "/static/page.js", "/nowhere", f"/runs/{name}/episodes?step=x"):
        headers = client.get(address).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert headers["x-content-type-options"] == "nosniff"


def test_no_page_names_another_host(served):
    client, (name,) = served(RecordedRun(num_steps=1))

    for address in ("/", "/curves", *(f"/runs/{name}{tab}" for tab in TABS), "/static/style.css", "/static/page.js"):
        assert not re.search(r"""(src|href|url|fetch)\W{0,3}(https?:)?//""", client.get(address).text)


@pytest.mark.parametrize("base_url", ["http://evil.example", "http://127.0.0.1.evil.example:8765", "http://10.0.0.1"])
def test_a_name_that_was_made_to_lead_here_is_refused(served, base_url):
    client, _ = served(RecordedRun(num_steps=1), base_url=base_url)

    answer = client.get("/")

    assert answer.status_code == 421
    assert "finished" not in answer.text


@pytest.mark.parametrize("base_url", ["http://localhost:1", "http://127.0.0.1", "http://[::1]:8765"])
def test_loopback_names_are_answered(served, base_url):
    client, _ = served(RecordedRun(num_steps=1), base_url=base_url)

    assert client.get("/").status_code == 200


def test_with_a_token_nothing_is_shown_without_it(served):
    client, (name,) = served(RecordedRun(num_steps=1), token=TOKEN, base_url="http://box.example")

    for address in ("/", "/curves", f"/runs/{name}", f"/runs/{name}/episodes", "/nowhere"):
        answer = client.get(address)
        assert answer.status_code == 401
        assert name not in answer.text
    for header in ("", "Bearer ", "Bearer correct horse batter", f"Bearer {TOKEN}x", "Bearer \xe4"):
        assert client.get("/", headers={"authorization": header.encode("latin-1")}).status_code == 401
    assert client.get("/", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_the_token_is_given_once_in_a_form_and_kept_by_nobody(served):
    client, _ = served(RecordedRun(num_steps=1), token=TOKEN, base_url="http://box.example")

    wrong = client.post("/login", content="token=wrong")
    right = client.post("/login", content=f"token={TOKEN.replace(' ', '+')}", follow_redirects=False)

    assert wrong.status_code == 401
    assert "That is not the token" in wrong.text
    assert right.status_code == 303
    cookie = right.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert TOKEN not in cookie
    assert client.get("/").status_code == 200
    assert client.post("/login", content="token=" + "x" * 5000).status_code == 413


# --- mistakes and damage --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "status", "sentence"),
    [
        ("/runs/nowhere", 404, "there is no such run"),
        ("/runs/{name}/groups/e0000-i009999/0/0", 404, "the run has no such group"),
        ("/runs/{name}/groups/e0000-i000000/0/0/9", 404, "the group has no such member"),
        ("/runs/{name}/groups/e0000-i000000/0/0/0/text/9", 404, "the episode has no such message"),
        ("/runs/{name}/groups/e0000-i000000/0/0/0/text/-2", 404, "the episode has no such message"),
        ("/runs/{name}/episodes?step=one", 400, "step = 'one' is no number"),
        ("/runs/{name}/episodes?verdict=<b>", 400, "verdict = '<b>' is unknown"),
        ("/runs/{name}/timeline?kind=x", 400, "kind = 'x' is unknown"),
        ("/static/../app.py", 404, "Not Found"),
        ("/static/%2e%2e/app.py", 404, "Not Found"),
    ],
)
def test_a_mistake_is_one_sentence(served, path, status, sentence):
    client, (name,) = served(RecordedRun(num_steps=1))

    answer = client.get(path.format(name=name))

    assert answer.status_code == status
    assert sentence in Elements(answer.text).text


def test_damage_is_one_sentence_and_hides_no_other_run(served, runs_dir):
    client, (one, two) = served(RecordedRun(name="one", num_steps=1), RecordedRun(name="two", num_steps=1))
    (runs_dir / one / "metrics.jsonl").write_text("{\n")
    (runs_dir / "broken").mkdir()
    (runs_dir / "broken" / "run.json").write_text("[]")

    text = _text(client.get("/"))
    answer = client.get(f"/runs/{one}")

    assert two in text
    assert "line 1 of" in text
    assert "is damaged" in text
    assert answer.status_code == 500
    assert "line 1 of" in Elements(answer.text).text


def test_a_payload_that_is_gone_is_one_sentence(served, runs_dir):
    client, (name,) = served(RecordedRun(num_steps=1))
    for segment in (runs_dir / name / "payload").iterdir():
        segment.unlink()

    answer = client.get(f"/runs/{name}/groups/e0000-i000000/0/0/0")

    assert answer.status_code == 500
    assert "is damaged at offset 0" in Elements(answer.text).text
    assert client.get(f"/runs/{name}/episodes").status_code == 200


def test_a_new_run_shows_without_a_restart(served):
    client, _ = served(RecordedRun(name="one", num_steps=1))
    assert "1 run," in _text(client.get("/"))

    served(RecordedRun(name="two", num_steps=1))

    assert "2 runs," in _text(client.get("/"))
