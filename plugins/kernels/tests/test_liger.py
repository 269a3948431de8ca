"""Imports of a package's module without the package."""

import importlib
import sys
from pathlib import Path

import pytest

from rlhf_kernels.liger import import_alone


def test_a_module_that_is_imported_alone_is_a_copy_that_nobody_else_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "many_kernels" / "ops"
    package.mkdir(parents=True)
    (tmp_path / "many_kernels" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("import many_kernels.ops.one\n")
    (package / "one.py").write_text("from many_kernels.ops.two import kernel\n")
    (package / "two.py").write_text("kernel = object()\n")
    monkeypatch.syspath_prepend(tmp_path)
    alone = import_alone("many_kernels.ops.one")
    assert not {name for name in sys.modules if name.startswith("many_kernels.")}
    whole = importlib.import_module("many_kernels.ops")
    assert {*vars(whole)} >= {"one", "two"}
    assert whole.one.kernel is not alone.kernel
    assert import_alone("many_kernels.ops.one") is whole.one
    (package / "one.py").write_text("1 / 0\n")
    for name in ("many_kernels.ops", "many_kernels.ops.one", "many_kernels.ops.two"):
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()
    with pytest.raises(ZeroDivisionError):
        import_alone("many_kernels.ops.one")
    assert "many_kernels.ops" not in sys.modules
