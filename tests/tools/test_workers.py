"""workers: what crashes, hangs or raises costs its task and nothing else; turns come when nothing else is at work."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from thunder_cg.tools.workers import Parent, Workers


def misbehave(task: str, parent: Parent) -> None:
    parent.give((os.getpid(), os.environ.get("SAID_TO_WORKERS")))
    if task == "crashes":
        parent.say("the hard part")
        os.write(2, b"terminate called\n\n  what(): out of luck\n")
        os._exit(3)
    if task == "hangs":
        parent.give(subprocess.Popen(["sleep", "600"]).pid)
        time.sleep(600)
    if task == "raises":
        raise RuntimeError("CUDA error: device-side assert triggered\nand more")


def test_what_goes_wrong_costs_its_task() -> None:
    workers = Workers(
        misbehave, ["fine", "crashes", "raises"], 1, seconds=4, each=2, environment={"SAID_TO_WORKERS": "a word"}
    )
    found = {}
    for answer in workers.answers():
        assert answer.final
        found[answer.task] = answer
        if answer.task == "fine":
            workers.add(["hangs", "last"])
    assert {name: answer.failure for name, answer in found.items()} == {
        "fine": "",
        "crashes": "the process ended with status 3, the hard part: what(): out of luck",
        "raises": "RuntimeError: CUDA error: device-side assert triggered",
        "hangs": "no result within 4 s",
        "last": "",
    }
    pids = [found[name].result[0] for name in ("fine", "crashes", "raises", "last")]
    assert pids[0] == pids[1] and len({*pids}) == 3  # a process is reused until a task spoils it
    assert found["crashes"].result[1] == "a word" and "SAID_TO_WORKERS" not in os.environ
    assert ends(found["hangs"].result), "what a task started lives on"


def kill_or_retire(task: str, parent: Parent) -> None:
    parent.give(os.getpid())
    if task == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    if task == "retires":
        parent.retire()


def test_a_process_that_retires_or_dies() -> None:
    workers = Workers(kill_or_retire, ["fine", "retires", "after", "dies"], 1, seconds=60, each=9)
    found = {answer.task: answer for answer in workers.answers()}
    assert found["fine"].result == found["retires"].result != found["after"].result == found["dies"].result
    assert found["dies"].failure.startswith("the process ended with status -11: File ")
    assert "in kill_or_retire" in found["dies"].failure
    assert not any(found[name].failure for name in ("fine", "retires", "after"))


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


def in_two_parts(task: str, parent: Parent) -> None:
    parent.give(part())
    parent.wait()
    if task == "hangs":
        time.sleep(600)
    parent.give(part())


def part() -> tuple[float, float]:
    begin = time.time()
    time.sleep(0.3)
    return begin, time.time()


def test_turns_come_one_by_one_when_nothing_else_is_at_work() -> None:
    answers = [*Workers(in_two_parts, ["a", "hangs", "b"], 2, seconds=3, held=3).answers()]
    prepared, timed = answers[:3], answers[3:]
    assert {(answer.task, answer.final) for answer in prepared} == {(name, False) for name in ("a", "hangs", "b")}
    assert {(answer.task, answer.failure) for answer in timed} == {
        ("a", ""),
        ("b", ""),
        ("hangs", "no result within 3 s"),
    }
    assert max(answer.result[1] for answer in prepared) <= min(a.result[0] for a in timed if not a.failure)
    (_, end), (begin, _) = sorted(answer.result for answer in timed if not answer.failure)
    assert end <= begin


def test_processes_that_cannot_be_started() -> None:
    workers = Workers(misbehave, ["fine"], 1, seconds=4, environment={"PYTHONHOME": "/nowhere"})
    with pytest.raises(RuntimeError, match="a worker does not start: the process ended with status 1"):
        list(workers.answers())
