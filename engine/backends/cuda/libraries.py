"""Finding NVIDIA's shared libraries: in their package where that is installed, else wherever the system looks."""

from importlib.metadata import PackageNotFoundError, files


def packaged_library(package: str, library: str) -> str:
    """The path of `library` in an installed package, or its bare name for the system's loader."""
    try:
        for file in files(package) or []:
            if file.name == library:
                return str(file.locate())
    except PackageNotFoundError:
        pass
    return library
