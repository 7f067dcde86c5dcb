"""What a shard says of itself, inside: whose it is, and of which checkpoint.

A digest proves that a file is the one that was saved under its name. It cannot prove that the application saved the right thing there: a
rank that writes its sibling's random state under its own name is committed as it is. A stamp in the content can.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from cosmos_ctrl.core.errors import ArtifactForeignError
from cosmos_ctrl.core.state import same_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """The stamp of one rank's shards in one checkpoint."""

    rank: int
    """Within the trainer group."""
    execution_number: int
    checkpoint_id: str
    completed_training_steps: int
    completed_optimizer_updates: int

    def to_dict(self) -> dict[str, int | str]:
        """Plain values, which any format carries."""
        return asdict(self)

    def check(self, found: object, *, path: str, artifact: str) -> None:
        """Compare `found`, from a shard's content, with what it should be.

        Raises:
            ArtifactForeignError: it is another rank's, step's or execution's, or no stamp; it names the first field that differs.
        """
        expected = self.to_dict()
        if not isinstance(found, Mapping) or found.keys() != expected.keys():
            what = sorted(map(str, found)) if isinstance(found, Mapping) else type(found).__name__
            raise ArtifactForeignError(
                path=path, artifact=artifact, what="stamp", expected=str(sorted(expected)), found=str(what)
            )
        for key, value in expected.items():
            if not same_value(value, found[key]):
                raise ArtifactForeignError(
                    path=path, artifact=artifact, what=key, expected=repr(value), found=repr(found[key])
                )
