"""Ladder: down when trees do not pay, back up when they do; Alarm: a round that hangs is told of once, in time."""
import threading
import time

from qwentin.watchdog import CLIMB, MIN_ROUNDS, MOST_PATIENCE, PATIENCE, Alarm, Ladder, where


def sizes(ladder, worth, rounds):
    """The sizes that the ladder goes through in so many rounds of this worth, plain ones at the bottom."""
    found = [ladder.size]
    for _ in range(rounds):
        if ladder.plain:
            ladder.rest()
        else:
            ladder.observe(worth)
        if ladder.size != found[-1]:
            found.append(ladder.size)
    return found


def test_a_collapse_steps_down_to_plain_decoding():
    ladder = Ladder(12, 15)
    assert sizes(ladder, 0.5, 3 * MIN_ROUNDS) == [(12, 15), (6, 7), (3, 3), (0, 0)]
    words = [event.split(" after")[0] for event in ladder.events]
    assert words == ["down to 7 guesses", "down to 3 guesses", "down to 0 guesses"]


def test_it_climbs_back_when_trees_pay_again():
    ladder = Ladder(12, 15)
    sizes(ladder, 0.5, 3 * MIN_ROUNDS)
    assert sizes(ladder, 1.5, PATIENCE + 4 * CLIMB) == [(0, 0), (3, 3), (6, 7), (12, 15)]
    assert ladder.patience == PATIENCE and not ladder.trial


def test_trials_that_fail_become_rarer():
    ladder, waits, plain = Ladder(12, 15), [], 0
    for _ in range(20000):
        if ladder.plain:
            plain += 1
            ladder.rest()
        else:
            if plain:
                waits.append(plain)
            plain = 0
            ladder.observe(0.5)
    assert waits[:4] == [PATIENCE, 2 * PATIENCE, 4 * PATIENCE, 8 * PATIENCE] and waits[-1] == MOST_PATIENCE
    assert ladder.rung in (2, 3), "a trial begins with few guesses"


def test_what_pays_stays():
    ladder = Ladder(12, 15)
    assert sizes(ladder, 1.05, 500) == [(12, 15)] and not ladder.events


def test_one_bad_round_changes_nothing():
    ladder = Ladder(8, 8)
    for i in range(200):
        ladder.observe(0.2 if i % 10 == 9 else 2.0)
    assert ladder.rung == 0


def test_plain_rounds_on_a_rung_lead_to_a_trial():
    """The plan may find no tree worth while: its odds would never change if nothing was tried."""
    ladder = Ladder(8, 8)
    for _ in range(PATIENCE - 1):
        ladder.rest()
    assert not ladder.trial
    ladder.rest()
    assert ladder.trial and ladder.rung == 0
    for _ in range(CLIMB):
        ladder.observe(1.5)
    assert not ladder.trial


def test_small_ladders():
    assert Ladder(1, 1).rungs == [(1, 1), (0, 0)] and Ladder(2, 3).rungs == [(2, 3), (1, 1), (0, 0)]


def test_the_alarm_rings_once_and_only_if_the_round_hangs():
    rung = []
    alarm = Alarm(lambda who, limit: rung.append((who, limit)))
    alarm.begin(3600.0, ["fast"])
    while not alarm.wakes:
        time.sleep(0.005)
    assert alarm.end() is False
    alarm.begin(0.02, ["slow"])
    while not rung:
        time.sleep(0.005)
    assert alarm.end() is True and rung == [(["slow"], 0.02)]
    assert alarm.end() is False, "it is told once"
    alarm.begin(60.0, ["next"])
    assert alarm.end() is False and len(rung) == 1


def test_an_alarm_that_fails_is_no_fault_of_the_round():
    failed = threading.Event()

    def ring(who, limit):
        failed.set()
        raise OSError("gone")
    alarm = Alarm(ring)
    alarm.begin(0.01, [])
    assert failed.wait(60)
    while not alarm.rang:
        time.sleep(0.005)
    assert alarm.end() and alarm.thread.is_alive()


def test_where_a_thread_is():
    assert "test_where_a_thread_is" in where(threading.current_thread())
    assert where(threading.Thread()) == "the thread is gone"
