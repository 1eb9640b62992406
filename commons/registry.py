"""Names for implementations, so that a configuration file can choose one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

T = TypeVar("T")


class NamedFactory(Generic[T]):
    """Registers classes under names and creates instances by name; each subclass has names of its own.

    A subclass sets `kind`, what the classes are called in messages, and `base`, which they must derive from.
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
            ValueError: the name is taken by another class.
        """
        if not (isinstance(implementation, type) and issubclass(implementation, cls.base)):
            raise TypeError(
                f"{cls.kind} {name!r}: {implementation!r} is not a subclass of {cls.base.__name__}"
            )
        taken_by = cls._classes.get(name)
        if taken_by is not None:
            raise ValueError(
                f"{cls.kind} {name!r} is already registered, as {taken_by.__name__}; "
                "unregister it first, or choose another name"
            )
        cls._classes[name] = implementation
        return implementation

    @classmethod
    def unregister(cls, name: str) -> None:
        """Forgets a name; KeyError if it is not registered."""
        cls._class_of(name)
        del cls._classes[name]

    @classmethod
    def clear_registry(cls) -> None:
        """Forgets all names, for tests that register their own.

        Built-in names go too, "identity" among them, and come back only by `register`.
        """
        cls._classes.clear()

    @classmethod
    def create(cls, name: str, /, *args: Any, **kwargs: Any) -> T:
        """An instance of the class registered under `name`, made with the other arguments.

        Raises:
            KeyError: the name is not registered; the message lists what is.
        """
        return cls._class_of(name)(*args, **kwargs)

    @classmethod
    def create_from_config(cls, config: Mapping[str, Any]) -> T:
        """`create(config["type"], **the rest of config)`; KeyError without a "type"."""
        if "type" not in config:
            raise KeyError(
                f'a {cls.kind} config needs a "type", one of {cls.list_available()}; got {dict(config)}'
            )
        return cls.create(config["type"], **{key: value for key, value in config.items() if key != "type"})

    @classmethod
    def list_available(cls) -> list[str]:
        """The registered names, sorted."""
        return sorted(cls._classes)

    @classmethod
    def is_registered(cls, name: str) -> bool:
        """Whether `name` is registered."""
        return name in cls._classes

    @classmethod
    def _class_of(cls, name: str) -> Callable[..., T]:
        if name not in cls._classes:
            raise KeyError(f"unknown {cls.kind} {name!r}; registered are {cls.list_available()}")
        return cls._classes[name]
