import pytest

from polyfed import methods, options, tasks
from polyfed.errors import ConfigError, UnknownNameError
from polyfed.methods.fedlinked import FedLinked
from polyfed.studies.space import Choice, Range, parse_space
from polyfed.studies.spaces import ARCHITECTURE, SEARCHED, TABLE_4_3, space_of

PRINTED = """
blocks            1       4       1       4
representation    64      512     32      256
channels          8       128     8       64
dropout           0.0     0.8     0.0     0.8
last_dropout      0.0     0.8     0.0     0.8
eta               0.8     3.0     0.8     3.0
batch             0.008   0.12    0.008   0.12
local_epochs      1       20      1       20
init_epochs       1       40      1       40
distil_epochs     1       60      1       60
finetune_epochs   1       20      1       20
rounds            3       12      3       12
lr                0.0001  0.01    0.0001  0.01
"""  # Kadar 2021, Table 4.3: CIFAR10 min, max, SVHN min, max


def test_table_4_3_is_as_printed() -> None:
    rows = [line.split() for line in PRINTED.strip().splitlines()]
    for task, low, high in (("cifar10", 1, 2), ("svhn", 3, 4)):
        printed = {row[0]: (float(row[low]), float(row[high])) for row in rows}
        ours = {n: (d.low, d.high) for n, d in TABLE_4_3[task].items() if isinstance(d, Range)}
        assert ours == printed
        whole = {n for n, d in TABLE_4_3[task].items() if isinstance(d, Range) and d.whole}
        assert whole == {r[0] for r in rows if "." not in r[low]}


@pytest.mark.parametrize("task", [tasks.cifar10(), tasks.svhn()], ids=lambda t: t.name)
def test_fedlinked_is_searched_by_the_table(task: tasks.Task) -> None:
    space = space_of("fedlinked", task)
    table = TABLE_4_3[task.name]
    assert space == dict(table)
    assert tuple(space)[:5] == ARCHITECTURE  # the network is searched first
    separated = {n: d for n, d in space_of("local", task).items() if n not in ARCHITECTURE}
    assert separated == {n: table[n] for n in separated}
    assert set(separated) == {"batch", "local_epochs", "init_epochs", "rounds", "lr"}


def test_the_network_of_the_task_comes_first() -> None:
    assert next(iter(space_of("fedlinked", tasks.digits()))) == "representation"


@pytest.mark.parametrize("method", methods.METHODS)
def test_every_method_has_a_space(method: str) -> None:
    task = tasks.digits()
    fields = options.fields_of(methods.load(method))
    assert set(SEARCHED.get(method, ())) <= set(fields)
    space = space_of(method, task)
    assert "lr" in space
    made = methods.make(method, {}, task)
    for name, dimension in space.items():
        value = dimension.nearest(getattr(made, name, None) or getattr(task, name, 0.5))
        assert dimension.nearest(value) == value
        assert dimension.distribution()._contains(dimension.distribution().to_internal_repr(value))
    methods.make(
        method,
        {n: d.high for n, d in space.items() if isinstance(d, Range) and n in fields},
        task,
    )  # the ends of the ranges are values that the method takes


def test_searched_methods_exist() -> None:
    assert set(SEARCHED) <= set(methods.METHODS)


def test_ranges_are_around_what_suits_the_task() -> None:
    space = space_of("fedavg", tasks.digits())  # its recipe: lr 3e-3, batch 0.2, 10 local epochs
    assert space["lr"] == Range(3e-3 / 10, 3e-3 * 10, log=True)
    assert space["batch"] == Range(0.05, 0.4, log=True)
    assert space["local_epochs"] == Range(2, 20, whole=True)


def test_a_share_stays_a_share() -> None:
    """A batch of 1 would be one sample, not all of them."""
    made = space_of("fedavg", tasks.digits())["batch"]
    assert isinstance(made, Range)
    assert made.high < 1


# ---- what a person types -------------------------------------------------------------------------


def test_parse() -> None:
    found = parse_space(
        [
            "lr=1e-4:1e-1:log",
            "rounds=3:12",
            "optimiser=sgd,adamw",
            "transform=yes,no",
            "batch=8:64",
        ],
        FedLinked,
    )
    assert found == {
        "lr": Range(1e-4, 1e-1, log=True),
        "rounds": Range(3, 12, whole=True),
        "optimiser": Choice(("sgd", "adamw")),
        "transform": Choice((True, False)),
        "batch": Range(8, 64),
    }


def test_an_option_of_the_task() -> None:
    found = parse_space(["representation=8:64:log"], FedLinked, type(tasks.digits()))
    assert found == {"representation": Range(8, 64, log=True, whole=True)}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lr", "what to try is missing"),
        ("lr=", "what to try is missing"),
        ("lr=a:b", "bounds are numbers"),
        ("lr=1:2:ln", "no range"),
        ("lr=1:2:3:4", "no range"),
        ("optimiser=1:2", "no range"),
        ("lr=2:1", "first bound must be below"),
        ("lr=1:1", "first bound must be below"),
        ("lr=0:1:log", "above 0"),
        ("lr=0.1", "at least two"),
        ("lr=0.1,0.1", "at least two"),
        ("optimiser=sgd,adan", "does not fit"),
    ],
)
def test_what_cannot_be_searched(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_space([text], FedLinked)


def test_an_option_that_does_not_exist() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'rounds'"):
        parse_space(["round=1:2"], FedLinked)


def test_nearest() -> None:
    assert Range(2, 5, whole=True).nearest(60) == 5
    assert isinstance(Range(2, 5, whole=True).nearest(3.0), int)
    assert Range(0.1, 0.5).nearest(0.01) == 0.1
    assert Choice(("a", "b")).nearest("b") == "b"
    assert Choice(("a", "b")).nearest("c") == "a"
