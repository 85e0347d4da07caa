"""Moves of aliases: promotion, refusal, request, rollback, each with one entry in the audit log, also after kills."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rlcore.errors import PromotionError
from rlcore.tasks.promotion import champion
from rlcore.tasks.promotion.champion import Grounds, find_champion
from rlcore.tasks.store.audit_log import AuditEntry, chain_errors, read_entries
from rlcore.tasks.store.settings import Home
from rlcore.tasks.tracking.registry import (
    CANDIDATE,
    CHALLENGER,
    CHAMPION,
    PREVIOUS,
    ModelVersion,
    find_version,
    read_tags,
    set_alias,
    set_tags,
)
from rlcore.tasks.tracking.runs import Tracker, open_tracker
from tests.registered import ANNA, Killed, dying, kills_until_done, promote, register_versions, roll_back
from tests.ssh_keys import ask_for_approvals
from tests.tasks.homes import copy_home, new_home
from tests.waiting import LONG

Made = tuple[Home, list[ModelVersion]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, _empty_mlflow_database: Path) -> Made:
    folder = tmp_path_factory.mktemp("versions")
    with new_home(folder, _empty_mlflow_database) as home:
        return home, register_versions(open_tracker(home), folder / "model", "m")


@pytest.fixture
def versions(tracked_home: Home, made: Made) -> list[ModelVersion]:
    copy_home(made[0], tracked_home)
    return made[1]


@pytest.fixture
def tracker(tracked_home: Home, versions: list[ModelVersion]) -> Tracker:
    return open_tracker(tracked_home)


RACE = """
import sys
from rlcore.errors import ModelError, PromotionError
from rlcore.tasks.promotion.champion import Grounds, promote
from rlcore.tasks.tracking.registry import ModelVersion, find_version
from rlcore.tasks.store.settings import configure_environment, find_home
from rlcore.tasks.tracking.runs import open_tracker
home = find_home()
configure_environment(home)
tracker = open_tracker(home)
over = find_version(tracker, "m", "champion")
mine = ModelVersion(name="m", version=int(sys.argv[1]), model_id=sys.argv[2], sha256=sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
try:
    promote(home, tracker, mine, Grounds(over=over, verdict="v", sentence=""), actor={})
    print("promoted", flush=True)
except PromotionError as error:
    print("refused:", error.what, flush=True)
"""


def aliases(tracker: Tracker) -> dict[str, int]:
    found = {alias: find_version(tracker, "m", alias) for alias in (CHAMPION, CHALLENGER, PREVIOUS, CANDIDATE)}
    return {alias: version.version for alias, version in found.items() if version}


def test_a_repeated_promotion_changes_nothing(
    tracked_home: Home, tracker: Tracker, versions: list[ModelVersion]
) -> None:
    first, second, _ = versions
    assert promote(tracked_home, tracker, first, over=None)
    assert aliases(tracker) == {CHAMPION: 1}
    set_alias(tracker, second, CHALLENGER)
    assert promote(tracked_home, tracker, second, over=first)
    assert aliases(tracker) == {CHAMPION: 2, PREVIOUS: 1}
    assert promote(tracked_home, tracker, second, over=first) == read_entries(tracked_home)[1]
    assert len(read_entries(tracked_home)) == 2
    assert aliases(tracker) == {CHAMPION: 2, PREVIOUS: 1}
    assert read_tags(tracker, second)["promoted_over"] == "1"


def test_the_next_command_ends_a_killed_move(
    tracked_home: Home, tracker: Tracker, versions: list[ModelVersion]
) -> None:
    first, second, third = versions
    promote(tracked_home, tracker, first, over=None)
    for after in range(20):
        with pytest.MonkeyPatch.context() as killed:
            dying(killed, after)
            with suppress(Killed):
                promote(tracked_home, tracker, second, over=first)
                break
        assert find_champion(tracked_home, tracker, "m") == second  # by a retraining, which promotes nothing
        assert aliases(tracker) == {CHAMPION: 2, PREVIOUS: 1}
        assert read_tags(tracker, second)["verdict"] == "Promoted: better."
        set_alias(tracker, first, CHAMPION)
    assert after >= 3
    set_alias(tracker, first, CHAMPION)  # killed before its alias
    promote(tracked_home, tracker, third, over=second)  # which was compared with what the log says
    assert aliases(tracker) == {CHAMPION: 3, PREVIOUS: 2}
    assert [each.subject for each in read_entries(tracked_home)] == ["m/1", "m/2", "m/3"]


def test_no_command_moves_a_foreign_alias(tracked_home: Home, tracker: Tracker, versions: list[ModelVersion]) -> None:
    first, second, third = versions
    promote(tracked_home, tracker, first, over=None)
    promote(tracked_home, tracker, second, over=first)
    set_alias(tracker, third, CHAMPION)
    acts: tuple[Callable[[], object], ...] = (
        lambda: find_champion(tracked_home, tracker, "m"),
        lambda: promote(tracked_home, tracker, third, over=second),
        lambda: roll_back(tracked_home, tracker, "m", version=3, reason="rude"),
    )
    for act in acts:
        with pytest.raises(PromotionError, match=r"m: version 3 is champion, and by entry 2 \(promote\) version 2 is"):
            act()
    assert len(read_entries(tracked_home)) == 2


def test_a_stale_decision_moves_nothing(tracked_home: Home, tracker: Tracker, versions: list[ModelVersion]) -> None:
    first, second, third = versions
    promote(tracked_home, tracker, first, over=None)
    promote(tracked_home, tracker, second, over=first)
    for stale in (first, None):
        with pytest.raises(PromotionError, match="version 2 is champion now"):
            promote(tracked_home, tracker, third, over=stale)
    assert aliases(tracker) == {CHAMPION: 2, PREVIOUS: 1}


@pytest.mark.slow  # two processes import MLflow; a stale decision and the lock of a decision have fast tests
def test_one_of_two_promotions_at_once_wins(tracked_home: Home, tracker: Tracker, versions: list[ModelVersion]) -> None:
    first, *challengers = versions
    promote(tracked_home, tracker, first, over=None)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(each.version), each.model_id, each.sha256],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for each in challengers
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=LONG)[0].strip() for process in processes]
    assert sorted(answer.partition(":")[0] for answer in answers) == ["promoted", "refused"]
    winner = challengers[answers.index("promoted")]
    assert aliases(tracker) == {CHAMPION: winner.version, PREVIOUS: 1}


def test_a_rollback_returns_to_the_one_before(
    tracked_home: Home, tracker: Tracker, versions: list[ModelVersion]
) -> None:
    first, second, third = versions
    for version, over in ((first, None), (second, first), (third, second)):
        promote(tracked_home, tracker, version, over=over)
    for _ in range(2):  # a repeated call takes no second version down
        assert roll_back(tracked_home, tracker, "m", version=3, reason="rude") == second
        assert aliases(tracker) == {CHAMPION: 2, PREVIOUS: 1}
    with pytest.raises(PromotionError, match="has been rolled back"):
        promote(tracked_home, tracker, third, over=second)
    assert roll_back(tracked_home, tracker, "m", version=2, reason="slow") == first
    assert aliases(tracker) == {CHAMPION: 1}
    with pytest.raises(PromotionError, match="there is none before it"):
        roll_back(tracked_home, tracker, "m", version=1, reason="all bad")
    assert read_tags(tracker, third)["rolled_back"] == "rude"


def test_a_rollback_follows_the_log(tracked_home: Home, tracker: Tracker, versions: list[ModelVersion]) -> None:
    first, second, third = versions
    promote(tracked_home, tracker, first, over=None)
    promote(tracked_home, tracker, second, over=first)
    set_alias(tracker, third, PREVIOUS)
    set_tags(tracker, second, {"promoted_over": "3"})
    assert roll_back(tracked_home, tracker, "m", version=2, reason="rude") == first
    set_alias(tracker, third, PREVIOUS)
    with pytest.raises(PromotionError, match="there is none before it"):
        roll_back(tracked_home, tracker, "m", version=1, reason="rude")
    assert aliases(tracker)[CHAMPION] == 1


@pytest.mark.parametrize("alias", [CHAMPION, None])
def test_another_artifact_under_a_champions_number_is_no_champion(
    tracked_home: Home, tracker: Tracker, versions: list[ModelVersion], tmp_path: Path, alias: str | None
) -> None:
    """As after a deletion of the registered model: numbers begin again."""
    first, second, third = versions
    promote(tracked_home, tracker, first, over=None)
    promote(tracked_home, tracker, second, over=first)
    tracker.client.delete_registered_model("m")
    *_, other = register_versions(tracker, tmp_path / "other", "m")[:2]
    set_tags(tracker, other, {"sha256": "evil"})
    if alias:
        set_alias(tracker, other, alias)
    acts: tuple[Callable[[], object], ...] = (
        lambda: find_champion(tracked_home, tracker, "m"),
        lambda: promote(tracked_home, tracker, third, over=other),
        lambda: roll_back(tracked_home, tracker, "m", version=2, reason="rude"),
    )
    for act in acts:
        with pytest.raises(PromotionError, match=r"m: version 2 has the artifact evil, and by entry 2 \(promote\) b: "):
            act()
    assert aliases(tracker) == ({CHAMPION: 2} if alias else {})


def test_only_the_champion_is_rolled_back(tracked_home: Home, tracker: Tracker, versions: list[ModelVersion]) -> None:
    with pytest.raises(PromotionError, match="there is no champion"):
        roll_back(tracked_home, tracker, "m", version=1, reason="")
    promote(tracked_home, tracker, versions[0], over=None)
    with pytest.raises(PromotionError, match="version 2 is not the champion, version 1 is"):
        roll_back(tracked_home, tracker, "m", version=2, reason="")


def grounds(over: ModelVersion | None, verdict: str = "v") -> Grounds:
    return Grounds(over=over, verdict=verdict, sentence="Promoted: better.")


REQUEST = {"rules": "abc", "until": "2030-01-01T00:00:00+00:00"}
Act = Callable[[Home, Tracker, list[ModelVersion]], AuditEntry | None]


def promoted(home: Home, tracker: Tracker, versions: list[ModelVersion]) -> AuditEntry | None:
    return champion.promote(home, tracker, versions[2], grounds(versions[1]), actor=ANNA)


def refused(home: Home, tracker: Tracker, versions: list[ModelVersion]) -> AuditEntry | None:
    return champion.refuse(home, tracker, versions[2], grounds(versions[1]), actor=ANNA)


def awaited(home: Home, tracker: Tracker, versions: list[ModelVersion]) -> AuditEntry | None:
    return champion.await_approval(home, tracker, versions[2], grounds(versions[1]), request=REQUEST, actor=ANNA)


def rolled_back(home: Home, tracker: Tracker, versions: list[ModelVersion]) -> AuditEntry | None:
    return champion.roll_back(home, tracker, "m", version=2, reason="rude", actor=ANNA)[1]


ACTS: dict[Act, tuple[int, dict[str, int]]] = {  # the version that the entry is about, and the aliases afterwards
    promoted: (2, {CHAMPION: 3, PREVIOUS: 2}),
    refused: (2, {CHAMPION: 2, PREVIOUS: 1, CHALLENGER: 3}),
    awaited: (2, {CHAMPION: 2, PREVIOUS: 1, CANDIDATE: 3}),
    rolled_back: (1, {CHAMPION: 1}),
}


@pytest.mark.parametrize("act", ACTS, ids=lambda each: each.__name__)
def test_an_act_that_is_killed_anywhere_and_repeated_has_one_entry_and_the_right_aliases(
    act: Act, tracked_home: Home, tracker: Tracker, tmp_path: Path, versions: list[ModelVersion]
) -> None:
    first, second, third = versions
    for version, over in ((first, None), (second, first)):
        promote(tracked_home, tracker, version, over=over)
    about, expected = ACTS[act]
    if act is promoted:
        set_alias(tracker, third, CHALLENGER)
    assert kills_until_done(lambda: act(tracked_home, tracker, versions)) >= 2
    for _ in range(2):  # and once more, when it is done
        assert act(tracked_home, tracker, versions) == read_entries(tracked_home)[-1]
        assert [each.subject for each in read_entries(tracked_home)] == ["m/1", "m/2", f"m/{about + 1}"]
        assert aliases(tracker) == expected
    assert chain_errors(tracked_home) == ()


def test_an_entry_has_actor_move_and_decision(
    tracked_home: Home, tracker: Tracker, versions: list[ModelVersion]
) -> None:
    first, second, _ = versions
    promote(tracked_home, tracker, first, over=None)
    champion.promote(tracked_home, tracker, second, grounds(first, "abc"), actor={"flow_run": "promote tiny"})
    roll_back(tracked_home, tracker, "m", version=2, reason="rude")
    begun, moved, taken_down = read_entries(tracked_home)
    assert (begun.action, begun.details["champion"], begun.details["to"], begun.actor) == ("promote", "none", "1", ANNA)
    assert moved.details == {
        "artifact": "b",
        "champion": "1",
        "verdict": "abc",
        "to": "2",
        "approvals": [],
        "rules": "",
        "sentence": "Promoted: better.",
    }
    assert moved.actor == {"flow_run": "promote tiny"}
    assert (taken_down.action, taken_down.subject) == ("rollback", "m/2")
    assert taken_down.details == {"artifact": "a", "to": "1", "reason": "rude"}
    assert datetime.fromisoformat(moved.time) <= datetime.now(UTC)


def test_nobody_promotes_without_an_approval(
    tracked_home: Home, tracker: Tracker, versions: list[ModelVersion]
) -> None:
    first, second, _ = versions
    promote(tracked_home, tracker, first, over=None)  # nobody had asked for one
    ask_for_approvals(tracked_home, "anna ssh-ed25519 AAAA")
    champion.await_approval(tracked_home, tracker, second, grounds(first), request=REQUEST, actor=ANNA)
    for given in ((), (7,), (1, 2)):  # none of which is an approval of this version
        with pytest.raises(PromotionError, match=r"lacks an approval, which promotion\.toml"):
            champion.promote(tracked_home, tracker, second, replace(grounds(first), approvals=given), actor=ANNA)
    assert aliases(tracker) == {CHAMPION: 1, CANDIDATE: 2}
    (tracked_home.root / "promotion.toml").unlink()
    with pytest.raises(PromotionError, match=r"promotion\.toml is missing, and entry 2 of the audit log"):
        promote(tracked_home, tracker, second, over=first)
    ask_for_approvals(tracked_home)
    assert promote(tracked_home, tracker, second, over=first)
    assert read_entries(tracked_home)[-1].details["rules"] == "off"


def test_a_new_champion_ends_a_candidates_wait(
    tracked_home: Home, tracker: Tracker, versions: list[ModelVersion]
) -> None:
    first, second, third = versions
    promote(tracked_home, tracker, first, over=None)
    for version in (second, third):
        champion.await_approval(tracked_home, tracker, version, grounds(first), request=REQUEST, actor=ANNA)
    assert aliases(tracker) == {CHAMPION: 1, CANDIDATE: 3}
    assert ["awaits" in read_tags(tracker, each) for each in (second, third)] == [False, True]
    ask_for_approvals(tracked_home)
    promote(tracked_home, tracker, second, over=first)
    assert aliases(tracker) == {CHAMPION: 2, PREVIOUS: 1}
    assert "awaits" not in read_tags(tracker, third)
    champion.await_approval(tracked_home, tracker, third, grounds(second), request=REQUEST, actor=ANNA)
    roll_back(tracked_home, tracker, "m", version=2, reason="rude")
    assert aliases(tracker) == {CHAMPION: 1}
