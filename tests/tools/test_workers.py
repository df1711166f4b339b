"""workers: what crashes, hangs or raises costs its task and nothing else; turns come when nothing else is at work."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from multiprocessing import get_context, resource_tracker
from multiprocessing.pool import ThreadPool
from types import SimpleNamespace
from typing import Any

import pytest

from thunder_cg.tools.workers import Supervisor, Workers, working_time


def misbehave(task: str, supervisor: Supervisor) -> None:
    supervisor.send_result((os.getpid(), os.environ.get("SAID_TO_WORKERS")))
    assert os.environ["PYTHONWARNINGS"] == "ignore", "what it imports would print"
    if task == "crashes":
        supervisor.report("the hard part")
        os.write(2, b"terminate called\n\n  what(): out of luck\n")
        os._exit(3)
    if task == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    if task == "hangs":
        supervisor.send_result((os.getpid(), subprocess.Popen(["sleep", "600"]).pid))
        time.sleep(600)
    if task == "retires":
        supervisor.retire()
    if task == "raises":
        raise RuntimeError("CUDA error: device-side assert triggered\nand more")


@pytest.mark.nightly
@pytest.mark.usefixtures("forked_workers")
def test_what_goes_wrong_costs_its_task() -> None:
    tasks, later = ["fine", "crashes", "raises"], ["hangs", "retires", "after", "dies"]
    environment = {"SAID_TO_WORKERS": "a word"}
    workers = Workers(misbehave, tasks, 1, timeout=2, tasks_per_process=2, environment=environment)
    found = {}
    for answer in workers.answers():
        found[answer.task] = answer
        if answer.task == "fine":
            workers.add(later)
    where_it_died = found["dies"].failure.partition(": File ")
    assert where_it_died[0] == "the process ended with status -11" and "in misbehave" in where_it_died[2]
    where_it_hung = found["hangs"].failure
    assert re.fullmatch(r"no result within 2 s, in misbehave \(tools/test_workers.py:\d+\) < .*", where_it_hung)
    assert {name: answer.failure for name, answer in found.items() if name not in ("dies", "hangs")} == {
        "fine": "",
        "crashes": "the process ended with status 3, the hard part: what(): out of luck",
        "raises": "RuntimeError: CUDA error: device-side assert triggered",
        "retires": "",
        "after": "",
    }
    pids = {name: answer.result[0] for name, answer in found.items()}
    assert pids["fine"] == pids["crashes"] and pids["after"] == pids["dies"], "a process is used again"
    assert len({*pids.values()}) == 5, "but not after a failure, nor after it asked to retire"
    assert found["crashes"].result[1] == "a word" and "SAID_TO_WORKERS" not in os.environ
    assert ends(found["hangs"].result[1]), "what a task started lives on"


def blocked_signals(task: str, supervisor: Supervisor) -> None:
    supervisor.send_result(signal.pthread_sigmask(signal.SIG_BLOCK, []))


def test_an_interruption_in_a_terminal_is_for_the_supervisor_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that begins has no group of its own yet."""

    class Process(get_context("fork").Process):  # type: ignore[name-defined, misc]
        def start(self) -> None:
            resource_tracker.ensure_running()  # as spawn does, which then allows the signal
            super().start()

    context = get_context("fork")
    context.Process = Process
    monkeypatch.setattr("thunder_cg.tools.workers.get_context", lambda method: context)
    monkeypatch.setattr(resource_tracker, "_resource_tracker", tracker := resource_tracker.ResourceTracker())
    monkeypatch.setattr(resource_tracker, "ensure_running", tracker.ensure_running)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    (answer,) = Workers(blocked_signals, ["task"], 1, timeout=60).answers()
    assert signal.SIGINT in answer.result and signal.SIGINT not in before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def ends(pid: int) -> bool:
    for _ in range(50):
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
                state = file.read().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":  # nobody waits for it where init does not
            return True
        time.sleep(0.1)
    return False


def in_two_parts(task: str, supervisor: Supervisor) -> None:
    if task == "prepares":  # all the time that the others have their turns
        supervisor.send_result([(time.monotonic(), working_time()) for _ in range(300) if not time.sleep(0.01)])
        return
    supervisor.wait_for_turn()
    begin = time.monotonic()
    time.sleep(600 if task == "hangs" else 0.3)
    supervisor.send_result((begin, time.monotonic()))


@pytest.mark.nightly
@pytest.mark.usefixtures("forked_workers")
def test_nothing_else_is_at_work_in_a_turn() -> None:
    tasks = ["prepares", "a", "hangs", "b"]
    answers = {answer.task: answer for answer in Workers(in_two_parts, tasks, 4, timeout=4).answers()}
    assert [name for name, answer in answers.items() if answer.failure] == ["hangs"]
    assert answers["hangs"].failure.startswith("no result within 4 s, in ")  # without the time of the others' turns
    turns = sorted((answers["a"].result, answers["b"].result))
    assert turns[0][1] <= turns[1][0], "one by one"
    moments, worked = zip(*answers["prepares"].result)
    for begin, end in turns:
        assert not [moment for moment in moments if begin + 0.05 < moment < end]
    stood_still = (moments[-1] - moments[0]) - (worked[-1] - worked[0])
    assert 4.6 < stood_still < moments[-1] - moments[0] - 2.9, "the turns of all three, and nothing of its own"


def test_processes_that_cannot_be_started() -> None:
    workers = Workers(misbehave, ["fine"], 1, timeout=4, environment={"PYTHONHOME": "/nowhere"})
    with pytest.raises(RuntimeError, match="a worker does not start: the process ended with status 1"):
        list(workers.answers())


def test_threads_start_their_processes_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two threads gives its process variables of its own, and the environment is the same after both."""
    seen = []

    class SlowToStart:
        def __init__(self, **options: Any) -> None:
            pass

        def start(self) -> None:
            before = os.environ["SAID_TO_WORKERS"]
            time.sleep(0.1)
            seen.append((before, os.environ["SAID_TO_WORKERS"]))
            raise OSError("no process is needed here")

    context = SimpleNamespace(Process=SlowToStart, Pipe=get_context("spawn").Pipe)
    monkeypatch.setattr("thunder_cg.tools.workers.get_context", lambda method: context)

    def start(word: str) -> None:
        with pytest.raises(OSError, match="no process"):
            list(Workers(misbehave, ["fine"], 1, timeout=4, environment={"SAID_TO_WORKERS": word}).answers())

    with ThreadPool(2) as threads:
        threads.map(start, ["a", "b"])
    assert sorted(seen) == [("a", "a"), ("b", "b")] and "SAID_TO_WORKERS" not in os.environ
