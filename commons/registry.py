"""Factories that create implementations by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

T = TypeVar("T")


class NamedFactory(Generic[T]):
    """Registers classes and creates their instances by name. Each subclass has its own names.

    A subclass sets `kind`, a word for these classes in messages, and `base`, from which they must derive. An
    unknown name is a KeyError, whose message lists the registered names.
    """

    kind: ClassVar[str]
    base: ClassVar[type]
    _classes: ClassVar[dict[str, type]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._classes = {}

    @classmethod
    def register(cls, name: str, implementation: type[T]) -> type[T]:
        """Registers a class under a name and returns it.

        Raises:
            TypeError: `implementation` does not derive from `base`.
            ValueError: the name is taken.
        """
        if not (isinstance(implementation, type) and issubclass(implementation, cls.base)):
            raise TypeError(
                f"{cls.kind} {name!r}: {implementation!r} is not a subclass of {cls.base.__name__}"
            )
        if taken_by := cls._classes.get(name):
            raise ValueError(
                f"{cls.kind} {name!r} is already registered, as {taken_by.__name__}; "
                "unregister it first, or choose another name"
            )
        cls._classes[name] = implementation
        return implementation

    @classmethod
    def unregister(cls, name: str) -> None:
        """Removes a name."""
        cls.class_of(name)
        del cls._classes[name]

    @classmethod
    def clear_registry(cls) -> None:
        """Removes all names, also built-in ones such as "identity", for tests that register their own."""
        cls._classes.clear()

    @classmethod
    def create(cls, name: str, /, *args: Any, **kwargs: Any) -> T:
        """Creates an instance of the class registered under `name`, and passes it the other arguments."""
        return cls.class_of(name)(*args, **kwargs)

    @classmethod
    def create_from_config(cls, config: Mapping[str, Any]) -> T:
        """Calls `create(config["type"], **rest_of_config)`. A KeyError if there is no "type"."""
        if "type" not in config:
            raise KeyError(
                f'a {cls.kind} config needs a "type", one of {cls.list_available()}; got {dict(config)}'
            )
        return cls.create(config["type"], **{key: value for key, value in config.items() if key != "type"})

    @classmethod
    def list_available(cls) -> list[str]:
        """Returns the registered names, sorted."""
        return sorted(cls._classes)

    @classmethod
    def is_registered(cls, name: str) -> bool:
        """Returns whether `name` is registered."""
        return name in cls._classes

    @classmethod
    def class_of(cls, name: str) -> Callable[..., T]:
        """Returns the class registered under `name`."""
        if name not in cls._classes:
            raise KeyError(f"unknown {cls.kind} {name!r}; registered are {cls.list_available()}")
        return cls._classes[name]
