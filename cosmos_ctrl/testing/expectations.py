"""What is expected of somebody else's code, and the errors that name all that is not as it should be."""

from __future__ import annotations

from collections.abc import Callable


class ContractError(AssertionError):
    """A contract is not kept. Names every rule that is broken."""

    def __init__(self, what: str, broken: list[str]) -> None:
        self.broken = tuple(broken)
        rules = "\n".join(f"  {rule}" for rule in broken)
        super().__init__(f"{what} breaks {len(broken)} rules of the contract:\n{rules}")


class StoreContractError(ContractError):
    """A store does not keep the contract."""

    def __init__(self, uri: str, broken: list[str]) -> None:
        self.uri = uri
        super().__init__(f"the store {uri}", broken)


class FormatContractError(ContractError):
    """A checkpoint format does not keep the contract."""

    def __init__(self, name: str, broken: list[str]) -> None:
        self.name = name
        super().__init__(f"the checkpoint format of {name}", broken)


class Expectations:
    """Collects what is not as it should be."""

    def __init__(self, rule: str, broken: list[str]) -> None:
        self._rule, self._broken = rule, broken

    def broke(self, what: str) -> None:
        """Say that the rule is broken; saying the same again changes nothing."""
        if (told := f"{self._rule}: {what}") not in self._broken:
            self._broken.append(told)

    def equal(self, what: str, found: object, expected: object) -> None:
        """Equal, and of one type."""
        if found != expected or type(found) is not type(expected):
            self.broke(f"{what} gave {short(found)}, expected {short(expected)}")

    def raises(self, error: type[Exception], what: str, call: Callable[[], object]) -> None:
        """That error and no other."""
        try:
            found = call()
        except error:
            return
        except Exception as other:
            self.broke(f"{what} raised {type(other).__name__} ({other}), expected {error.__name__}")
        else:
            self.broke(f"{what} gave {short(found)}, expected {error.__name__}")


def short(value: object) -> str:
    """A value for people, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
