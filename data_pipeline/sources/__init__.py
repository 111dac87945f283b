"""Sources of documents, as plug-ins.

A source is one module with one `SourceSpec`: its fields are what the user writes, its `kind`
selects it, and `documents` yields what it holds. To add one, write the module and list its class in
`Source`.
"""

from typing import Annotated

from pydantic import Field

from data_pipeline.sources.document import Document, Places, SourceSpec
from data_pipeline.sources.file import FileSource
from data_pipeline.sources.url import UrlSource
from data_pipeline.sources.wheel import WheelSource

Source = Annotated[WheelSource | FileSource | UrlSource, Field(discriminator="kind")]

__all__ = ["Document", "FileSource", "Places", "Source", "SourceSpec", "UrlSource", "WheelSource"]
