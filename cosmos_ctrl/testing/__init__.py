"""For authors of stores and of checkpoint formats: checks that theirs keep the contracts which a run relies on.

    from cosmos_ctrl.testing import check_format, check_store

    def test_my_store(tmp_path):
        check_store(lambda: MyStore(tmp_path))

    def test_my_format():
        check_format(MyAdapter, save=my_save)

They need no test framework, and name every rule that is broken, with what was expected and what was found.
"""

from cosmos_ctrl.testing.expectations import FormatContractError, StoreContractError
from cosmos_ctrl.testing.formats import check_format
from cosmos_ctrl.testing.stores import check_store

__all__ = ["FormatContractError", "StoreContractError", "check_format", "check_store"]
