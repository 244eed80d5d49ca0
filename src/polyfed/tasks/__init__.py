"""Tasks: data sets in their publishers' layouts, partitions, ready-made federations.

`tasks.digits()`, `tasks.cifar10(data=DIR)`, ...: a task is a configuration; `nodes(seed)` makes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from polyfed import options
from polyfed.errors import UnknownNameError
from polyfed.tasks.split import stratified
from polyfed.tasks.task import Task

TASKS: dict[str, tuple[str, str]] = {
    "digits": ("embedded", "Digits"),
    "cifar10": ("images", "Cifar10"),
    "svhn": ("images", "Svhn"),
    "mnist": ("images", "Mnist"),
    "cifar100": ("more_images", "Cifar100"),
    "letters": ("more_images", "Letters"),
    "agnews": ("news", "AgNews"),
    "landmine": ("silos", "Landmine"),
    "heart": ("silos", "Heart"),
    "vehicle": ("silos", "Vehicle"),
    "attributes": ("shared_inputs", "Attributes"),
    "celeba": ("faces", "CelebA"),
    "associative": ("binary_vectors", "Associative"),
    "digits-sets": ("unlabelled", "DigitsSets"),
    "mnist-sets": ("unlabelled", "MnistSets"),
    "digits-permuted": ("permuted", "DigitsPermuted"),
    "mnist-permuted": ("permuted", "MnistPermuted"),
    "mnist-writers": ("writers", "MnistWriters"),
    "letters-hands": ("writers", "LettersHands"),
    "digits-encoders": ("encoders", "DigitsEncoders"),
    "cifar10-encoders": ("encoders", "Cifar10Encoders"),
    "cifar100-encoders": ("encoders", "Cifar100Encoders"),
}

__all__ = [
    "TASKS",
    "Task",
    "agnews",
    "associative",
    "attributes",
    "celeba",
    "cifar10",
    "cifar10_encoders",
    "cifar100",
    "cifar100_encoders",
    "digits",
    "digits_encoders",
    "digits_permuted",
    "digits_sets",
    "heart",
    "landmine",
    "letters",
    "letters_hands",
    "load",
    "make",
    "mnist",
    "mnist_permuted",
    "mnist_sets",
    "mnist_writers",
    "stratified",
    "svhn",
    "vehicle",
]


def load(name: str) -> type[Task]:
    """The class of the task of that name."""
    if name not in TASKS:
        raise UnknownNameError("task", name, TASKS)
    module, cls = TASKS[name]
    found: type[Task] = getattr(import_module(f"polyfed.tasks.{module}"), cls)
    return found


def make(name: str, values: Mapping[str, Any]) -> Task:
    """The task of that name with these options."""
    return options.build(load(name), values, f"task {name}")


def digits(**values: Any) -> Task:
    """The embedded digits: three nodes with overlapping classes and few labels."""
    return make("digits", values)


def cifar10(**values: Any) -> Task:
    """CIFAR-10, from a folder: `tasks.cifar10(data=DIR)`."""
    return make("cifar10", values)


def svhn(**values: Any) -> Task:
    """Street View House Numbers, from a folder: `tasks.svhn(data=DIR)`."""
    return make("svhn", values)


def mnist(**values: Any) -> Task:
    """MNIST, from a folder: `tasks.mnist(data=DIR, partition="dirichlet:0.1")`."""
    return make("mnist", values)


def digits_sets(**values: Any) -> Task:
    """The embedded digits in unlabelled sets, with a few labels at a hub."""
    return make("digits-sets", values)


def mnist_sets(**values: Any) -> Task:
    """MNIST in unlabelled sets, from a folder: `tasks.mnist_sets(data=DIR, iid=False)`."""
    return make("mnist-sets", values)


def digits_permuted(**values: Any) -> Task:
    """The embedded digits, whose labels some nodes permute."""
    return make("digits-permuted", values)


def mnist_permuted(**values: Any) -> Task:
    """MNIST, whose labels some nodes permute: `tasks.mnist_permuted(data=DIR, kind="s3")`."""
    return make("mnist-permuted", values)


def mnist_writers(**values: Any) -> Task:
    """MNIST with a writer for every node: `tasks.mnist_writers(data=DIR)`."""
    return make("mnist-writers", values)


def letters_hands(**values: Any) -> Task:
    """EMNIST's letters with a made-up hand for every node: `tasks.letters_hands(data=DIR)`."""
    return make("letters-hands", values)


def cifar100(**values: Any) -> Task:
    """CIFAR-100, from a folder: `tasks.cifar100(data=DIR, partition="pathological:10")`."""
    return make("cifar100", values)


def letters(**values: Any) -> Task:
    """EMNIST letters, from a folder: `tasks.letters(data=DIR)`."""
    return make("letters", values)


def agnews(**values: Any) -> Task:
    """AG News, from a folder: `tasks.agnews(data=DIR)`."""
    return make("agnews", values)


def landmine(**values: Any) -> Task:
    """Landmine detection in 29 fields, from a folder: `tasks.landmine(data=DIR)`."""
    return make("landmine", values)


def heart(**values: Any) -> Task:
    """UCI heart disease in four hospitals, from a folder: `tasks.heart(data=DIR)`."""
    return make("heart", values)


def vehicle(**values: Any) -> Task:
    """The vehicle sensor network, from a folder: `tasks.vehicle(data=DIR)`."""
    return make("vehicle", values)


def attributes(**values: Any) -> Task:
    """Twelve attributes of the embedded digits, one a node."""
    return make("attributes", values)


def celeba(**values: Any) -> Task:
    """CelebA, from a folder: `tasks.celeba(data=DIR)`."""
    return make("celeba", values)


def associative(**values: Any) -> Task:
    """Binary vectors to be completed from memory, some nodes with other ones."""
    return make("associative", values)


def digits_encoders(**values: Any) -> Task:
    """The embedded digits with three different small encoders, for self-supervision."""
    return make("digits-encoders", values)


def cifar10_encoders(**values: Any) -> Task:
    """CIFAR-10 with four different networks: `tasks.cifar10_encoders(data=DIR)`."""
    return make("cifar10-encoders", values)


def cifar100_encoders(**values: Any) -> Task:
    """CIFAR-100 with four different networks: `tasks.cifar100_encoders(data=DIR)`."""
    return make("cifar100-encoders", values)
