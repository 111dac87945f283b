"""Weights to and from safetensors files: fp32 tensors by name and a few words of metadata."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from artifacts import durable, filesystem
from artifacts.bundle import Array
from artifacts.errors import Corrupt, InvalidInput, Missing


def write_safetensors(path: str | Path, tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """Writes the new file `path`, whole or not at all. InvalidInput if it is there already; NoSpace, ReadOnly."""
    path = Path(path).absolute()
    if filesystem.exists(path):
        raise InvalidInput(f"{path} is there already: remove it or name another file")
    scratch = path.with_name(f".{path.name}.partial")
    with durable.write_errors(path):
        try:
            save_file(dict(tensors), scratch, dict(metadata))
            descriptor = filesystem.open_read(scratch)
            try:
                filesystem.sync(descriptor)
            finally:
                filesystem.close(descriptor)
            filesystem.rename(scratch, path)
        except SafetensorError as error:
            raise InvalidInput(f"cannot write {path}: {error}") from error
        finally:
            scratch.unlink(missing_ok=True)
        filesystem.sync_directory(path.parent)


def read_safetensors(path: str | Path) -> tuple[dict[str, Array], dict[str, str]]:
    """The tensors and the metadata of a file. Missing, Corrupt; InvalidInput for tensors that are not fp32."""
    what = f"safetensors file {path}"
    try:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118  # not a mapping
                found = file.get_slice(name).get_dtype()
                if found != "F32":
                    raise InvalidInput(f"{what}: tensor {name} is {found}, expected F32: convert it where it was made")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, dict(file.metadata() or {})
    except FileNotFoundError as error:
        raise Missing(f"{what}: no such file") from error
    except (SafetensorError, OSError) as error:
        raise Corrupt(f"{what}: {error}") from error
