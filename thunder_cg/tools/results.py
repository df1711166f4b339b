"""Result files: what was measured, on which machine, with which versions. Each tool has its own rows.

A run adds to the file of an earlier run only if machine and versions are the same, because times do not compare across
machines.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import thunder
import torch

from thunder_cg.files import refuse_without_folder, replace

R = TypeVar("R", bound="MeasuredResults")
OfRows = TypeVar("OfRows", bound="RowResults")


@dataclass(slots=True)
class MeasuredResults:
    """All that one tool measured on one machine. A tool derives its own class, which adds the rows.

    Attributes:
        environment: see :func:`environment`.
    """

    environment: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """The content of the file."""
        raise NotImplementedError

    @classmethod
    def from_dict(cls: type[R], content: Mapping[str, Any]) -> R:
        """The results in the content of a file. ValueError, KeyError or TypeError if it is something else."""
        raise NotImplementedError

    def to_text(self) -> str:
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n"

    def write(self, path: Path) -> None:
        """Writes the file, whole or not at all. ValueError if there is a file that holds something else."""
        self.check_writable(path)
        replace(path, self.to_text())

    @classmethod
    def check_writable(cls, path: Path | None) -> None:
        """Checks, before the work, that `write` would not overwrite what somebody else wrote.

        Raises:
            ValueError: there is a file that holds something else, or no folder can be there for it.
        """
        refuse_without_folder(path)
        if path is not None and (path.is_file() or path.is_dir()):
            cls.read(path)

    @classmethod
    def read(cls: type[R], path: Path) -> R:
        """What `write` wrote.

        Raises:
            ValueError: the file holds something else.
        """
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} does not hold {cls.__name__} ({error!r}); name another file") from None

    @classmethod
    def read_or_new(cls: type[R], path: Path | None, here: dict[str, str]) -> R:
        """The results in `path`, so that a run can add to them; new ones if there is no such file.

        Raises:
            ValueError: they are from another machine or other versions.
        """
        if path is None or not path.exists():
            return cls(here)
        results = cls.read(path)
        for name, value in here.items():
            if name != "date" and (before := results.environment.get(name)) != value:
                problem = f"{path} was measured with {name} {before}, here it is {value}"
                raise ValueError(f"{problem}; name another file")
        results.environment = here
        return results


@dataclass(slots=True)
class RowResults(MeasuredResults):
    """Results that are rows. A tool derives its own class, which sets the attributes.

    Attributes:
        make_row: the dataclass of a row.
        identity: fields of a row. A new row takes the place of the one that has the same values there.
        note: says in the file what its numbers are.
    """

    rows: list[Any] = field(default_factory=list)
    make_row: ClassVar[Callable[..., Any]]
    identity: ClassVar[tuple[str, ...]]
    note: ClassVar[str] = ""

    def add(self, rows: Sequence[Any], *orders: Sequence[str]) -> None:
        """Adds rows, in place of those of an earlier run.

        Args:
            orders: of each field of the identity, the order of its values; none to keep rows as they come.
        """
        key = attrgetter(*self.identity)
        again = {key(row) for row in rows}
        self.rows = [*(row for row in self.rows if key(row) not in again), *rows]
        for name, order in reversed([*zip(self.identity, orders)]):
            place = {value: index for index, value in enumerate(order)}
            self.rows.sort(key=lambda row: place.get(getattr(row, name), len(place)))

    def to_dict(self) -> dict[str, Any]:
        note = {"note": self.note} if self.note else {}
        return {"environment": self.environment, **note, "rows": [asdict(row) for row in self.rows]}

    @classmethod
    def from_dict(cls: type[OfRows], content: Mapping[str, Any]) -> OfRows:
        return cls(content["environment"], [cls.make_row(**row) for row in content["rows"]])


def environment(device: torch.device, packages: Iterable[str] = ()) -> dict[str, str]:
    """The machine, the versions and the date. `packages` that are not installed are left out."""
    cuda = device.type == "cuda"
    found = {
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine(),
        "driver": driver() if cuda else "",
        "backend": "cuda" if cuda else "tape",
        "torch": torch.__version__,
        "thunder": thunder.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def origin(environment: Mapping[str, str]) -> str:
    """Where and when something was measured, as text: device, driver, versions, date."""
    versions = [f"{name} {value}" for name, value in environment.items() if name not in _UNVERSIONED]
    driver = [f"driver {environment['driver']}"] if environment.get("driver") else []
    return ", ".join([environment.get("device", "?"), *driver, *versions, environment.get("date", "?")])


_UNVERSIONED = ("device", "driver", "backend", "date")


def driver() -> str:
    """The version of NVIDIA's driver on Linux, such as 580.159.04, or "" where it cannot be read."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").split()
    except OSError:
        return ""
    return next((word for word in words if word[:1].isdigit() and "." in word), "")
